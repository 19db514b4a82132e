"""bidgate's ledger against the engines' own gauges: running, KV tokens, iteration time, zero."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.vllm.engine import client, completion, eventually, lines_of, sample, settle
from tests.vllm.router import Router, RouterPage, running_router, until_all_up, worker_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from service.engine_metrics import EngineSample
    from tests.vllm.conftest import Fleet

PROMPT_TOKENS = 100
REQUESTS_PER_WORKER = 5
# Five of these fill, but do not overfill, the small KV cache of our own workers.
DECODE_TOKENS = 480
BLOCKS_PER_REQUEST_MAX = 2
ZERO_WITHIN_S = 3.0
LOOKS = 6
# Iteration times: how often and how long to look, and how many looks bidgate has to learn.
LOOK_S = 0.1
MEASURED_LOOKS = 25
MEASURED_MIN = 6
LEARNING_LOOKS = 6
# Two reads of two processes are not at one instant; a busy machine makes the second one late.
TRIES_PER_LOOK = 20


@dataclass(frozen=True, slots=True)
class Front:
    """A router with a client of its own and one of every engine."""

    fleet: Fleet
    router: Router
    http: httpx.AsyncClient
    engines: tuple[httpx.AsyncClient, ...]

    async def look(self) -> tuple[RouterPage, list[EngineSample]]:
        """What bidgate and the engines say, as close together as can be."""
        reading = asyncio.create_task(self.router.page(self.http))
        samples = await asyncio.gather(*(sample(engine) for engine in self.engines))
        return await reading, samples


@asynccontextmanager
async def front_of(fleet: Fleet, *flags: str) -> AsyncIterator[Front]:
    """An idle fleet behind a router that scrapes often."""
    fast = ("--metrics-interval-s", "0.1", "--histograms-interval-s", "0.2", *flags)
    with running_router(fleet.urls, batch_limit=fleet.batch_limit, flags=fast) as router:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(client(router.url))
            engines = [await stack.enter_async_context(client(url)) for url in fleet.urls]
            for engine in engines:
                await settle(engine)
            await until_all_up(router, http, fleet.urls)
            yield Front(fleet, router, http, tuple(engines))


async def read_on(front: Front, salt: int, seen: list[int], turns: int) -> None:
    """Read one stream after the other and count their events in seen[salt]."""
    for turn in range(turns):
        body = completion(
            front.fleet.model,
            prompt_tokens=PROMPT_TOKENS,
            decode_tokens=DECODE_TOKENS,
            salt=salt + turn * len(seen),
            # On a busy machine several tokens share an event; with this each event says how many.
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        async for _ in lines_of(front.http, body):
            seen[salt] += 1


@asynccontextmanager
async def steady_load(front: Front, turns: int = 1) -> AsyncIterator[None]:
    """The same number of long streams on every worker, all past their first tokens.

    Each is followed by turns - 1 more, for looks that take longer than a fast engine's stream.
    """
    count = REQUESTS_PER_WORKER * len(front.engines)
    seen = [0] * count
    tasks = [asyncio.create_task(read_on(front, salt, seen, turns)) for salt in range(count)]
    try:

        async def decoding() -> bool:
            return min(seen) > 5

        assert await eventually(decoding, 60.0) is not None
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def disagreement(front: Front, page: RouterPage, samples: list[EngineSample]) -> str:
    """What differs by more than allowed; empty when ledger and engines agree."""
    trouble = []
    for url, engine in zip(front.fleet.urls, samples, strict=True):
        name = worker_id(url)
        active, kv = page("bidgate_worker_active", name), page("bidgate_worker_kv_tokens", name)
        assert engine.running is not None
        assert engine.block_tokens is not None
        assert engine.kv_tokens_used is not None
        if active != engine.running:
            trouble.append(f"{name}: ledger {active} running, engine {engine.running}")
        allowed = BLOCKS_PER_REQUEST_MAX * engine.block_tokens * max(active, 1)
        if abs(kv - engine.kv_tokens_used) > allowed:
            trouble.append(f"{name}: ledger {kv} KV tokens, engine {engine.kv_tokens_used}")
    return "; ".join(trouble)


async def assert_agreement(front: Front) -> RouterPage:
    """One look at which both sides say the same, within a few tries."""
    trouble = "never looked"
    for _ in range(TRIES_PER_LOOK):
        page, samples = await front.look()
        trouble = disagreement(front, page, samples)
        if not trouble:
            return page
        await asyncio.sleep(0.02)
    raise AssertionError(trouble)


async def test_the_ledger_follows_the_engines_through_a_steady_run(fleet: Fleet) -> None:
    async with front_of(fleet) as front, steady_load(front):
        for _ in range(LOOKS):
            page = await assert_agreement(front)
            spread = [page("bidgate_worker_active", worker_id(url)) for url in fleet.urls]
            assert spread == [REQUESTS_PER_WORKER] * len(fleet.urls)
            assert page.total("bidgate_worker_foreign") == 0
            await asyncio.sleep(0.2)


async def test_after_a_burst_of_cancellations_both_sides_return_to_zero(fleet: Fleet) -> None:
    async with front_of(fleet) as front:
        async with steady_load(front):
            before = await front.router.page(front.http)

        async def zero() -> bool:
            page, samples = await front.look()
            held = page.total("bidgate_worker_active") + page.total("bidgate_worker_kv_tokens")
            return held == 0 and all(
                engine.running == engine.waiting == engine.kv_tokens_used == 0 for engine in samples
            )

        assert await eventually(zero, ZERO_WITHIN_S) is not None
        after = await front.router.page(front.http)
        cancelled = REQUESTS_PER_WORKER * len(fleet.urls)
        assert before.total("bidgate_worker_active") == cancelled
        assert after("bidgate_requests_ended_total", "cancelled") == cancelled
        assert after("bidgate_accounting_imbalance") == 0


def told_s(old: EngineSample, new: EngineSample) -> float:
    """Mean time between two tokens of a request, between two samples of one engine."""
    gaps = (new.token_latency_count or 0) - (old.token_latency_count or 0)
    return ((new.token_latency_sum_s or 0.0) - (old.token_latency_sum_s or 0.0)) / gaps


async def test_iteration_time_is_learned_within_15_percent_of_the_engines_own(
    fleet: Fleet,
) -> None:
    async with front_of(fleet) as front, steady_load(front, turns=8):
        looks = []
        for _ in range(MEASURED_LOOKS):
            looks.append(await front.look())
            await asyncio.sleep(LOOK_S)
    for index, url in enumerate(fleet.urls):
        # Between two streams fewer run; the first looks are still learning.
        busy = [
            (page, samples[index])
            for page, samples in looks[LEARNING_LOOKS:]
            if samples[index].running == REQUESTS_PER_WORKER
        ]
        assert len(busy) >= MEASURED_MIN
        name = worker_id(url)
        learned = [page("bidgate_worker_iteration_seconds", name) for page, _ in busy]
        # Looks are evenly spaced in time, so the mean of the rates is comparable, whatever other
        # programs on the machine do to single iterations.
        told = told_s(busy[0][1], busy[-1][1])
        assert statistics.harmonic_mean(learned) == pytest.approx(told, rel=0.15)
