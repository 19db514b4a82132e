"""What bidgate takes for granted about a vLLM worker, asked of the engine without a router."""

from __future__ import annotations

import asyncio
import json
import statistics
from typing import TYPE_CHECKING

import httpx
import pytest

from service.engine_metrics import WANTED_SERIES, parse_engine_page
from tests.vllm.engine import (
    client,
    completion,
    eventually,
    lines_of,
    sample,
    settle,
    stream,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.vllm.conftest import Fleet

ABORT_MAX_S = 1.0
# Series whose old names the parser also knows; a page has one of each pair.
RENAMED = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds_sum": "vllm:inter_token_latency_seconds_sum",
    "vllm:time_per_output_token_seconds_count": "vllm:inter_token_latency_seconds_count",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
}


@pytest.fixture
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the first worker, which is idle before and after."""
    async with client(fleet.urls[0]) as opened:
        await settle(opened)
        yield opened
        await settle(opened)


async def test_every_worker_lists_its_model_and_context_length(fleet: Fleet) -> None:
    for url in fleet.urls:
        async with client(url) as http:
            listed = (await http.get("/v1/models")).json()["data"]
        assert fleet.model in [entry["id"] for entry in listed]
        assert listed[0]["max_model_len"] > 0


async def test_a_completion_has_the_length_asked_for(http: httpx.AsyncClient, fleet: Fleet) -> None:
    body = completion(fleet.model, prompt_tokens=37, decode_tokens=11)
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 11
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stream_has_an_event_for_each_token_or_for_a_few_together(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    seen = await stream(http, completion(fleet.model, prompt_tokens=20, decode_tokens=40))
    assert seen.status == 200
    assert seen.ended_by_done
    assert seen.error is None
    assert seen.decode_tokens == 40
    # Tokens that come while the engine's front end is busy share an event.
    assert 4 <= len(seen.arrived_s) <= 40


async def test_streamed_and_whole_answers_have_the_same_text(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    body = completion(fleet.model, prompt_tokens=20, decode_tokens=24)
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    assert (await stream(http, body)).text == whole


async def test_the_page_has_every_series_that_the_parser_wants(http: httpx.AsyncClient) -> None:
    full = (await http.get("/metrics")).content
    names = {line.split(b"{")[0].split(b" ")[0].decode() for line in full.splitlines()}
    absent = {
        name for name in WANTED_SERIES if name not in names and RENAMED.get(name) not in names
    }
    assert absent == set()
    page = parse_engine_page(full)
    assert page.malformed_lines == 0
    assert page.process_start_s is not None
    told = {name: getattr(page.total, name) for name in type(page.total).__slots__}
    assert [name for name, value in told.items() if value is None] == []


async def test_the_filtered_page_says_the_same_as_the_whole_one(http: httpx.AsyncClient) -> None:
    whole = parse_engine_page((await http.get("/metrics")).content).total
    assert await sample(http) == whole


async def test_the_cache_layout_is_told(http: httpx.AsyncClient, fleet: Fleet) -> None:
    now = await sample(http)
    assert now.block_tokens is not None
    assert now.kv_capacity_tokens is not None
    if fleet.owned:
        options = fleet.owned[0].options
        assert now.block_tokens == options.block_tokens
        assert now.kv_capacity_tokens == (options.kv_blocks - 1) * options.block_tokens


async def test_used_kv_is_within_two_blocks_of_what_the_requests_hold(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    block_tokens = (await sample(http)).block_tokens
    assert block_tokens is not None
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = completion(fleet.model, prompt_tokens=200, decode_tokens=400, stream_options=usage)
    reader = lines_of(http, body)
    seen = 0
    while seen < 100:
        line = await anext(reader)
        seen = json.loads(line.removeprefix("data:"))["usage"]["completion_tokens"]
    now = await sample(http)
    await reader.aclose()
    assert now.running == 1
    assert now.kv_tokens_used is not None
    # The engine goes on between our last event and its answer: one block of slack each way.
    assert abs(now.kv_tokens_used - (200 + seen)) <= 2 * block_tokens


async def test_inter_token_latency_is_the_iteration_time_that_clients_see(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    before = await sample(http)
    bodies = [
        completion(fleet.model, prompt_tokens=16, decode_tokens=200, salt=salt) for salt in range(4)
    ]
    streams = await asyncio.gather(*(stream(http, body) for body in bodies))
    after = await settle(http)
    assert before.token_latency_sum_s is not None
    assert before.token_latency_count is not None
    assert after.token_latency_sum_s is not None
    assert after.token_latency_count is not None
    gaps = after.token_latency_count - before.token_latency_count
    assert gaps == 4 * 199
    iteration_s = (after.token_latency_sum_s - before.token_latency_sum_s) / gaps
    seen_s = statistics.fmean((s.arrived_s[-1] - s.arrived_s[0]) / 199 for s in streams)
    assert iteration_s == pytest.approx(seen_s, rel=0.15)


async def aborted_within(http: httpx.AsyncClient) -> float | None:
    """Seconds until nothing runs or waits any more."""

    async def idle() -> bool:
        now = await sample(http)
        return now.running == 0 and now.waiting == 0 and now.kv_tokens_used == 0

    return await eventually(idle, ABORT_MAX_S)


async def test_leaving_a_stream_aborts_it_in_the_engine(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    reader = lines_of(http, completion(fleet.model, prompt_tokens=16, decode_tokens=1900))
    await anext(reader)
    assert (await sample(http)).running == 1
    await reader.aclose()
    assert await aborted_within(http) is not None


async def test_leaving_a_request_without_a_stream_aborts_it_in_the_engine(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    body = completion(fleet.model, prompt_tokens=16, decode_tokens=1900)
    asked = asyncio.create_task(http.post("/v1/completions", json=body))

    async def running() -> bool:
        return (await sample(http)).running == 1

    assert await eventually(running, 10.0) is not None
    asked.cancel()
    await asyncio.wait([asked])
    assert await aborted_within(http) is not None


async def test_more_requests_than_slots_wait_in_the_engine(
    http: httpx.AsyncClient, fleet: Fleet
) -> None:
    extra = 3
    bodies = [
        completion(fleet.model, prompt_tokens=8, decode_tokens=240, salt=salt)
        for salt in range(fleet.batch_limit + extra)
    ]
    asked = [asyncio.create_task(stream(http, body)) for body in bodies]

    async def full() -> bool:
        now = await sample(http)
        return now.running == fleet.batch_limit and now.waiting == extra

    waited = await eventually(full, 10.0, poll_s=0.005)
    streams = await asyncio.gather(*asked)
    assert waited is not None
    assert all(seen.decode_tokens == 240 and seen.error is None for seen in streams)
