"""Composition root: builds every part once, with its arguments; the lifespan only runs them.

Read edge.py next, then central_queue.py and forwarder.py: the life of a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import httpx
import structlog
from fastapi import FastAPI
from structlog.typing import FilteringBoundLogger

from service.central_queue import CentralQueue
from service.control.router import Router
from service.edge import Edge
from service.fleet import Fleet
from service.forwarder import Forwarder
from service.mock.profiles import PROFILES
from service.mock.serving import running_mock_workers
from service.mock.worker_config import MockWorkerConfig
from service.refresher import ThreadRefresher
from service.routes import answer_unknown_paths, routes
from service.settings import MockConfig, Settings
from service.telemetry import Sources, Telemetry
from service.worker_config import WorkerConfig
from service.worker_link import WorkerTransport, make_client

RESTART_S: Final = 1.0

Part = Callable[[], Awaitable[None]]
"""Something that runs as long as the service does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The application, and the queue that whoever stops it must drain."""

    app: FastAPI
    queue: CentralQueue


def build(settings: Settings) -> FastAPI:
    """Build the application for any ASGI server."""
    return assemble(settings).app


def assemble(settings: Settings) -> Service:
    """Build every part.

    Raises:
        SettingsError: the workers cannot be used.
    """
    log: FilteringBoundLogger = structlog.get_logger("bidgate")
    links = _Links(settings.forward.keepalive_s)
    telemetry = Telemetry(log, log_requests=settings.edge.log_requests)
    refresher = ThreadRefresher(log)
    queue = CentralQueue(
        router=Router(settings.control),
        refresher=refresher,
        config=settings.queue,
        on_tick=telemetry.observe_tick,
        stopwatch=time.perf_counter,
        log=log,
    )
    client = make_client(
        WorkerTransport(keepalive_s=settings.forward.keepalive_s),
        connect_timeout_s=settings.forward.connect_timeout_s,
    )
    fleet = Fleet((), settings.watch, client, queue.publish)
    forwarder = Forwarder(
        worker=links.workers.__getitem__,
        transports=links.transports,
        config=settings.forward,
        suspect=fleet.saw_failure,
    )

    def follow(worker: WorkerConfig) -> None:
        links.add(worker)
        fleet.add(worker)

    for worker in settings.worker_configs():
        follow(worker)
    telemetry.watch(
        Sources(
            queue=queue.stats,
            fleet=fleet.stats,
            retries=lambda: dict(forwarder.retries),
            refresh_failures=lambda: refresher.failures,
        )
    )
    parts: dict[str, Part] = {"queue": queue.run, "prices": refresher.run, "fleet": fleet.run}
    app = FastAPI(
        title="bidgate",
        version=version("bidgate"),
        lifespan=_lifespan(parts, (links, client), _mock_fleet(settings.mock, follow), log),
    )
    app.include_router(routes(stats=queue.stats, models=fleet.models, telemetry=telemetry))
    answer_unknown_paths(app)
    app.add_middleware(
        Edge,
        queue=queue,
        forwarder=forwarder,
        telemetry=telemetry,
        config=settings.edge,
        log=log,
    )
    return Service(app=app, queue=queue)


class _Links:
    """Every worker's configuration and transport, by id."""

    def __init__(self, keepalive_s: float) -> None:
        self.workers: dict[str, WorkerConfig] = {}
        self.transports: dict[str, WorkerTransport] = {}
        self._keepalive_s = keepalive_s

    def add(self, worker: WorkerConfig) -> None:
        self.workers[worker.worker_id] = worker
        self.transports[worker.worker_id] = WorkerTransport(keepalive_s=self._keepalive_s)

    async def aclose(self) -> None:
        for transport in self.transports.values():
            await transport.aclose()


@asynccontextmanager
async def _mock_fleet(
    config: MockConfig, follow: Callable[[WorkerConfig], None]
) -> AsyncIterator[None]:
    """Serve the embedded mock workers and let them be followed as any worker."""
    worker = MockWorkerConfig(
        profile=PROFILES[config.profile],
        batch_limit=config.batch_limit,
        time_scale=config.time_scale,
    )
    async with running_mock_workers([worker] * config.workers) as urls:
        for number, url in enumerate(urls):
            follow(
                WorkerConfig(worker_id=f"mock-{number}", url=url, batch_limit=config.batch_limit)
            )
        yield


def _lifespan(
    parts: Mapping[str, Part],
    links: Iterable[_Links | httpx.AsyncClient],
    mocks: AbstractAsyncContextManager[None],
    log: FilteringBoundLogger,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(mocks)
            for link in links:
                stack.push_async_callback(link.aclose)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_keep_running(name, part, log), name=name)
                    for name, part in parts.items()
                ]
                yield
                for task in tasks:
                    task.cancel()

    return lifespan


async def _keep_running(name: str, part: Part, log: FilteringBoundLogger) -> None:
    """Run a part again if it breaks: one broken part must not take the others with it."""
    while True:
        try:
            await part()
        except Exception:
            log.exception("part_broke", part=name)
        await asyncio.sleep(RESTART_S)
