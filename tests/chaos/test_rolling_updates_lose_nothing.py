"""Every worker is replaced, one after another or all at once: who waits, waits, and is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from service.control.config import ControlConfig
from service.mock.faults import Fault, FragileWorker
from service.mock.profiles import UNIT
from service.mock.worker_config import MockWorkerConfig
from service.settings import WorkerSettings
from tests.service.live import Live, serving, until
from tests.service.stage import ends

SLOTS = 4
BODY = {"model": "mock", "prompt": "x", "max_tokens": 12, "ignore_eos": True}


@asynccontextmanager
async def fragile_fleet(count: int) -> AsyncIterator[tuple[list[FragileWorker], Live]]:
    """Bidgate before workers that can be replaced."""
    config = MockWorkerConfig(profile=UNIT, batch_limit=SLOTS, time_scale=0.5)
    workers = [FragileWorker(config, seed=number) for number in range(count)]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    settings = tuple(WorkerSettings(url=worker.url, batch_limit=SLOTS) for worker in workers)
    hold = ControlConfig(no_worker_hold_s=20.0, slow_start_s=0.2)
    try:
        for worker in workers:
            await worker.until_up()
        async with serving([w.url for w in workers], workers=settings, control=hold) as live:
            yield workers, live
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def post(live: Live) -> int:
    return (await live.client.post(f"{live.url}/v1/completions", json=BODY)).status_code


async def _keep_sending(live: Live, done: asyncio.Event) -> Counter[int]:
    """A client that always has twelve requests open: more than two workers have slots."""
    statuses: Counter[int] = Counter()

    async def one_after_another() -> None:
        while not done.is_set():
            statuses[await post(live)] += 1

    await asyncio.gather(*(one_after_another() for _ in range(12)))
    return statuses


async def _replace_in_turn(workers: Sequence[FragileWorker], live: Live) -> None:
    for worker in workers:
        await worker.replace(for_s=0.3)
        await until(lambda: live.usable() == len(workers), within_s=30.0)


async def test_a_rolling_update_under_load_loses_no_request() -> None:
    async with fragile_fleet(3) as (workers, live):
        done = asyncio.Event()
        sending = asyncio.create_task(_keep_sending(live, done))
        await _replace_in_turn(workers, live)
        done.set()
        statuses = await sending
        assert set(statuses) == {200}
        assert statuses[200] > 30
        generations = sum((worker.generations for worker in workers), Counter())
        assert max(generations.values()) == 1
        assert set(ends(live.service.queue.stats())) == {"completed"}


async def test_requests_wait_while_every_worker_is_away_and_are_served_when_one_is_back() -> None:
    async with fragile_fleet(2) as (workers, live):
        away = [asyncio.create_task(worker.suffer(Fault.KILL, 1.5)) for worker in workers]
        await until(lambda: not live.usable(), within_s=10.0)
        answers = await asyncio.gather(*(post(live) for _ in range(10)))
        assert answers == [200] * 10
        await asyncio.wait(away)
        assert ends(live.service.queue.stats()) == {"completed": 10}
