"""The proxy benchmark: plain workers, a client that counts what is lost, and its page."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen import bench_proxy
from loadgen.bench_proxy import DEFAULT, DIRECT, Part
from loadgen.plain_client import HEALTH, closed_loop, connect, open_loop, posted
from loadgen.plain_worker import ANSWER, EVENTS, PlainWorker
from loadgen.proxy_command import page, proxy

BODY = {"model": "m", "prompt": "x", "max_tokens": 4, "stream": False}


async def a_worker(factory: type[asyncio.Protocol] = PlainWorker) -> tuple[asyncio.Server, str]:
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_whole_answers_are_counted_and_streams_to_their_end() -> None:
    server, url = await a_worker()
    async with server:
        small = await closed_loop(url, posted(BODY, {}), 4, 0.2)
        steady = await open_loop(url, posted(BODY, {}), 4, 200.0, 0.2)
        streams = await closed_loop(url, posted({**BODY, "stream": True}, {}), 3, 0.1)
    assert len(small.latencies_s) > 4
    assert len(steady.latencies_s) == 40
    assert len(streams.latencies_s) == 3
    assert min(streams.latencies_s) > (EVENTS - 1) * 0.2
    assert small.lost == steady.lost == streams.lost == 0


class Failing(PlainWorker):
    """Answers every second request with an error, and closes at every fourth."""

    asked = 0

    def _answer(self, head: bytes, body: bytes) -> None:
        Failing.asked += 1
        if Failing.asked % 4 == 0 and self._transport is not None:
            self._transport.close()
        elif Failing.asked % 2 == 0:
            self._write(b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n")
        else:
            super()._answer(head, body)


async def test_errors_and_broken_connections_are_lost_requests() -> None:
    server, url = await a_worker(Failing)
    async with server:
        (connection,) = await connect(url, 1)
        got = [await connection.ask(HEALTH) for _ in range(6)]
    assert got == [True, False, True, False, False, False]


def test_the_worker_answers_requests_cut_anywhere() -> None:
    class Pipe:
        def __init__(self) -> None:
            self.sent = b""

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.sent += data

    worker, pipe = PlainWorker(), Pipe()
    worker.connection_made(pipe)  # type: ignore[arg-type]
    for byte in posted(BODY, {"x": "y"}) * 2:
        worker.data_received(bytes([byte]))
    assert pipe.sent.count(ANSWER) == 2


@pytest.mark.parametrize("lost", [0, 3])
def test_the_page_tells_ratios_lag_and_what_was_lost(lost: int) -> None:
    part = Part(
        load="small",
        way=DIRECT,
        answered=100,
        lost=0,
        per_s=50.0,
        p50_ms=1.0,
        p99_ms=2.0,
        lag_p50_ms=0.5,
        lag_p99_ms=1.0,
        cpu_ms=None,
        cpu_share=None,
    )
    routed = replace(part, way=DEFAULT, lost=lost, p50_ms=3.0, per_s=25.0, cpu_ms=2.0)
    odd = replace(routed, way="with tracing", cpu_ms=3.0)
    streams = replace(routed, load="9 streams", cpu_ms=1.6, lag_p99_ms=21.0)
    text = page([part, routed, replace(routed, p50_ms=5.0), odd, streams], 2, "the command")
    assert "4.00 of the median time (+3.00 ms), 0.50 of the answers a second" in text
    assert f"{2 * lost} of {200 + 2 * lost} lost" in text
    assert "with tracing: 1.50 of the CPU as shipped" in text
    assert "100 µs of CPU an event; lag p99 21.0 ms, goal 20 ms **not met**" in text


def test_a_small_measurement_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_proxy, "SETTLE_S", 0.1)
    monkeypatch.setattr(bench_proxy, "variants", lambda _: {DEFAULT: {}})
    docs = tmp_path / "proxy.md"
    code = proxy(out=tmp_path, docs=docs, workers=1, streams=2, rate=20.0, seconds=0.3, rounds=1)
    assert code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    ways = [(part["load"].split(",")[0], part["way"]) for part in summary["parts"]]
    assert ways == [
        ("small", DEFAULT),
        ("small", DIRECT),
        ("small", DEFAULT),
        ("2 streams of 16 events", DIRECT),
        ("2 streams of 16 events", DEFAULT),
    ]
    assert all(part["answered"] > 0 and part["lost"] == 0 for part in summary["parts"])
    assert summary["parts"][0]["cpu_ms"] > 0
    assert "routed over direct" in docs.read_text()


@pytest.mark.parametrize("fields", [{"workers": 0}, {"seconds": 0.0}, {"rate": -1.0}])
def test_a_measurement_of_nothing_is_refused(fields: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        proxy(out=tmp_path, **fields)  # type: ignore[arg-type]
