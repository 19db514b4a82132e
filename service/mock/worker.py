"""A mock vLLM server: an ASGI application around the mock engine.

What a request may say is in protocol.py, what the answers look like in replies.py, when tokens
come in engine.py, what /metrics shows in engine_series.py.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson
from prometheus_client import CollectorRegistry, generate_latest, make_asgi_app
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from service.mock.bodies import ApiError
from service.mock.engine import EngineDeadError, MockEngine, QueueFullError
from service.mock.engine_series import ServerSeries
from service.mock.exchange import EVENTS, ClientLeftError, Exchange
from service.mock.kv_transfer import (
    ENGINE,
    FETCH_PATH,
    OTHER_ENGINE,
    UnusableParamsError,
    with_prompt_from_elsewhere,
)
from service.mock.light_routes import LightRoutes
from service.mock.named_replies import AnyReply, MessageReply
from service.mock.protocol import Asked, Reader
from service.mock.replies import Reply
from service.mock.sending import (
    abort_when_client_leaves,
    engine_died,
    send_whole,
    stream,
)
from service.mock.stored_responses import Responses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from service.mock.worker_config import MockWorkerConfig

VLLM_VERSION: Final = "0.32.0"
"""The version whose behaviour this copies."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A checked request, the name of its answer, and what writes that."""

    asked: Asked
    reply_id: str
    reply: AnyReply


class MockServer:
    """One mock worker.

    Attributes:
        engines: what generates, by data-parallel rank.
        app: the ASGI application.
    """

    def __init__(self, config: MockWorkerConfig) -> None:
        first = config.data_parallel_start_rank
        labels = range(first, first + config.data_parallel_size)
        self.engines = tuple(MockEngine(config, label) for label in labels)
        self._config = config
        self._created_s = int(time.time())
        self._load = 0
        self._registry = CollectorRegistry(auto_describe=True)
        self._registry.register(ServerSeries([engine.series for engine in self.engines]))
        reader = Reader(config)
        light = LightRoutes(config, self.engine)
        self._responses = Responses(reader)
        self.app: ASGIApp = Starlette(
            routes=[
                self._posted("/v1/completions", reader.completion, "cmpl", Reply),
                self._posted("/v1/chat/completions", reader.chat, "chatcmpl", Reply),
                self._posted("/v1/messages", reader.messages, "chatcmpl", MessageReply),
                self._posted("/v1/responses", self._responses.read, "resp", self._responses.reply),
                # As in vLLM, a stored response cannot be deleted: 405.
                Route("/v1/responses/{response_id}", self._stored, methods=["GET"]),
                *(self._served(path, handle) for path, handle in light.handlers()),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ping", self._health),
                Route("/version", self._version),
                Route(FETCH_PATH, self._give_kv, methods=["POST"]),
                Route("/load", self._server_load),
                Route("/metrics", self._metrics),
                # As in vLLM, only the path with a slash reaches the application that filters.
                Mount("/metrics/", make_asgi_app(self._registry)),
            ],
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _detail},
        )

    @property
    def engine(self) -> MockEngine:
        """The first engine, which is the only one unless there are more ranks."""
        return self.engines[0]

    def stop(self) -> None:
        """End all engines, if they run."""
        for engine in self.engines:
            engine.stop()

    @property
    def load(self) -> int:
        """Requests of all routes that use the model inside now."""
        return self._load

    def _posted(
        self,
        path: str,
        read: Callable[[bytes], Asked],
        prefix: str,
        make: Callable[[Asked, str, int], AnyReply],
    ) -> Route:
        """Route POSTs to the engine."""

        async def generate(_: Request, exchange: Exchange) -> None:
            asked = read(await exchange.body())
            engine = self._engine_for(exchange.rank(len(self.engines)))
            reply_id = f"{prefix}-{exchange.name(asked.request_id)}"
            try:
                asked = await with_prompt_from_elsewhere(asked)
            except UnusableParamsError as error:
                # vLLM's engine dies of an assertion here.
                engine.stop()
                raise EngineDeadError from error
            reply = make(asked, reply_id, int(time.time()))
            await self._answer(engine, _Work(asked, reply_id, reply), exchange)

        return self._served(path, generate)

    def _served(self, path: str, handle: Callable[[Request, Exchange], Awaitable[None]]) -> Route:
        """Route POSTs to a handler; what it raises becomes an answer."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send, id_headers=self._config.request_id_headers)
            self._load += 1
            try:
                await handle(Request(scope, receive), exchange)
            except EngineDeadError:
                await exchange.refuse(engine_died())
            except ApiError as error:
                await exchange.refuse(error)
            except ClientLeftError:
                return
            finally:
                self._load -= 1

        return Route(path, _Asgi(serve), methods=["POST"])

    def _engine_for(self, rank: int | None) -> MockEngine:
        """The engine asked for, else the one with the least to do."""
        if rank is not None:
            return self.engines[rank]
        return min(self.engines, key=lambda engine: engine.load)

    async def _answer(self, engine: MockEngine, work: _Work, exchange: Exchange) -> None:
        """Generate, and send what comes when it comes."""
        asked, reply = work.asked, work.reply
        params = engine.kv_store.ask_to_keep(asked, work.reply_id, exchange.server)
        try:
            generation = engine.submit(asked.decodes)
        except QueueFullError as error:
            full = ApiError(503, "The server's request queue is full.", kind="Service Unavailable")
            if not asked.stream:
                raise full from error
            # A stream is refused inside a 200.
            await exchange.start(200, EVENTS)
            await exchange.end(reply.failure(full))
            return
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(abort_when_client_leaves(engine, generation, exchange))
            try:
                if asked.stream:
                    await stream(generation, reply, exchange)
                else:
                    await send_whole(generation, reply, exchange, params)
            finally:
                leaving.cancel()
                engine.abort(generation)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(engine.run(), name="mock engine") for engine in self.engines
            ]
            # Let them start before the server listens.
            await asyncio.sleep(0)
            yield
            for engine in running:
                engine.cancel()

    async def _models(self, _: Request) -> Response:
        card = {
            "id": self._config.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "vllm",
            "root": self._config.model,
            "parent": None,
            "max_model_len": self._config.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def _stored(self, request: Request) -> Response:
        try:
            stored = self._responses.find(request.path_params["response_id"])
        except ApiError as error:
            return _json(error.body(), error.status)
        return Response(stored.body, media_type="application/json")

    async def _health(self, _: Request) -> Response:
        alive = all(engine.alive for engine in self.engines)
        return Response(status_code=200 if alive else 503)

    async def _version(self, _: Request) -> Response:
        return _json({"version": VLLM_VERSION})

    async def _give_kv(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        if all(request.query_params.get(ENGINE) != one.kv_store.engine_id for one in self.engines):
            return _json({"prompt_key": None}, OTHER_ENGINE)
        keys = [engine.kv_store.take(request_id) for engine in self.engines]
        prompt_key = next((key for key in keys if key is not None), None)
        return _json({"prompt_key": prompt_key}, 404 if prompt_key is None else 200)

    async def _server_load(self, _: Request) -> Response:
        return _json({"server_load": self._load})

    async def _metrics(self, _: Request) -> Response:
        page = generate_latest(self._registry)
        return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


class _Asgi:
    """Marks an ASGI application: Starlette would take a bare function for its own kind."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _json(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


async def _detail(_: Request, error: Exception) -> Response:
    """Answer unknown routes and methods as FastAPI does."""
    if not isinstance(error, HTTPException):
        raise error
    body = orjson.dumps({"detail": error.detail})
    return Response(body, error.status_code, error.headers, "application/json")
