"""A running fleet over scripted servers on a virtual clock, and every event it has published."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from service.control.events import (
    Event,
    WorkerChanged,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerState,
)
from service.fleet import Fleet
from service.fleet_types import WatchConfig
from service.worker_config import WorkerConfig
from tests.service.scripted_server import ScriptedServer, transport_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


CONFIG = WatchConfig()
WHOLE_PAGES = WatchConfig(metrics_interval_s=0.25, histograms_interval_s=0.1)
"""Every scrape asks for everything."""


class Watched:
    """A running fleet over scripted servers, and every event it has published."""

    def __init__(
        self,
        servers: dict[str, ScriptedServer],
        config: WatchConfig,
        workers: Sequence[WorkerConfig],
    ) -> None:
        self.events: list[Event] = []
        self.states: dict[str, list[WorkerState]] = defaultdict(list)
        self.came_up = asyncio.Event()
        self.fleet = Fleet(workers, config, transport_of(servers), self.take)

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerJoined):
            self.states[event.spec.worker_id].append(event.state)
        elif isinstance(event, WorkerChanged):
            self.states[event.worker_id].append(event.state)
            if event.state is WorkerState.UP:
                self.came_up.set()
            else:
                self.came_up.clear()

    def state(self, name: str = "a") -> WorkerState:
        return self.states[name][-1]

    def reports(self, name: str = "a") -> list[WorkerReport]:
        return [
            event.report
            for event in self.events
            if isinstance(event, WorkerReported) and event.worker_id == name
        ]


def configured(name: str, **overrides: object) -> WorkerConfig:
    return WorkerConfig(
        **{"worker_id": name, "url": f"http://{name}", "batch_limit": 8} | overrides
    )


@asynccontextmanager
async def watching(
    servers: dict[str, ScriptedServer], config: WatchConfig = CONFIG, **overrides: object
) -> AsyncIterator[Watched]:
    workers = [configured(name, **overrides) for name in servers]
    async with following(Watched(servers, config, workers)) as watched:
        yield watched


@asynccontextmanager
async def watching_ranks(
    server: ScriptedServer, ranks: Sequence[WorkerConfig]
) -> AsyncIterator[Watched]:
    """Watch a server at http://a by the workers that it is."""
    async with following(Watched({"a": server}, CONFIG, ranks)) as watched:
        yield watched


@asynccontextmanager
async def following(watched: Watched) -> AsyncIterator[Watched]:
    task = asyncio.create_task(watched.fleet.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
