"""A mock worker that goes wrong on demand, as real ones do: one port, many lives.

Faults below HTTP (killed, frozen, reset, not even HTTP) are made in the connection's protocol;
those of the engine (stalled, slow) in the engine; a flapping health check in front of the
application. What comes next and when is the caller's plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.mock.kv_transfer import FETCH_ROOT
from service.mock.serving import EmbeddedServer
from service.mock.worker import MockServer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from service.mock.worker_config import MockWorkerConfig

RESET_NOW: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing sends a TCP reset."""
SLOWDOWN: Final = 5.0
RESET_SHARE: Final = 0.5
FLAP_LOOKS: Final = 4
"""A flapping health check says no this many times, then yes as often."""
REBIND_S: Final = 0.05
DRAINED_S: Final = 0.5
GENERATIONS_MAX: Final = 1_000_000
NONSENSE: Final = b"\x00\x01\x02\x03"
"""The body of a whole answer that says nothing; a router passes it on."""
GARBAGE: Final = (
    b"220 mail.example ESMTP ready\r\n",
    b'HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{"id":',
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"zz\r\nnot a chunk\r\n",
    b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"choices": [\xff\xfe\n\n',
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\n" + NONSENSE,
    b"HTTP/1.1 999999 ???\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
    b"",
)
"""What a broken server, or one that is no HTTP server at all, sends."""


class Fault(StrEnum):
    """What can go wrong with a worker."""

    KILL = "kill"
    RESTART = "restart"
    FREEZE = "freeze"
    STALL = "stall"
    SLOW = "slow"
    RESET = "reset"
    GARBAGE = "garbage"
    FLAP = "flap"
    SILENCE = "silence"
    """Prompts are computed, and nobody is told how to fetch them."""


OF_PREFILL: Final = frozenset({Fault.SILENCE})
"""Faults that only prefill workers can have."""


class _Line:
    """The connections of one life of a worker, and what is wrong with them now."""

    def __init__(self, rng: random.Random) -> None:
        self.open: set[_FragileProtocol] = set()
        self.frozen = False
        self.garbage = False
        self.rng = rng

    def thaw(self) -> None:
        self.frozen = False
        for connection in list(self.open):
            connection.thaw()

    def reset(self, share: float) -> None:
        for connection in list(self.open):
            if share >= 1 or (connection.answering and self.rng.random() < share):
                connection.reset()


class _FragileProtocol(HttpToolsProtocol):
    """HTTP on a connection that may freeze, be reset, or talk nonsense."""

    line: _Line

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._withheld: list[bytes] = []
        self.line.open.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.line.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.line.frozen:
            self._withheld.append(data)
        elif self.line.garbage:
            self.transport.write(self.line.rng.choice(GARBAGE))
            self.transport.close()
        else:
            super().data_received(data)

    @property
    def answering(self) -> bool:
        # None until the first request, whatever uvicorn's annotation says.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def thaw(self) -> None:
        withheld, self._withheld = self._withheld, []
        for data in withheld:
            if not self.transport.is_closing():
                super().data_received(data)

    def reset(self) -> None:
        peer = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_NOW)
        self.transport.abort()


class FragileWorker:
    """One mock worker on one port that dies, comes back and misbehaves when told to.

    Attributes:
        url: where it is, dead or alive.
        generations: how often each x-request-id was taken up by an engine, over all lives; at most
            GENERATIONS_MAX ids.
    """

    def __init__(self, config: MockWorkerConfig, seed: int, host: str = "127.0.0.1") -> None:
        self.generations: Counter[str] = Counter()
        self._config = config
        self._rng = random.Random(seed)
        # Bound but never listening: it keeps the port while the worker is dead.
        self._place = self._bind(host, 0)
        self._host, self._port = self._place.getsockname()
        self.url = f"http://{self._host}:{self._port}"
        self._alive = asyncio.Event()
        self._alive.set()
        self._up = asyncio.Event()
        self._flapping = False
        self._leaving = False
        self._looks = 0

    async def run(self) -> None:
        """Live, die and live again until cancelled."""
        try:
            while True:
                await self._alive.wait()
                await self._live()
        finally:
            self._place.close()

    async def until_up(self) -> None:
        """Return when it listens."""
        await self._up.wait()

    @property
    def held(self) -> int:
        """Requests inside the engine now."""
        return self._mock.load if self._up.is_set() else 0

    async def suffer(self, fault: Fault, for_s: float) -> None:
        """Have a fault for a time, then be well again; returns when that is so.

        A worker that is dead already stays so for the time of the older fault.
        """
        if not self._up.is_set():
            return
        match fault:
            case Fault.KILL:
                await self._die(for_s)
            case Fault.RESTART:
                await self._die(0.0)
            case Fault.RESET:
                self._line.reset(RESET_SHARE)
            case _:
                self._begin(fault)
                try:
                    await asyncio.sleep(for_s)
                finally:
                    self._end(fault)

    async def replace(self, for_s: float) -> None:
        """Be replaced as an orchestrator does it: unready, drained, gone for a time, new.

        It says so by its health check and serves on until nothing came for DRAINED_S.
        """
        self._leaving = True
        try:
            calm_s = 0.0
            while calm_s < DRAINED_S:
                await asyncio.sleep(REBIND_S)
                calm_s = 0.0 if self.held else calm_s + REBIND_S
            await self._die(for_s)
        finally:
            self._leaving = False

    def _begin(self, fault: Fault) -> None:
        engines = self._mock.engines
        match fault:
            case Fault.FREEZE:
                self._line.frozen = True
                for engine in engines:
                    engine.pause()
            case Fault.STALL:
                for engine in engines:
                    engine.pause()
            case Fault.SLOW:
                for engine in engines:
                    engine.slowdown = SLOWDOWN
            case Fault.GARBAGE:
                self._line.garbage = True
            case Fault.SILENCE:
                for engine in engines:
                    engine.kv_store.silent = True
            case _:
                self._flapping = True

    def _end(self, fault: Fault) -> None:
        """Undo `_begin`; on another life than it began in that changes nothing."""
        engines = self._mock.engines
        match fault:
            case Fault.FREEZE:
                for engine in engines:
                    engine.resume()
                self._line.thaw()
            case Fault.STALL:
                for engine in engines:
                    engine.resume()
            case Fault.SLOW:
                for engine in engines:
                    engine.slowdown = 1.0
            case Fault.GARBAGE:
                self._line.garbage = False
            case Fault.SILENCE:
                for engine in engines:
                    engine.kv_store.silent = False
            case _:
                self._flapping = False

    async def _die(self, for_s: float) -> None:
        self._alive.clear()
        self._up.clear()
        self._line.reset(1.0)
        for server in self._server.servers:
            server.close()
        self._server.should_exit = True
        try:
            await asyncio.sleep(for_s)
        finally:
            self._leaving = False
            self._alive.set()
        await self.until_up()

    async def _live(self) -> None:
        """Serve one life: a new engine, so all counters begin at zero."""
        self._mock = MockServer(self._config)
        self._line = line = _Line(self._rng)
        protocol = type("_Protocol", (_FragileProtocol,), {"line": line})
        self._server = EmbeddedServer(self._mock, app=self._front(self._mock), protocol=protocol)
        with await self._listen() as listener:
            serving = asyncio.ensure_future(self._server.serve([listener]))
            try:
                await self._server.until_started()
                self._up.set()
                await asyncio.shield(serving)
            finally:
                self._up.clear()
                self._server.should_exit = True
                line.reset(1.0)
                await serving

    async def _listen(self) -> socket.socket:
        while True:
            try:
                return self._bind(self._host, self._port)
            except OSError:
                await asyncio.sleep(REBIND_S)

    @staticmethod
    def _bind(host: str, port: int) -> socket.socket:
        place = socket.socket()
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            place.bind((host, port))
        except OSError:
            place.close()
            raise
        return place

    def _front(self, mock: MockServer) -> ASGIApp:
        """Put the flapping health check and the count of generations before the application."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await mock.app(scope, receive, send)
            elif scope["path"] == "/health" and self._says_no():
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b""})
            elif scope["method"] == "POST" and not scope["path"].startswith(FETCH_ROOT):
                await self._counted(mock.app, scope, receive, send)
            else:
                await mock.app(scope, receive, send)

        return app

    def _says_no(self) -> bool:
        self._looks += 1
        return self._leaving or (self._flapping and self._looks // FLAP_LOOKS % 2 == 0)

    async def _counted(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request as generated unless it was answered with an error."""
        refused = False

        async def noting(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                refused = message["status"] not in (200, 500)
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            name = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
            if not refused and len(self.generations) < GENERATIONS_MAX:
                self.generations[name] += 1
