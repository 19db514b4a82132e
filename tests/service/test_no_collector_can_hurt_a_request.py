"""Spans go to a collector over HTTP; one that hangs, refuses or fails is nobody's problem."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.settings import Settings
from service.settings_text import SettingsError
from service.tracing_config import TracingConfig
from tests.service.live import mock, serving_mocks, until

REQUEST = {"model": "mock", "prompt": "x", "max_tokens": 2, "ignore_eos": True, "stream": True}


class Collector:
    """An OTLP collector that behaves as it is told: "good", "hangs", "fails".

    Attributes:
        got: what it was sent.
    """

    def __init__(self, manner: str) -> None:
        self.got: list[ExportTraceServiceRequest] = []
        self.asked = 0
        self.manner = manner
        self.released = threading.Event()
        self.url = ""

    def names(self) -> set[str]:
        return {
            span.name
            for request in self.got
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def services(self) -> set[str]:
        return {
            pair.value.string_value
            for request in self.got
            for resource in request.resource_spans
            for pair in resource.resource.attributes
            if pair.key == "service.name"
        }

    @contextmanager
    def listening(self) -> Iterator[Collector]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.asked += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.manner == "hangs":
                    collector.released.wait(60)
                    return
                if collector.manner == "good":
                    collector.got.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if collector.manner == "good" else 400)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")


async def served(tracing: TracingConfig, collector: Collector | None = None) -> dict[str, int]:
    """Serve some requests with spans; what became of these."""
    async with serving_mocks([mock(time_scale=10.0)], tracing=tracing) as live:
        posts = [live.client.post(f"{live.url}/v1/completions", json=REQUEST) for _ in range(20)]
        for reply in await asyncio.gather(*posts):
            assert reply.status_code == 200
            assert reply.content.endswith(b"data: [DONE]\n\n")
        if collector is not None:
            await until(lambda: collector.asked > 0, within_s=20.0)
        page = (await live.client.get(f"{live.url}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("bidgate_spans_total{")]
        return {line.split('"')[1]: int(float(line.rsplit(" ", 1)[1])) for line in lines}


async def test_spans_reach_a_collector_in_its_own_protocol() -> None:
    with Collector("good").listening() as collector:
        seen = await served(TracingConfig(enabled=True, endpoint=collector.url), collector)
        # What was left at the end was sent at the end.
        assert sum(1 for _ in collector.got) >= 1
        assert collector.names() == {
            *("POST /v1/completions", "queue", "decide", "relay", "connect")
        }
        assert collector.services() == {"bidgate"}
        assert seen["failed"] == 0
        assert seen["ended"] >= 20 * 4


async def test_the_standard_variables_say_where_the_collector_is_and_who_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector("good").listening() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front-door")
        await served(TracingConfig(enabled=True), collector)
        assert collector.services() == {"front-door"}


@pytest.mark.parametrize("manner", ["hangs", "fails"])
async def test_a_collector_that_hangs_or_fails_delays_neither_requests_nor_the_end(
    manner: str,
) -> None:
    with Collector(manner).listening() as collector:
        tracing = TracingConfig(enabled=True, endpoint=collector.url, stop_s=0.2)
        async with asyncio.timeout(25.0):
            seen = await served(tracing, collector)
        assert seen["exported"] == 0
        assert seen["ended"] >= 20 * 4


async def test_a_collector_that_is_not_there_is_no_matter() -> None:
    tracing = TracingConfig(enabled=True, endpoint="http://127.0.0.1:9", stop_s=0.2)
    async with asyncio.timeout(25.0):
        assert (await served(tracing))["exported"] == 0


async def test_spans_that_nobody_takes_stay_within_their_bound() -> None:
    with Collector("hangs").listening() as collector:
        tracing = TracingConfig(enabled=True, endpoint=collector.url, spans_max=512, stop_s=0.0)
        async with serving_mocks([mock(time_scale=10.0)], tracing=tracing) as live:
            light = {"model": "mock", "prompt": "x"}
            for _ in range(20):
                posts = [live.client.post(f"{live.url}/tokenize", json=light) for _ in range(20)]
                assert {reply.status_code for reply in await asyncio.gather(*posts)} == {200}
            # 1,200 spans ended: one batch hangs, 512 wait, the others are gone.
            page = (await live.client.get(f"{live.url}/metrics")).text
            assert 'bidgate_spans_total{result="ended"} 1200.0' in page


def test_settings_that_cannot_be_used_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="endpoint must begin with http"):
        TracingConfig(endpoint="collector:4317")
    with pytest.raises(ValueError, match="spans_max must be at least 512"):
        TracingConfig(spans_max=1)
    monkeypatch.setattr("service.tracing_config.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"pip install 'bidgate\[otel\]'"):
        Settings(workers=("http://a:1",), tracing=TracingConfig(enabled=True)).check()
