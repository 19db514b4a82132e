"""Composition root: builds every part once, with its arguments; the lifespan only runs them.

Read edge.py next, then central_queue.py and forwarder.py: the life of a request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

import httpx
import structlog
from fastapi import FastAPI
from structlog.typing import FilteringBoundLogger

from service.admin import Staff, admin_routes
from service.api_document import document_of
from service.auth import Door
from service.central_queue import CentralQueue
from service.control.events import Role
from service.control.kernels import compile_all
from service.control.router import Router
from service.crew import Crew
from service.discovery.following import Discovery
from service.edge import Edge, Inside
from service.edge_config import EdgeConfig, reading
from service.fleet import Fleet
from service.forwarder import Forwarder
from service.light import LightPath
from service.mock.profiles import PROFILES
from service.mock.serving import running_mock_workers
from service.mock.worker_config import MockWorkerConfig
from service.operations import Operations, OperationsCollector
from service.refresher import ThreadRefresher
from service.reload import Loaded, Reloader, ReloadStats
from service.roster import Roster
from service.routes import answer_unknown_paths, routes, with_aliases
from service.settings import MockConfig, Settings
from service.settings_text import SettingsError
from service.state_series import Sources
from service.telemetry import Telemetry
from service.tls import ListenerTls, WorkerTls
from service.trace import NoTracer, Tracer
from service.tracing_config import TracingConfig
from service.ways import Doors, Ways, make_ways
from service.worker_config import WorkerConfig
from service.worker_link import WorkerTransport

RESTART_S: Final = 1.0

Run = Callable[[], Awaitable[None]]
"""Something that goes on as long as the service does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The application, its metrics, and what whoever stops it must drain: queue and light path."""

    app: FastAPI
    queue: CentralQueue
    light: LightPath
    inside: Inside
    telemetry: Telemetry

    @property
    def held(self) -> int:
        """Requests inside now."""
        return self.queue.held + self.light.held


@dataclass(frozen=True, slots=True, kw_only=True)
class Rereading:
    """How settings are read again while the service runs.

    Attributes:
        loaded: what is in use, with its files.
        load: reads everything again.
        tls: of the listener, made anew each time.
    """

    loaded: Loaded
    load: Callable[[], Loaded]
    tls: ListenerTls | None = None


def build(settings: Settings) -> FastAPI:
    """Build the application for any ASGI server."""
    return assemble(settings).app


def assemble(settings: Settings, rereading: Rereading | None = None) -> Service:
    """Build every part.

    Args:
        settings: to begin with.
        rereading: how to follow their changes; None to keep them.

    Raises:
        SettingsError: the workers, keys or files that the settings name cannot be used.
    """
    settings.check()
    parts = _build_parts(settings)
    tls = None if rereading is None else rereading.tls
    apply = _Applier(parts, tls)
    apply(settings)
    reloader = None
    if rereading is not None:
        reloader = Reloader(rereading.loaded, rereading.load, apply, parts.log)
    _tell(parts, reloader)
    app = FastAPI(
        title="bidgate",
        version=version("bidgate"),
        lifespan=_lifespan(parts, reloader, _mock_fleet(settings.mock, parts.discovery.embed)),
    )
    app.include_router(
        routes(
            stats=parts.queue.stats,
            models=lambda: with_aliases(parts.fleet.models(), apply.settings.edge.model_aliases),
            held=lambda: parts.queue.held + parts.light.held,
            telemetry=parts.telemetry,
        )
    )
    staff = Staff(
        discovery=parts.discovery,
        roster=parts.roster,
        running=lambda: _running(parts.queue, parts.light),
    )
    app.include_router(admin_routes(staff))
    answer_unknown_paths(app)
    app.openapi = document_of(app)  # type: ignore[method-assign]
    _put_edge_before(app, parts, lambda: apply.settings.edge)
    return Service(
        app=app,
        queue=parts.queue,
        light=parts.light,
        inside=parts.inside,
        telemetry=parts.telemetry,
    )


def _put_edge_before(app: FastAPI, parts: _Parts, config: Callable[[], EdgeConfig]) -> None:
    """Nothing of the framework's own stands around a relayed request, only around the rest."""
    inner = app.build_middleware_stack

    def behind_the_edge() -> Edge:
        return Edge(
            inner(),
            ways=parts.ways,
            telemetry=parts.telemetry,
            door=parts.door,
            inside=parts.inside,
            config=config,
            log=parts.log,
            tracer=parts.tracer,
        )

    app.build_middleware_stack = behind_the_edge  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    log: FilteringBoundLogger
    telemetry: Telemetry
    refresher: ThreadRefresher
    queue: CentralQueue
    probing: httpx.AsyncBaseTransport
    fleet: Fleet
    crew: Crew
    light: LightPath
    ways: Ways
    roster: Roster
    discovery: Discovery
    forwarder: Forwarder
    door: Door
    inside: Inside
    tracer: Tracer
    worker_tls: WorkerTls


def _build_parts(settings: Settings) -> _Parts:
    log: FilteringBoundLogger = structlog.get_logger("bidgate")
    # Before anybody is let in: a first decision that compiled them would count as late.
    compile_all()
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
    worker_tls = WorkerTls(settings.fleet)
    open_transport = partial(
        WorkerTransport,
        keepalive_s=settings.forward.keepalive_s,
        link_local=settings.fleet.allow_link_local,
        tls=lambda: worker_tls.context,
    )
    probing = open_transport()
    fleet = Fleet((), settings.watch, probing, queue.publish)
    crew = Crew(fleet, open_transport)
    forwarder = Forwarder(
        worker=crew.workers.__getitem__,
        transports=crew.transports,
        config=settings.forward,
        suspect=fleet.saw_failure,
    )
    crew.on_leave = forwarder.forget
    light = LightPath(workers=fleet, draining=lambda: queue.draining, config=settings.light)
    doors = Doors(
        queue=queue, light=light, forwarder=forwarder, context_tokens=fleet.context_tokens
    )
    ways = make_ways(doors, reading(settings.edge, keeps_keys=False), settings.light)
    roster = Roster(crew, partial(_running, queue, light), settings.discovery.remove_s)
    inside = Inside(settings.edge)
    inside.bytes.make_room = queue.make_room
    return _Parts(
        log=log,
        telemetry=telemetry,
        refresher=refresher,
        queue=queue,
        probing=probing,
        fleet=fleet,
        crew=crew,
        light=light,
        ways=ways,
        roster=roster,
        discovery=Discovery(roster.want, fleet.is_up),
        forwarder=forwarder,
        door=Door(),
        inside=inside,
        tracer=_make_tracer(settings.tracing),
        worker_tls=worker_tls,
    )


def _make_tracer(config: TracingConfig) -> Tracer:
    """Load the tracing library only where spans are wanted."""
    if not config.enabled:
        return NoTracer()
    from service.spans import make_tracer

    return make_tracer(config)


def _running(queue: CentralQueue, light: LightPath) -> dict[str, int]:
    """What runs on each worker: sequences, prompts computed or held, what skips the queue."""
    router = queue.stats().router
    counts = Counter({worker.worker_id: worker.active for worker in router.workers})
    for one in router.prefillers:
        counts[one.worker_id] += one.legs + (one.kv_tokens > one.orphaned_kv_tokens)
    counts.update(light.running())
    return dict(counts)


class _Applier:
    """Gives settings to the parts that can change while they run.

    Attributes:
        settings: in use.
    """

    settings: Settings

    def __init__(self, parts: _Parts, tls: ListenerTls | None) -> None:
        self._parts = parts
        self._tls = tls

    def __call__(self, settings: Settings) -> None:
        """Take checked settings; requests inside go on as they were."""
        parts = self._parts
        try:
            static, keys = settings.worker_configs(), settings.client_keys()
            tls = settings.server.tls_context()
            if tls is not None and self._tls is not None:
                self._tls.context = tls
            parts.worker_tls.renew(settings.fleet)
        except SettingsError as error:
            # They were good a moment ago, when they were checked.
            parts.log.error("settings_not_applied", reason=str(error))
            return
        self.settings = settings
        parts.door.configure(settings.auth, keys)
        parts.inside.bytes.bytes_max = settings.edge.held_bytes_max
        parts.ways.reconfigure(reading(settings.edge, keeps_keys=parts.door.keeps_keys))
        parts.telemetry.reconfigure(log_requests=settings.edge.log_requests)
        parts.forwarder.reconfigure(settings.forward)
        parts.fleet.reconfigure(settings.watch)
        parts.queue.reconfigure(settings.queue, settings.control)
        parts.roster.remove_s = settings.discovery.remove_s
        parts.discovery.configure(static, settings.fleet, settings.discovery)


def _tell(parts: _Parts, reloader: Reloader | None) -> None:
    """Let metrics read the state of the parts."""
    parts.telemetry.watch(
        Sources(
            queue=parts.queue.stats,
            fleet=parts.fleet.stats,
            light=lambda: (parts.light.held, dict(parts.light.ended)),
            retries=lambda: dict(parts.forwarder.retries),
            handoffs=lambda: dict(parts.forwarder.handoffs),
            refresh_failures=lambda: parts.refresher.failures,
            bytes_held=lambda: parts.inside.bytes.held,
            spans=parts.tracer.spans,
        )
    )
    parts.telemetry.registry.register(
        OperationsCollector(
            Operations(
                settings=ReloadStats if reloader is None else reloader.stats,
                sources=parts.discovery.stats,
                door=parts.door,
            )
        )
    )


@asynccontextmanager
async def _mock_fleet(
    config: MockConfig, embed: Callable[[list[WorkerConfig]], None]
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
        if urls:
            embed(
                [
                    WorkerConfig(
                        worker_id=worker_id, url=url, batch_limit=config.batch_limit, role=role
                    )
                    for (worker_id, role), url in zip(names, urls, strict=True)
                ]
            )
        yield


def _lifespan(
    parts: _Parts, reloader: Reloader | None, mocks: AbstractAsyncContextManager[None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    running: dict[str, Run] = {
        "queue": parts.queue.run,
        "prices": parts.refresher.run,
        "fleet": parts.fleet.run,
        "roster": parts.roster.run,
        "discovery": parts.discovery.run,
    }
    if reloader is not None:
        running["settings"] = reloader.run

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(mocks)
            stack.push_async_callback(parts.tracer.aclose)
            stack.push_async_callback(parts.crew.aclose)
            stack.push_async_callback(parts.probing.aclose)
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
