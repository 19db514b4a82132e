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

ACCEPTS_MAX: Final = 256
"""In one turn; the others wait for the next one."""
NO_FILES_PAUSE_S: Final = 0.1
"""After the system had no file or memory for a connection."""
HANDSHAKE_S: Final = 15.0
"""Longest TLS handshake."""


class Acceptor:
    """Hands connections to protocols; closed and waited for like an asyncio server.

    Args:
        listener: a listening socket; whoever opened it closes it, after this.
        make_protocol: for each connection.
        tls: of the listener; None for plain connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accept no more; who is in a TLS handshake is hung up on."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
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
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _arrive(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        timeout_s = None if self._tls is None else HANDSHAKE_S
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, peer, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            # It left before it was in, or its handshake failed.
            peer.close()
