"""Serving: a listening socket, uvicorn, and an end in order.

On the first SIGTERM or SIGINT `/ready` says 503 and new requests are refused, while those inside
finish within the limit; then the process exits with 0. At the limit, and at a second signal, what
is still inside ends at once: streams with an error event, requests that wait with a 503.
"""

from __future__ import annotations

import asyncio
import ssl
from types import FrameType
from typing import Final

import uvicorn
from structlog.typing import FilteringBoundLogger

from service.acceptor import AcceptingServer
from service.app import Service
from service.bounded_http import HeadBounds, bounded_http
from service.listener import BACKLOG
from service.settings import ServerConfig
from service.tls import ListenerTls

LAST_BYTES_S: Final = 2
"""After the drain, how long clients may take to read what was sent to them."""


class DrainingServer(AcceptingServer):
    """uvicorn that lets requests finish before it closes its ears."""

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        log: FilteringBoundLogger,
        tls: ListenerTls | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                service.app,
                loop="uvloop",
                http=bounded_http(
                    HeadBounds(config.head_bytes_max, config.head_timeout_s),
                    service.telemetry.observe_no_request,
                ),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=config.client_keepalive_s,
                timeout_graceful_shutdown=LAST_BYTES_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )
        self._service = service
        self._tls = tls
        self._drain_s = config.drain_s
        self._log = log
        self._drain_until_s: float | None = None
        self._signalled = False
        self._hurried = False
        self._leave_at_s: float | None = None

    def tls(self) -> ssl.SSLContext | None:
        """TLS for the next connection; None for a plain one."""
        return None if self._tls is None else self._tls.context

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at the second; the exit status stays 0."""
        self._hurried = self._signalled
        self._signalled = True

    async def on_tick(self, counter: int) -> bool:
        """Go on until the drain is over."""
        if self._signalled and not self.should_exit:
            self._drain()
        return await super().on_tick(counter)

    def _drain(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._drain_until_s is None:
            self._service.queue.drain()
            self._drain_until_s = now_s + self._drain_s
            self._log.info("draining", held=self._service.held, limit_s=self._drain_s)
        held = self._service.held
        if self._leave_at_s is not None:
            self.should_exit = not held or now_s >= self._leave_at_s
        elif not held:
            self._log.info("stopping", held=0)
            self.should_exit = True
        elif self._hurried or now_s >= self._drain_until_s:
            self._log.info("stopping", held=held)
            self._service.inside.end_all()
            self._leave_at_s = now_s + LAST_BYTES_S
