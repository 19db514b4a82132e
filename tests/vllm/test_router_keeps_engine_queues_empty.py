"""Release-when-startable, judged by the engines' own counters and against round robin."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.vllm.engine import client
from tests.vllm.overload import Overload, Watched, watching
from tests.vllm.router import running_router, until_all_up, worker_id

if TYPE_CHECKING:
    from tests.vllm.conftest import Fleet
    from tests.vllm.engine import Stream
    from tests.vllm.router import RouterPage

WAITING_MAX = 1


@dataclass(frozen=True, slots=True)
class Run:
    """What one policy did under the load."""

    engines: list[Watched]
    answers: list[Stream]
    page: RouterPage


async def run_policy(fleet: Fleet, load: Overload, policy: str) -> Run:
    """The load through bidgate with one policy, all engines watched."""
    flags = ("--policy", policy)
    with running_router(fleet.urls, batch_limit=fleet.batch_limit, flags=flags) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, fleet.urls)
            async with AsyncExitStack() as stack:
                engines = [await stack.enter_async_context(watching(url)) for url in fleet.urls]
                answers = await load.run(http)
            return Run(engines, answers, await router.page(http))


@pytest.fixture
def overload(fleet: Fleet) -> Overload:
    """Twice as many clients as slots; a full batch of the longest would not fit the KV cache."""
    slots = fleet.batch_limit * len(fleet.urls)
    return Overload(
        model=fleet.model,
        clients=2 * slots,
        requests=4 * slots,
        prompt_tokens=220,
        decode_tokens=(100, 400),
    )


async def test_under_twofold_overload_requests_wait_in_bidgate_and_not_in_the_engines(
    fleet: Fleet, overload: Overload
) -> None:
    ours = await run_policy(fleet, overload, "online_lp")
    theirs = await run_policy(fleet, overload, "round_robin")

    for run in (ours, theirs):
        assert all(seen.error is None and seen.ended_by_done for seen in run.answers)
        lengths = [body["max_tokens"] for body in overload.bodies()]
        assert [seen.decode_tokens for seen in run.answers] == lengths
        assert run.page("bidgate_requests_ended_total", "completed") == overload.requests
        assert run.page("bidgate_accounting_imbalance") == 0

    for engine in ours.engines:
        assert max(engine.waiting) <= WAITING_MAX
        assert engine.preemptions == 0
        assert engine.queue_time_quantile_s(0.95) <= 2 * engine.iteration_s
        # Not by starving them: the batch was in use.
        assert max(engine.running) >= fleet.batch_limit - 1

    if fleet.owned:
        assert max(max(engine.waiting) for engine in theirs.engines) > WAITING_MAX
        assert sum(engine.preemptions for engine in theirs.engines) > 0
    slowest_s = max(engine.queue_time_quantile_s(0.95) for engine in theirs.engines)
    assert slowest_s > 2 * max(engine.iteration_s for engine in theirs.engines)


async def test_work_is_spread_over_all_workers(fleet: Fleet, overload: Overload) -> None:
    ours = await run_policy(fleet, overload, "online_lp")
    started = [ours.page("bidgate_worker_batch_limit", worker_id(url)) for url in fleet.urls]
    assert started == [fleet.batch_limit] * len(fleet.urls)
    busy = [max(engine.running) for engine in ours.engines]
    assert min(busy) >= fleet.batch_limit // 2
