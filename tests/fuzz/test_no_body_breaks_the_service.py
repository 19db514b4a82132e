"""Bodies, headers, queries and metrics pages made by Hypothesis: an answer each, and no 500."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.app import build
from service.control.events import WorkerState
from service.settings import MockConfig, Settings
from service.surface import LIGHT, QUEUED
from tests.clock import run_virtual
from tests.fuzz.conftest import examples, forget_applications
from tests.service.scripted_server import ScriptedServer, page
from tests.service.stage import HandlerTransport, Stage, answer
from tests.service.watched import watching

BATCH = 10
FUZZ = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NEWER = "/v1/something/newer"
"""A route that nobody here knows."""
KNOWN_PATHS = (*sorted(QUEUED), *sorted(LIGHT), NEWER)
TARGETS = (
    *(("POST", path) for path in KNOWN_PATHS),
    *(("DELETE", path) for path in ("/v1/responses/resp_1", NEWER)),
    *(("GET", path) for path in ("/v1/responses/resp_1", "/tokenizer_info", NEWER)),
    *(("POST", "/v1/responses/resp_1/cancel"), ("PUT", NEWER)),
)
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n'
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
)

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["m", "", "\ud800", "x" * 5000])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    (
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of"),
        *("stream", "stream_options", "priority", "ignore_eos", "min_tokens", "tools", "nvext"),
        *("vllm_xargs", "kv_transfer_params", "echo", "suffix", "logprobs", "user"),
        *("input", "instructions", "max_output_tokens", "previous_response_id", "request_id"),
        *("system", "sampling_params", "token_ids", "query", "documents", "tokens", "truncation"),
        *("truncate_prompt_tokens", "metadata", "background", "store", "conversation"),
    )
)
MESSAGES = [{"role": "user", "content": "x"}]
RIGHT: tuple[dict[str, object], ...] = (
    {"model": "m", "prompt": "x"},
    {"model": "m", "messages": MESSAGES, "max_tokens": 3},
    {"model": "m", "messages": [MESSAGES, MESSAGES]},
    {"model": "m", "input": MESSAGES, "max_output_tokens": 3},
    {"model": "m", "token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
    {"model": "m", "query": "x", "documents": ["x", "y"]},
)
almost_right = st.builds(
    lambda right, extra: {**right, **extra},
    st.sampled_from(RIGHT),
    st.dictionaries(fields, values, max_size=8),
)
NUMBERS = (
    *("0", "-0", "-1", "1", "1.5", "1e3", "1e-320", "5e-324", "1e308", "1.8e308", "-1e400"),
    *("nan", "-nan", "inf", "-inf", "Infinity", "9" * 30, "9" * 5000, "0x10", "1_000", " 7 ", "+7"),
    *("1,2", "\xb2", "\xa07", "1e", "e1", ".", "-", ""),
)
header_text = st.text(
    st.characters(min_codepoint=32, max_codepoint=255), max_size=40
) | st.sampled_from((*NUMBERS, "application/json", "multipart/form-data; boundary=b"))
header_names = st.sampled_from(
    (
        *("x-request-id", "x-bidgate-tenant", "x-bidgate-value", "x-bidgate-ttft-ms"),
        *("x-bidgate-max-wait-ms", "x-bidgate-decode-tokens", "x-llm-d-slo-ttft-ms"),
        *("authorization", "content-length", "content-type", "connection", "accept-encoding"),
        *("x-data-parallel-rank", "x-session-id", "traceparent", "prefer", "content-encoding"),
        *("x-bidgate-priority", "x-request-priority", "x-bidgate-e2e-ms", "x-bidgate-deadline-ms"),
        *("x-bidgate-no-queue", "x-bidgate-worker"),
    )
)
headers = st.lists(st.tuples(header_names, header_text), max_size=5)
numeric = st.dictionaries(
    st.sampled_from(("priority", "max_tokens", "min_tokens", "n", "best_of", "stream", "nvext")),
    st.sampled_from((*NUMBERS, "1e400", "true", "null", "-9" * 20, "[1]", '"1"')),
    max_size=4,
).map(
    lambda found: (
        '{"model":"m","prompt":"x"'
        + "".join(f',"{name}":{text or 0}' for name, text in found.items())
        + "}"
    ).encode()
)

bodies = (
    st.binary(max_size=200)
    | values.map(lambda value: json.dumps(value).encode())
    | numeric
    | st.just(FORM)
    | st.integers(0, len(FORM)).map(lambda end: FORM[:end])
    | almost_right.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
)


async def fine(_: httpx.Request) -> httpx.Response:
    return answer()


@FUZZ
@given(cases=st.lists(st.tuples(st.sampled_from(TARGETS), bodies, headers), min_size=BATCH))
def test_every_body_gets_an_answer_of_the_right_shape(
    cases: list[tuple[tuple[str, str], bytes, list[tuple[str, str]]]], tally: Counter[str]
) -> None:
    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(fine)}).open() as stage:
            for (method, path), body, extra in cases:
                exchange = await stage.send(method, path, body, headers=extra)
                tally[str(exchange.status)] += 1
                late = {504} if "x-bidgate-deadline-ms" in dict(extra) else set()
                allowed = {200, 400, 404, 413, 415, 429} | late
                assert exchange.status in allowed, (path, extra, exchange.body)
                assert exchange.complete
                if exchange.status != 200:
                    assert set(exchange.error) == {"message", "type", "param", "code"}
            assert stage.queue.held == 0

    run_virtual(scenario())
    forget_applications()


def documented() -> list[tuple[str, str]]:
    """(method, path) of everything in our own OpenAPI document."""
    document: dict[str, Any] = build(Settings(mock=MockConfig(workers=1))).openapi()
    return [(method.upper(), path) for path, item in document["paths"].items() for method in item]


ROUTES = documented()


@FUZZ
@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(ROUTES),
            st.sampled_from(("", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X")),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
            headers,
            st.binary(max_size=50),
        ),
        min_size=BATCH,
    )
)
def test_every_documented_route_answers_any_method_query_and_headers(
    cases: list[tuple[tuple[str, str], str, str, list[tuple[str, str]], bytes]],
    tally: Counter[str],
) -> None:
    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(fine)}).open() as stage:
            for (method, path), other, query, extra, body in cases:
                used = other or method
                exchange = await stage.send(used, f"{path}?{query}", body, headers=extra)
                tally[str(exchange.status)] += 1
                late = {504} if "x-bidgate-deadline-ms" in dict(extra) else set()
                fine_here = exchange.status < 500 or path == "/ready" or exchange.status in late
                assert fine_here, (used, path, extra, exchange.body)
                assert exchange.complete
                if used == method:
                    assert exchange.status in {200, 400, 401, 404, 413, 415, 422, 503} | late

    run_virtual(scenario())
    forget_applications()


pages = st.binary(max_size=300) | st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("vllm:num_requests_running", "vllm:num_requests_waiting"),
                *("vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
                *("vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count"),
                *("vllm:generation_tokens_total", "process_start_time_seconds"),
            )
        ),
        st.sampled_from(
            ('{engine="0"}', '{engine="1"}', "", '{block_size="0",num_gpu_blocks="-1"}')
        ),
        st.sampled_from(("0", "-1", "NaN", "+Inf", "-Inf", "1e308", "1e-308", "9" * 40, "x", "3")),
    ),
    max_size=12,
).map(lambda lines: "".join(f"{name}{labels} {value}\n" for name, labels, value in lines).encode())


@FUZZ
@given(shown=st.lists(pages, min_size=BATCH))
def test_no_page_of_metrics_takes_a_worker_that_answers_out_of_use(
    shown: list[bytes], tally: Counter[str]
) -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page())
        async with watching({"a": server}) as watched:
            for one in shown:
                server.metrics = one
                await asyncio.sleep(0.6)
                tally["pages"] += 1
                for report in watched.reports()[-3:]:
                    assert report.iteration_s is None or report.iteration_s > 0
                    assert report.running is None or report.running >= 0
            assert watched.states["a"] == [WorkerState.DOWN, WorkerState.UP]

    run_virtual(scenario())
    forget_applications()


def test_the_documented_routes_are_found() -> None:
    assert {("GET", "/ready"), ("GET", "/v1/models"), ("GET", "/metrics")} <= set(ROUTES)
