"""Accepting connections: all that wait, in every turn of the event loop.

uvloop accepts one a turn. Turns are long when many streams share little processor time; clients
then wait at the door for minutes while those inside are served well, and no metric shows it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

import uvicorn

from service.listener import BACKLOG

ACCEPTS_MAX: Final = 256
"""In one turn; the others wait for the next one."""
NO_FILES_PAUSE_S: Final = 0.1
"""After the system had no file or memory for a connection."""
HANDSHAKE_S: Final = 15.0
"""Longest TLS handshake."""


class Acceptor:
    """Hands connections to protocols; closed and waited for like an asyncio server.

    Args:
        listener: a bound socket, closed with this.
        make_protocol: for each connection.
        tls: of the listener, asked for each connection; None for plain ones.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._arriving: dict[asyncio.Task[None], socket.socket] = {}
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._open()

    def close(self) -> None:
        """Accept no more; who is in a TLS handshake is hung up on."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._arriving:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return when nobody is on the way in."""
        if self._arriving:
            await asyncio.wait(self._arriving)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError:
                # It stays readable, so without a pause this would be tried for ever.
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(NO_FILES_PAUSE_S, self._open)
                return
            task = self._loop.create_task(self._arrive(peer))
            self._arriving[task] = peer
            task.add_done_callback(self._arrived)

    async def _arrive(self, peer: socket.socket) -> None:
        """Give a connection to its protocol.

        Raises:
            OSError: it left before it was in, or its handshake failed.
        """
        peer.setblocking(False)
        # asyncio's own loop does not for a socket that came from accept(); tokens must not wait.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = self._tls()
        timeout_s = None if tls is None else HANDSHAKE_S
        await self._loop.connect_accepted_socket(
            self._make_protocol, peer, ssl=tls, ssl_handshake_timeout=timeout_s
        )

    def _arrived(self, task: asyncio.Task[None]) -> None:
        """Close what did not come in, be it cancelled before its task began."""
        peer = self._arriving.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            peer.close()
        if error is not None and not isinstance(error, OSError):
            what = {"message": "a connection could not be served", "exception": error}
            self._loop.call_exception_handler(what)


class AcceptingServer(uvicorn.Server):
    """uvicorn, accepting that way on the sockets that are given to it."""

    def tls(self) -> ssl.SSLContext | None:
        """TLS for the next connection; None for a plain one."""
        return self.config.ssl

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets=None if sockets is None else [])
        config, state = self.config, self.server_state

        def protocol() -> asyncio.Protocol:
            # As uvicorn makes it; to type checkers the class is any protocol's.
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=state, app_state=self.lifespan.state
            )

        for listener in sockets or []:
            acceptor = Acceptor(listener, protocol, self.tls)
            self.servers.append(acceptor)  # type: ignore[arg-type]
