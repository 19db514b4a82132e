"""Bidgate's shell in one piece, with transports in the place of workers: no sockets, any clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog
from fastapi import FastAPI

from service.auth import Door
from service.auth_settings import AuthConfig, ClientKey
from service.central_queue import CentralQueue
from service.control.config import ControlConfig, PolicyName
from service.control.events import (
    Outcome,
    Refusal,
    Request,
    Role,
    WorkerChanged,
    WorkerJoined,
    WorkerSpec,
    WorkerState,
)
from service.control.router import Router
from service.edge import Edge, Inside
from service.edge_config import EdgeConfig, reading
from service.fleet_types import Candidate
from service.forward_config import ForwardConfig
from service.forwarder import Forwarder
from service.light import LightConfig, LightPath
from service.placement import Placement
from service.queue_stats import QueueConfig, QueueStats
from service.refresher import InlineRefresher
from service.routes import answer_unknown_paths, routes
from service.state_series import Sources
from service.telemetry import Telemetry
from service.trace import NoTracer, Tracer
from service.ways import Doors, make_ways
from service.worker_config import WorkerConfig
from tests.asgi import Exchange, http_scope

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


@dataclass
class TimedStream(httpx.AsyncByteStream):
    """A response body whose parts come at their times; an exception among them breaks it off."""

    parts: Iterable[tuple[float, bytes | Exception]]
    closed: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for pause_s, part in self.parts:
            await asyncio.sleep(pause_s)
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self) -> None:
        self.closed = True


class HandlerTransport(httpx.AsyncBaseTransport):
    """A worker as a function; keeps what it was sent."""

    def __init__(self, handler: Handler) -> None:
        self.requests: list[httpx.Request] = []
        self.cancelled = 0
        self._handler = handler

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        try:
            return await self._handler(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@dataclass
class Stage:
    """The assembled shell; `workers` maps ids to transports.

    Attributes:
        drops_suspects: a worker that the forwarder suspects goes down at once, as the fleet does.
    """

    workers: dict[str, httpx.AsyncBaseTransport]
    batch_limit: int = 8
    control: ControlConfig = field(
        default_factory=lambda: ControlConfig(policy=PolicyName.CENTRAL_FCFS)
    )
    edge: EdgeConfig = field(default_factory=EdgeConfig)
    forward: ForwardConfig = field(default_factory=ForwardConfig)
    api_keys: dict[str, str] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    models: frozenset[str] | None = frozenset({"m"})
    ranks: dict[str, int | None] = field(default_factory=dict)
    suspects: list[str] = field(default_factory=list)
    light: LightConfig = field(default_factory=LightConfig)
    context_tokens: int | None = None
    keys: tuple[ClientKey, ...] = ()
    tracer: Tracer = field(default_factory=NoTracer)
    drops_suspects: bool = False

    def candidates(self, model: str) -> tuple[Candidate, ...]:
        """Every worker is up and serves the same models."""
        if model and self.models is not None and model not in self.models:
            return ()
        return tuple(Candidate(worker_id=name, load=0.0) for name in self.workers)

    def answers(self, worker_id: str) -> bool:
        """Whether there is such a worker."""
        return worker_id in self.workers

    def served(self) -> frozenset[str] | None:
        """What every worker serves."""
        return self.models

    def __post_init__(self) -> None:
        self.telemetry = Telemetry(structlog.get_logger(), log_requests=True)
        self.router = Router(self.control)
        self.queue = CentralQueue(
            router=self.router,
            refresher=InlineRefresher(),
            config=QueueConfig(),
            on_tick=self.telemetry.observe_tick,
            stopwatch=lambda: asyncio.get_running_loop().time(),
            log=structlog.get_logger(),
        )
        self.forwarder = self._make_forwarder()
        self.light_path = LightPath(
            workers=self, draining=lambda: self.queue.draining, config=self.light
        )
        self.inside = Inside(self.edge)
        self.inside.bytes.make_room = self.queue.make_room
        self.door = Door()
        plain = () if self.edge.api_key is None else (ClientKey(key=self.edge.api_key),)
        self.door.configure(AuthConfig(), (*self.keys, *plain))
        self.telemetry.watch(self._sources())
        self.inner = self._make_inner()
        self.app = self._make_edge(self.inner)

    def _make_forwarder(self) -> Forwarder:
        configs = {
            name: WorkerConfig(
                worker_id=name,
                url=f"http://{name}",
                batch_limit=self.batch_limit,
                role=self.roles.get(name, Role.BOTH),
                api_key=self.api_keys.get(name),
                data_parallel_size=8 if name in self.ranks else 1,
                data_parallel_rank=self.ranks.get(name),
            )
            for name in self.workers
        }
        return Forwarder(
            worker=configs.__getitem__,
            transports=self.workers,
            config=self.forward,
            suspect=self._suspect,
        )

    def _suspect(self, worker_id: str) -> None:
        self.suspects.append(worker_id)
        if self.drops_suspects:
            self.queue.publish(WorkerChanged(worker_id, WorkerState.DOWN))

    def _sources(self) -> Sources:
        return Sources(
            queue=self.queue.stats,
            fleet=lambda: (),
            light=lambda: (self.light_path.held, dict(self.light_path.ended)),
            retries=lambda: dict(self.forwarder.retries),
            handoffs=lambda: dict(self.forwarder.handoffs),
            refresh_failures=lambda: 0,
            bytes_held=lambda: self.inside.bytes.held,
        )

    def _make_inner(self) -> FastAPI:
        inner = FastAPI()
        models: dict[str, object] = {"object": "list", "data": []}
        inner.include_router(
            routes(
                stats=self.queue.stats,
                models=lambda: models,
                held=lambda: self.queue.held + self.light_path.held,
                telemetry=self.telemetry,
            )
        )
        answer_unknown_paths(inner)
        return inner

    def _make_edge(self, inner: FastAPI) -> Edge:
        doors = Doors(
            queue=self.queue,
            light=self.light_path,
            forwarder=self.forwarder,
            context_tokens=lambda _: self.context_tokens,
        )
        config = reading(self.edge, keeps_keys=self.door.keeps_keys)
        return Edge(
            inner,
            ways=make_ways(doors, config, self.light),
            telemetry=self.telemetry,
            door=self.door,
            inside=self.inside,
            config=lambda: self.edge,
            log=structlog.get_logger(),
            tracer=self.tracer,
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Stage]:
        """Run with all workers up; at the end nothing may be held and nothing lost."""
        task = asyncio.get_running_loop().create_task(self.queue.run())
        for name in self.workers:
            spec = WorkerSpec(
                worker_id=name,
                batch_limit=self.batch_limit,
                kv_capacity_tokens=100_000,
                models=self.models,
                role=self.roles.get(name, Role.BOTH),
            )
            self.queue.publish(WorkerJoined(spec))
        await asyncio.sleep(0)
        try:
            yield self
            stats = self.queue.stats()
            assert stats.imbalance == 0
            assert (stats.event_errors, stats.tick_errors) == (0, 0)
            assert (stats.held, stats.router.waiting, stats.router.running) == (0, 0, 0)
            assert self.light_path.held == 0
            assert self.inside.bytes.held == 0
        finally:
            task.cancel()

    async def post(
        self,
        body: object = None,
        *,
        path: str = "/v1/completions",
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        exchange: Exchange | None = None,
    ) -> Exchange:
        """Send a request; bytes go as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body or completion()).encode()
        return await self.send("POST", path, raw, headers=headers, exchange=exchange)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        *,
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        exchange: Exchange | None = None,
    ) -> Exchange:
        """Send any request, its body whole or in parts, and play it to its end."""
        exchange = exchange or Exchange()
        parts = body if isinstance(body, list) else [body]
        return await exchange.play(self.app, http_scope(method, path, headers), parts)

    def placed(self) -> list[Request]:
        """Requests as the queue gets them from now on."""
        seen: list[Request] = []
        place = self.queue.place

        def placing(request: Request, *rest: Any) -> AbstractAsyncContextManager[Placement]:
            seen.append(request)
            return place(request, *rest)

        self.queue.place = placing  # type: ignore[assignment, method-assign]
        return seen

    def ends(self) -> dict[str, int]:
        """How requests ended so far; only those that did."""
        return ends(self.queue.stats())


def ends(stats: QueueStats) -> dict[str, int]:
    """Non-zero counts by outcome or refusal."""
    counts: dict[Outcome | Refusal, int] = {**stats.router.ended, **stats.router.refused}
    return {key.value: count for key, count in counts.items() if count}


def completion(**fields: Any) -> dict[str, Any]:
    """A small completions request."""
    return {"model": "m", "prompt": "hello", "max_tokens": 4, **fields}


def event(text: str = "x", **fields: Any) -> bytes:
    """One completions event with content."""
    choice = {"index": 0, "text": text, "finish_reason": None}
    message = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], **fields}
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def stream(*parts: tuple[float, bytes | Exception], status: int = 200) -> httpx.Response:
    """An event stream whose parts come after their pauses."""
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    return httpx.Response(status, headers=headers, stream=TimedStream(parts))


def answer(tokens: int = 4) -> httpx.Response:
    """A whole completion."""
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    choice = {"index": 0, "text": "xyz", "finish_reason": "length"}
    return httpx.Response(200, json={"id": "cmpl-1", "choices": [choice], "usage": usage})
