"""Fleet and mock worker together on a virtual clock: what the engine does is what is reported."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from service.control.events import Event, WorkerChanged, WorkerReport, WorkerReported, WorkerState
from service.fleet import Fleet
from service.fleet_types import WatchConfig
from service.mock.engine import Decode
from service.mock.profiles import UNIT
from service.mock.worker import MockServer
from service.mock.worker_config import MockWorkerConfig
from service.worker_config import WorkerConfig
from tests.clock import run_virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EVERY_PAGE_WHOLE = WatchConfig(histograms_interval_s=0.05)

MOCK = MockWorkerConfig(profile=UNIT, batch_limit=4, kv_capacity_tokens=3200, model="tiny")


class Host:
    """An address behind which one mock worker runs, and another after a restart."""

    def __init__(self) -> None:
        self.server = MockServer(MOCK)

    async def __call__(self, scope: dict, receive: object, send: object) -> None:
        await self.server.app(scope, receive, send)


@asynccontextmanager
async def engine_running(server: MockServer) -> AsyncIterator[None]:
    engine = asyncio.create_task(server.engine.run())
    await asyncio.sleep(0)
    yield
    engine.cancel()
    await asyncio.wait([engine])


@asynccontextmanager
async def watched(host: Host) -> AsyncIterator[list[Event]]:
    events: list[Event] = []
    transport = httpx.ASGITransport(host)
    worker = WorkerConfig(worker_id="w", url="http://mock", batch_limit=4)
    task = asyncio.create_task(Fleet([worker], EVERY_PAGE_WHOLE, transport, events.append).run())
    yield events
    task.cancel()
    await asyncio.wait([task])


def reports(events: list[Event]) -> list[WorkerReport]:
    return [event.report for event in events if isinstance(event, WorkerReported)]


def test_load_capacity_models_and_iteration_time_are_the_engines() -> None:
    async def scenario() -> None:
        host = Host()
        async with engine_running(host.server), watched(host) as events:
            await asyncio.sleep(0.1)
            assert reports(events)[0].kv_capacity_tokens == 3200
            assert reports(events)[0].models == frozenset({"tiny"})
            assert reports(events)[0].running == 0
            for _ in range(6):
                host.server.engine.submit([Decode(100, 400, "stop")])
            await asyncio.sleep(2)
            report = reports(events)[-1]
            assert (report.running, report.waiting) == (4, 2)
            assert report.iteration_s == pytest.approx(UNIT.base_ms / 1e3)
            # At most 28 iterations passed since the scrape: 2 more blocks for each of 4 requests.
            blocks_now = host.server.engine.series.stats.kv_blocks_used
            assert report.kv_tokens_used is not None
            assert report.kv_tokens_used % 16 == 0
            assert blocks_now - 4 * 2 <= report.kv_tokens_used // 16 <= blocks_now
            assert not any(each.restarted for each in reports(events))

    run_virtual(scenario())


def test_an_engine_that_dies_goes_down_and_its_successor_is_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        host = Host()
        async with watched(host) as events:
            async with engine_running(host.server):
                await asyncio.sleep(1)
                host.server.engine.submit([Decode(100, 400, "stop")])
                await asyncio.sleep(1)
            await asyncio.sleep(5)
            assert events[-1] == WorkerChanged("w", WorkerState.DOWN)
            later_unix_s = time.time() + 7
            monkeypatch.setattr(time, "time", lambda: later_unix_s)
            host.server = MockServer(MOCK)
            async with engine_running(host.server):
                await asyncio.sleep(10)
                assert [each.restarted for each in reports(events)].count(True) == 1
                assert WorkerChanged("w", WorkerState.UP) in events[-50:]

    run_virtual(scenario())
