"""OpenTelemetry: one trace a request, from the client's span to the worker's; nothing secret."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from structlog.testing import capture_logs

from service.auth_settings import ClientKey
from service.control.config import ControlConfig, PolicyName
from service.control.events import Role
from service.forward_config import ForwardConfig
from service.secrets import Secret
from service.spans import SpanTracer
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import (
    DONE,
    HandlerTransport,
    Stage,
    answer,
    completion,
    event,
    stream,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "tracestate": "vendor=a,other=b"}
KEY = "sk-very-secret-key"
PROMPT = "the quick brown fox"


class Spans:
    """What a tracer made, by name."""

    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.tracer = SpanTracer(SimpleSpanProcessor(self.memory))

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self.memory.get_finished_spans()

    def names(self) -> list[str]:
        return sorted(span.name for span in self.all)

    def one(self, name: str) -> ReadableSpan:
        found = [span for span in self.all if span.name == name]
        assert len(found) == 1, (name, self.names())
        return found[0]

    def edge(self) -> ReadableSpan:
        found = [span for span in self.all if span.kind is SpanKind.SERVER]
        assert len(found) == 1
        return found[0]

    def parent_name(self, name: str) -> str:
        by_id = {span.context.span_id: span.name for span in self.all if span.context}
        parent = self.one(name).parent
        assert parent is not None
        return by_id[parent.span_id]

    def text(self) -> str:
        return "\n".join(span.to_json() for span in self.all)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def served(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(0.5)
    return stream((0.25, event()), (1.0, event()), (0.25, DONE))


def play(
    scenario: Callable[[Stage], object],
    *,
    workers: dict[str, HandlerTransport] | None = None,
    **fields: object,
) -> tuple[Spans, dict[str, HandlerTransport]]:
    spans = Spans()
    there = workers or {"a": HandlerTransport(served)}

    async def run() -> None:
        stage = Stage(dict(there), tracer=spans.tracer, **fields)  # type: ignore[arg-type]
        async with stage.open():
            await scenario(stage)  # type: ignore[misc]

    run_virtual(run())
    return spans, there


def test_a_request_is_one_trace_from_the_clients_span_to_the_workers() -> None:
    async def scenario(stage: Stage) -> None:
        exchange = await stage.post(completion(stream=True), headers=PARENT)
        assert exchange.status == 200

    spans, workers = play(scenario)
    assert spans.names() == ["POST /v1/completions", "connect", "decide", "queue", "relay"]
    edge, relay = spans.edge(), spans.one("relay")
    assert edge.parent is not None
    assert f"{edge.parent.span_id:016x}" == CALLER
    assert {f"{span.context.trace_id:032x}" for span in spans.all if span.context} == {TRACE_ID}
    assert spans.parent_name("queue") == "POST /v1/completions"
    assert spans.parent_name("decide") == "queue"
    assert spans.parent_name("relay") == "POST /v1/completions"
    assert spans.parent_name("connect") == "relay"
    assert relay.context is not None
    (sent,) = workers["a"].requests
    assert sent.headers["traceparent"] == f"00-{TRACE_ID}-{relay.context.span_id:016x}-01"
    assert sent.headers["tracestate"] == PARENT["tracestate"]
    assert sent.headers.get_list("traceparent") == [sent.headers["traceparent"]]


def test_spans_hold_what_an_operator_asks_for_and_neither_keys_nor_prompts() -> None:
    async def scenario(stage: Stage) -> None:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
        await stage.post(completion(stream=True, prompt=PROMPT), headers=headers)

    control = ControlConfig(policy=PolicyName.ONLINE_LP)
    spans, _ = play(scenario, keys=(ClientKey(key=Secret(KEY)),), control=control)
    edge = attributes(spans.edge())
    assert edge["gen_ai.operation.name"] == "text_completion"
    assert edge["gen_ai.request.model"] == "m"
    assert edge["gen_ai.usage.output_tokens"] == 2
    assert edge["http.response.status_code"] == 200
    assert (edge["bidgate.outcome"], edge["bidgate.worker"]) == ("completed", "a")
    assert edge["bidgate.request_id"] == "mine"
    assert {"bidgate.queue_wait_s", "bidgate.price", "bidgate.price_batch"} <= edge.keys()
    assert edge["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.75)
    decide = attributes(spans.one("decide"))
    assert (decide["bidgate.decision"], decide["bidgate.worker"]) == ("start", "a")
    assert "bidgate.price" in decide
    for secret in (KEY, PROMPT):
        assert secret not in spans.text()


def test_a_wrong_traceparent_begins_a_trace_of_our_own() -> None:
    wrong = [
        {"traceparent": "00-" + "0" * 32 + f"-{CALLER}-01", "tracestate": "a=b"},
        {"traceparent": "nonsense"},
        [("traceparent", PARENT["traceparent"]), ("traceparent", PARENT["traceparent"])],
    ]
    for headers in wrong:

        async def scenario(stage: Stage, headers: object = headers) -> None:
            await stage.post(headers=headers)  # type: ignore[arg-type]

        spans, workers = play(scenario, workers={"a": HandlerTransport(lambda _: fine())})
        assert spans.edge().parent is None
        (sent,) = workers["a"].requests
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", sent.headers["traceparent"])
        assert "tracestate" not in sent.headers


async def fine() -> httpx.Response:
    return answer()


def test_a_trace_that_its_client_does_not_sample_is_passed_on_and_not_recorded() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.post(headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-00"})

    spans, workers = play(scenario, workers={"a": HandlerTransport(lambda _: fine())})
    assert spans.all == ()
    (sent,) = workers["a"].requests
    assert sent.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert sent.headers["traceparent"].endswith("-00")


def test_a_light_request_has_no_queue_but_reaches_its_worker() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.post({"model": "m", "input": PROMPT}, path="/v1/embeddings", headers=PARENT)

    spans, workers = play(scenario, workers={"a": HandlerTransport(lambda _: fine())})
    assert spans.names() == ["POST /v1/embeddings", "connect", "relay"]
    assert attributes(spans.edge())["gen_ai.operation.name"] == "embeddings"
    assert workers["a"].requests[0].headers["traceparent"].startswith(f"00-{TRACE_ID}-")


def test_both_legs_of_a_pair_are_children_of_the_request() -> None:
    async def prefill(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"kv_transfer_params": {"remote_engine_id": "e"}})

    async def scenario(stage: Stage) -> None:
        assert (await stage.post(completion(stream=True), headers=PARENT)).status == 200

    spans, workers = play(
        scenario,
        workers={"p": HandlerTransport(prefill), "d": HandlerTransport(served)},
        roles={"p": Role.PREFILL, "d": Role.DECODE},
    )
    for name, worker in (("prefill", "p"), ("relay", "d")):
        span = spans.one(name)
        assert spans.parent_name(name) == "POST /v1/completions"
        assert attributes(span)["bidgate.worker"] == worker
        assert span.context is not None
        (sent,) = workers[worker].requests
        assert sent.headers["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"
    assert spans.names().count("connect") == 2


def test_a_second_try_is_a_leg_and_a_wait_of_its_own() -> None:
    async def away(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async def scenario(stage: Stage) -> None:
        assert (await stage.post(completion())).status in (502, 503)

    spans, _ = play(
        scenario,
        workers={"a": HandlerTransport(away), "b": HandlerTransport(away)},
        forward=ForwardConfig(retries_max=1),
    )
    assert spans.names().count("relay") == spans.names().count("queue") == 2
    for span in spans.all:
        if span.name in ("relay", "connect"):
            assert attributes(span)["error.type"] == "ConnectError"
    assert spans.edge().status.is_ok is False


def test_refusals_of_queue_and_door_are_traced() -> None:
    async def unknown(stage: Stage) -> None:
        assert (await stage.post(completion(model="other"))).status == 404

    spans, _ = play(unknown)
    assert spans.names() == ["POST /v1/completions", "decide", "queue"]
    assert attributes(spans.one("decide"))["bidgate.reason"] == "unknown_model"
    assert attributes(spans.edge())["bidgate.outcome"] == "refused"

    async def keyless(stage: Stage) -> None:
        assert (await stage.post(headers={"authorization": "Bearer no"} | PARENT)).status == 401

    with capture_logs() as lines:
        spans, _ = play(keyless, keys=(ClientKey(key=Secret(KEY)),))
    assert spans.names() == ["POST /v1/completions"]
    assert attributes(spans.edge())["error.type"] == "invalid_api_key"
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["status"], line["outcome"], line["trace_id"]) == (401, "refused", TRACE_ID)


@pytest.mark.parametrize("after_s", [0.2, 1.0], ids=["before the answer", "in the answer"])
def test_a_client_that_leaves_ends_every_span(after_s: float) -> None:
    async def scenario(stage: Stage) -> None:
        exchange = Exchange()
        asyncio.get_running_loop().call_later(after_s, exchange.leave)
        await stage.post(completion(stream=True), exchange=exchange)

    spans, _ = play(scenario)
    assert spans.names() == ["POST /v1/completions", "connect", "decide", "queue", "relay"]
    assert attributes(spans.edge())["bidgate.outcome"] == "cancelled"
    assert attributes(spans.one("relay"))["bidgate.outcome"] == "cancelled"


def test_names_of_spans_are_few_whatever_clients_ask_for() -> None:
    async def scenario(stage: Stage) -> None:
        for method, path in (("GET", "/v1/anything/x"), ("BREW", "/v1/tea"), ("GET", "/v1/b/c")):
            await stage.send(method, path)

    spans, _ = play(scenario, workers={"a": HandlerTransport(lambda _: fine())})
    edges = {span.name for span in spans.all if span.kind is SpanKind.SERVER}
    assert edges == {"GET /v1/*", "_OTHER /v1/*"}


def test_without_tracing_the_clients_trace_passes_untouched_and_is_in_the_log() -> None:
    worker = HandlerTransport(lambda _: fine())
    sent = [
        *PARENT.items(),
        ("tracestate", "third=c"),
        ("baggage", "user=1"),
    ]

    async def run() -> None:
        async with Stage({"a": worker}).open() as stage:
            await stage.post(headers=sent)

    with capture_logs() as lines:
        run_virtual(run())
    headers = worker.requests[0].headers
    assert headers["traceparent"] == PARENT["traceparent"]
    assert headers.get_list("tracestate") == [PARENT["tracestate"], "third=c"]
    assert headers["baggage"] == "user=1"
    (line,) = [line for line in lines if line["event"] == "request"]
    assert line["trace_id"] == TRACE_ID


def test_the_log_line_has_outcome_worker_waits_prices_times_and_tokens() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.post(completion(stream=True), headers=PARENT)

    with capture_logs() as lines:
        play(scenario)
    (line,) = [line for line in lines if line["event"] == "request"]
    assert {
        *("request_id", "trace_id", "path", "model", "status", "outcome", "worker", "starts"),
        *("queued_s", "ttft_s", "e2e_s", "overhead_s", "upload_s", "prompt_tokens"),
        *("decode_tokens", "price", "price_batch", "price_kv"),
    } <= line.keys()


def test_without_tracing_the_library_is_not_even_imported() -> None:
    code = (
        "import sys; from service.app import build; "
        "from service.settings import MockConfig, Settings; "
        "build(Settings(mock=MockConfig(workers=1))); "
        "ours = ('opentelemetry.sdk', 'opentelemetry.exporter', 'service.spans'); "
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
