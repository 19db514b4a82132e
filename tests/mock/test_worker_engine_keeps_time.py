"""The mock engine on a virtual clock: tokens come exactly when the decode model says."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from service.engine_metrics import parse_engine_page
from service.mock.decode_model import DecodeWorker
from service.mock.engine import Decode, EngineDeadError, Generation, MockEngine, QueueFullError
from service.mock.profiles import LLAMA_3_8B_A100
from service.mock.worker_config import MockWorkerConfig
from tests.clock import VirtualTimeLoop, run_virtual
from tests.mock.mock_client import in_process, unit_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def running(config: MockWorkerConfig) -> AsyncIterator[MockEngine]:
    engine = MockEngine(config)
    task = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    yield engine
    task.cancel()
    await asyncio.wait([task])


async def token_times_s(generation: Generation) -> list[float]:
    """When each token of a single sequence came, on the loop's clock."""
    times_s: list[float] = []
    while not generation.ended:
        await generation.news.wait()
        generation.news.clear()
        new = generation.decodes[0].produced - len(times_s)
        times_s += [asyncio.get_running_loop().time()] * new
    return times_s


def expected_s(config: MockWorkerConfig, lengths: list[tuple[int, int]]) -> dict[int, list[float]]:
    """The same requests through the pure model, all submitted at time 0."""
    model = DecodeWorker(config.profile, config.batch_limit, config.kv_tokens, config.block_tokens)
    for number, (prompt_tokens, decode_tokens) in enumerate(lengths):
        model.submit(str(number), prompt_tokens, decode_tokens)
    now_s = 0.0
    times_s: dict[int, list[float]] = {number: [] for number in range(len(lengths))}
    while (duration_s := model.begin_iteration()) is not None:
        now_s += duration_s / config.time_scale
        finished = model.end_iteration().finished
        for number, (_, decode_tokens) in enumerate(lengths):
            name = str(number)
            produced = (
                model.decode_tokens(name)
                if name in model
                else decode_tokens * (name in finished or bool(times_s[number]))
            )
            times_s[number] += [now_s] * (produced - len(times_s[number]))
    return times_s


@pytest.mark.parametrize("time_scale", [1.0, 7.0])
def test_tokens_come_when_the_model_says_preemption_included(time_scale: float) -> None:
    config = MockWorkerConfig(
        profile=LLAMA_3_8B_A100,
        batch_limit=4,
        kv_capacity_tokens=320,
        time_scale=time_scale,
    )
    lengths = [(30, 40), (70, 90), (100, 60), (16, 1), (200, 100)]

    async def scenario() -> None:
        async with running(config) as engine:
            generations = [
                engine.submit([Decode(prompt_tokens, decode_tokens, "stop")])
                for prompt_tokens, decode_tokens in lengths
            ]
            seen = await asyncio.gather(*map(token_times_s, generations))
            assert engine.series.stats.preemptions_total > 0
            queued = engine.series.queue_s.family("queued", {}).samples
            assert [each.value for each in queued if each.name == "queued_count"] == [len(lengths)]
        for number, times_s in expected_s(config, lengths).items():
            assert seen[number] == pytest.approx(times_s)

    run_virtual(scenario())


def jump(seconds: float) -> None:
    """Let time pass at once, as when another process took the machine."""
    cast("VirtualTimeLoop", asyncio.get_running_loop()).now_s += seconds


def test_being_late_once_does_not_make_every_later_token_late() -> None:
    async def scenario() -> None:
        async with running(unit_config(time_scale=1.0)) as engine:
            generation = engine.submit([Decode(1, 200, "stop")])
            asyncio.get_running_loop().call_later(0.1, jump, 0.5)
            times_s = await token_times_s(generation)
            assert times_s[30] > 0.5
            assert times_s[-1] == pytest.approx(2.0)

    run_virtual(scenario())


def test_a_process_that_was_stopped_does_not_race_to_catch_up() -> None:
    async def scenario() -> None:
        async with running(unit_config(time_scale=1.0)) as engine:
            generation = engine.submit([Decode(1, 200, "stop")])
            asyncio.get_running_loop().call_later(0.1, jump, 60.0)
            times_s = await token_times_s(generation)
            assert times_s[-1] > 61.5

    run_virtual(scenario())


def test_an_aborted_request_frees_its_slot_for_the_next_iteration() -> None:
    async def scenario() -> None:
        async with running(unit_config(time_scale=1.0, batch_limit=1)) as engine:
            first = engine.submit([Decode(1, 500, "stop")])
            second = engine.submit([Decode(1, 5, "stop")])
            await asyncio.sleep(0.105)
            engine.abort(first)
            engine.abort(first)
            assert (await token_times_s(second))[0] == pytest.approx(0.12)
            assert not first.complete
            assert engine.series.finished["stop"] == 1
            assert engine.series.stats.aborted_total == 1

    run_virtual(scenario())


def test_a_request_whose_task_the_server_cancels_leaves_the_engine() -> None:
    async def scenario() -> None:
        async with in_process(time_scale=1.0) as (client, server):
            body = {"prompt": [1], "max_tokens": 500, "ignore_eos": True}
            for stream in (True, False):
                asked = asyncio.create_task(
                    client.post("/v1/completions", json={**body, "stream": stream})
                )
                await asyncio.sleep(0.1)
                assert server.engine.series.stats.running == 1
                asked.cancel()
                await asyncio.sleep(0.1)
                assert server.engine.series.stats.running == 0

    run_virtual(scenario())


def test_an_aborted_request_that_waited_is_never_started() -> None:
    async def scenario() -> None:
        async with running(unit_config(time_scale=1.0, batch_limit=1)) as engine:
            first = engine.submit([Decode(1, 10, "stop")])
            waiting = engine.submit([Decode(1, 10, "stop") for _ in range(3)])
            await asyncio.sleep(0.05)
            engine.abort(waiting)
            await token_times_s(first)
            await asyncio.sleep(1)
            assert engine.series.stats.generation_tokens_total == 10
            assert engine.series.stats.waiting == 0

    run_virtual(scenario())


def test_a_queue_takes_no_more_than_its_bound_and_a_stopped_engine_nothing() -> None:
    async def scenario() -> None:
        async with running(unit_config(batch_limit=1, queue_max=2)) as engine:
            engine.submit([Decode(1, 10, "stop")])
            engine.submit([Decode(1, 10, "stop")])
            with pytest.raises(QueueFullError):
                engine.submit([Decode(1, 10, "stop")])
            engine.stop()
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError):
                engine.submit([Decode(1, 10, "stop")])

    run_virtual(scenario())


def test_the_series_agree_with_what_happened() -> None:
    async def scenario() -> None:
        config = {"time_scale": 2.0, "batch_limit": 2, "kv_capacity_tokens": 1600}
        async with in_process(**config) as (client, server):
            for prompt_tokens, decode_tokens, reason in (
                (20, 101, "stop"),
                (40, 51, "length"),
                (60, 31, "stop"),
            ):
                server.engine.submit([Decode(prompt_tokens, decode_tokens, reason)])
            blind = parse_engine_page((await client.get("/metrics")).content).total
            assert (blind.running, blind.waiting) == (0, 0)
            await asyncio.sleep(0.0051)
            busy = parse_engine_page((await client.get("/metrics")).content).total
            assert (busy.running, busy.waiting) == (2, 1)
            assert busy.kv_capacity_tokens == 1600
            # 20 + 1 and 40 + 1 tokens in blocks of 16.
            assert busy.kv_tokens_used == (2 + 3) * 16
            await asyncio.sleep(10)
            done = parse_engine_page((await client.get("/metrics/")).content).total
            assert (done.running, done.waiting, done.kv_tokens_used) == (0, 0, 0)
            assert done.generation_tokens_total == 101 + 51 + 31
            assert done.requests_succeeded_total == 3
            assert done.token_latency_count == 100 + 50 + 30
            assert done.token_latency_sum_s == pytest.approx(180 * 0.005)
            assert done.queue_time_count == 3
            # The third waited for the second's 51 iterations of 5 ms.
            assert done.queue_time_sum_s == pytest.approx(51 * 0.005)
            page = (await client.get("/metrics")).text
            assert 'vllm:prompt_tokens_total{engine="0",model_name="mock"} 120.0' in page
            assert 'finished_reason="length",model_name="mock"} 1.0' in page
            assert 'finished_reason="stop",model_name="mock"} 2.0' in page
            first_tokens = 'vllm:time_to_first_token_seconds_count{engine="0",model_name="mock"}'
            assert f"{first_tokens} 3.0" in page
            steps = 'vllm:iteration_tokens_total_count{engine="0",model_name="mock"}'
            assert f"{steps} 101.0" in page

    run_virtual(scenario())


def test_only_the_path_with_a_slash_filters() -> None:
    async def scenario() -> None:
        async with in_process() as (client, _):
            names = [("name[]", "vllm:num_requests_running"), ("name[]", "vllm:nothing")]
            filtered = (await client.get("/metrics/", params=names)).text
            samples = [line for line in filtered.splitlines() if not line.startswith("#")]
            assert samples == ['vllm:num_requests_running{engine="0",model_name="mock"} 0.0']
            whole = (await client.get("/metrics", params=names)).text
            assert "vllm:num_requests_waiting" in whole
            nothing = await client.get("/metrics/", params=[("name[]", "vllm:nothing")])
            assert nothing.content == b""

    run_virtual(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_limit": 0},
        {"time_scale": 0.0},
        {"time_scale": float("nan")},
        {"queue_max": 0},
        {"kv_capacity_tokens": 15},
        {"kv_capacity_tokens": 1000, "context_tokens": 1001},
        {"decode_tokens_mean": 0.0},
    ],
)
def test_a_worker_that_vllm_would_not_start_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|too few"):
        unit_config(**wrong)
