"""Serving mock workers by uvicorn: as a process of their own, or inside another one.

`running_mock_workers` is for `bidgate serve --mock N` and for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.acceptor import AcceptingServer
from service.listener import BACKLOG
from service.mock.worker import MockServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from types import FrameType

    from starlette.types import ASGIApp

    from service.mock.worker_config import MockWorkerConfig

KEEPALIVE_S: Final = 5
"""vLLM closes idle connections after this long."""
SHUTDOWN_S: Final = 2
"""How long clients may take to read what was sent to them before a server ends."""


class MockHttpServer(AcceptingServer):
    """One mock worker's HTTP server.

    Args:
        mock: the worker.
        host: address to listen on, unless sockets are given to serve().
        port: port to listen on; 0 takes a free one.
        log_level: uvicorn's; None leaves logging as the process has set it.
        app: what is served in the place of the worker's own application.
        protocol: how HTTP is spoken on a connection.
    """

    def __init__(
        self,
        mock: MockServer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        log_level: str | None,
        app: ASGIApp | None = None,
        protocol: type[asyncio.Protocol] = HttpToolsProtocol,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app or mock.app,
                host=host,
                port=port,
                loop="uvloop",
                http=protocol,
                ws="none",
                lifespan="on",
                log_level=log_level,
                log_config=uvicorn.config.LOGGING_CONFIG if log_level else None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEPALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._mock = mock

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End on a signal."""
        super().handle_exit(sig, frame)
        self.stop()

    def stop(self) -> None:
        """End soon: requests in flight get an error at once, as from a vLLM that dies."""
        self.should_exit = True
        self._mock.stop()


class EmbeddedServer(MockHttpServer):
    """A server as a task among others: it leaves the process's signals alone."""

    def __init__(
        self,
        mock: MockServer,
        *,
        app: ASGIApp | None = None,
        protocol: type[asyncio.Protocol] = HttpToolsProtocol,
    ) -> None:
        super().__init__(mock, log_level=None, app=app, protocol=protocol)
        self._settled = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and tell those who wait for it."""
        try:
            await super().startup(sockets)
        finally:
            self._settled.set()

    async def until_started(self) -> None:
        """Return when it listens.

        Raises:
            RuntimeError: it could not start.
        """
        await self._settled.wait()
        if not self.started:
            raise RuntimeError("a mock worker did not start")


@contextlib.asynccontextmanager
async def running_mock_workers(
    workers: Sequence[MockWorkerConfig | MockServer], host: str = "127.0.0.1"
) -> AsyncIterator[tuple[str, ...]]:
    """Serve mock workers on free ports; yields their base URLs, in order.

    They end with the block, requests in flight included.

    Raises:
        RuntimeError: one did not start.
    """
    mocks = [each if isinstance(each, MockServer) else MockServer(each) for each in workers]
    servers = [EmbeddedServer(mock) for mock in mocks]
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in servers]
        for listener in listeners:
            listener.bind((host, 0))
        urls = tuple(f"http://{host}:{listener.getsockname()[1]}" for listener in listeners)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(server.serve([listener]))
                for server, listener in zip(servers, listeners, strict=True)
            ]
            try:
                for server in servers:
                    await server.until_started()
                yield urls
            finally:
                for server in servers:
                    server.stop()
                # An error in the block must not cancel them before they have shut down.
                if tasks:
                    await asyncio.wait(tasks)
