"""Composition root: builds every part once, with its arguments; the lifespan only runs them.

Read edge.py next, then central_queue.py and forwarder.py: the life of a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import httpx
import structlog
from fastapi import FastAPI
from structlog.typing import FilteringBoundLogger

from service.central_queue import CentralQueue
from service.control.events import Role
from service.control.router import Router
from service.edge import Doors, Edge, make_ways
from service.fleet import Fleet
from service.forwarder import Forwarder
from service.light import LightPath
from service.mock.profiles import PROFILES
from service.mock.serving import running_mock_workers
from service.mock.worker_config import MockWorkerConfig
from service.refresher import ThreadRefresher
from service.routes import answer_unknown_paths, routes, with_aliases
from service.settings import MockConfig, Settings
from service.telemetry import Sources, Telemetry
from service.worker_config import WorkerConfig
from service.worker_link import WorkerTransport, make_client

RESTART_S: Final = 1.0

Run = Callable[[], Awaitable[None]]
"""Something that goes on as long as the service does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The application, and the queue and the light path that whoever stops it must drain."""

    app: FastAPI
    queue: CentralQueue
    light: LightPath

    @property
    def held(self) -> int:
        """Requests inside now."""
        return self.queue.held + self.light.held


def build(settings: Settings) -> FastAPI:
    """Build the application for any ASGI server."""
    return assemble(settings).app


def assemble(settings: Settings) -> Service:
    """Build every part.

    Raises:
        SettingsError: the workers cannot be used.
    """
    parts = _build_parts(settings)
    for worker in settings.worker_configs():
        parts.follow(worker)
    parts.telemetry.watch(
        Sources(
            queue=parts.queue.stats,
            fleet=parts.fleet.stats,
            light=lambda: (parts.light.held, dict(parts.light.ended)),
            retries=lambda: dict(parts.forwarder.retries),
            handoffs=lambda: dict(parts.forwarder.handoffs),
            refresh_failures=lambda: parts.refresher.failures,
        )
    )
    app = FastAPI(
        title="bidgate",
        version=version("bidgate"),
        lifespan=_lifespan(parts, _mock_fleet(settings.mock, parts.follow)),
    )
    app.include_router(
        routes(
            stats=parts.queue.stats,
            models=lambda: with_aliases(parts.fleet.models(), settings.edge.model_aliases),
            held=lambda: parts.queue.held + parts.light.held,
            telemetry=parts.telemetry,
        )
    )
    answer_unknown_paths(app)
    app.add_middleware(
        Edge,
        ways=make_ways(
            Doors(
                queue=parts.queue,
                light=parts.light,
                forwarder=parts.forwarder,
                context_tokens=parts.fleet.context_tokens,
            ),
            settings.edge,
            settings.light,
        ),
        telemetry=parts.telemetry,
        config=settings.edge,
        log=parts.log,
    )
    return Service(app=app, queue=parts.queue, light=parts.light)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    log: FilteringBoundLogger
    telemetry: Telemetry
    refresher: ThreadRefresher
    queue: CentralQueue
    client: httpx.AsyncClient
    fleet: Fleet
    links: _Links
    light: LightPath
    forwarder: Forwarder

    def follow(self, worker: WorkerConfig) -> None:
        """Make a worker known to the forwarder and the fleet."""
        self.links.add(worker)
        self.fleet.add(worker)


def _build_parts(settings: Settings) -> _Parts:
    log: FilteringBoundLogger = structlog.get_logger("bidgate")
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
    links = _Links(settings.forward.keepalive_s)
    forwarder = Forwarder(
        worker=links.workers.__getitem__,
        transports=links.transports,
        config=settings.forward,
        suspect=fleet.saw_failure,
    )
    return _Parts(
        log=log,
        telemetry=telemetry,
        refresher=refresher,
        queue=queue,
        client=client,
        fleet=fleet,
        links=links,
        light=LightPath(workers=fleet, draining=lambda: queue.draining, config=settings.light),
        forwarder=forwarder,
    )


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
        kv_transfer=config.prefill_workers > 0,
    )
    role = Role.DECODE if config.prefill_workers else Role.BOTH
    names = [(f"mock-{number}", role) for number in range(config.workers)]
    names += [(f"mock-prefill-{n}", Role.PREFILL) for n in range(config.prefill_workers)]
    async with running_mock_workers([worker] * len(names)) as urls:
        for (worker_id, role), url in zip(names, urls, strict=True):
            follow(
                WorkerConfig(
                    worker_id=worker_id, url=url, batch_limit=config.batch_limit, role=role
                )
            )
        yield


def _lifespan(
    parts: _Parts, mocks: AbstractAsyncContextManager[None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    running: dict[str, Run] = {
        "queue": parts.queue.run,
        "prices": parts.refresher.run,
        "fleet": parts.fleet.run,
    }

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(mocks)
            stack.push_async_callback(parts.links.aclose)
            stack.push_async_callback(parts.client.aclose)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_keep_running(name, run, parts.log), name=name)
                    for name, run in running.items()
                ]
                yield
                for task in tasks:
                    task.cancel()

    return lifespan


async def _keep_running(name: str, run: Run, log: FilteringBoundLogger) -> None:
    """Run a part again if it breaks: one broken part must not take the others with it."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("part_broke", part=name)
        await asyncio.sleep(RESTART_S)
