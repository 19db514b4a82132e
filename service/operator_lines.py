"""1 edge, who did what: a log line for each request to the operator's routes, answered or refused.

What changes the fleet is told whatever the settings; a look at it like every other request's line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from service.auth import ADMIN_PREFIX
from service.errors import REASON_HEADER, ClientError
from service.headers import first

LOOKS: Final = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""


class OperatorLines:
    """Passes requests on to the application inside, and writes a line for each of the operator's.

    Args:
        app: the application.
        log: takes the lines.
        all_lines: whether requests have lines.
    """

    def __init__(
        self, app: ASGIApp, log: FilteringBoundLogger, all_lines: Callable[[], bool]
    ) -> None:
        self._app = app
        self._log = log
        self._all_lines = all_lines

    async def answer(self, scope: Scope, receive: Receive, send: Send, request_id: bytes) -> None:
        """Let the application answer."""
        if not scope["path"].startswith(ADMIN_PREFIX):
            await self._app(scope, receive, send)
            return
        # Without an answer the application broke, which the server turns into this.
        status, reason = 500, ""

        async def watched(message: Message) -> None:
            nonlocal status, reason
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.get("headers", ())
                reason = (first(headers, REASON_HEADER.encode()) or b"").decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._write(scope, request_id, status, reason)

    def refused(self, scope: Scope, request_id: bytes, error: ClientError) -> None:
        """The door did not let a request in."""
        if scope["path"].startswith(ADMIN_PREFIX):
            self._write(scope, request_id, error.status, error.cause)

    def _write(self, scope: Scope, request_id: bytes, status: int, reason: str) -> None:
        if scope["method"] in LOOKS and not self._all_lines():
            return
        host, port = scope.get("client") or ("", 0)
        line = {
            "request_id": request_id.decode(),
            "client": f"{host}:{port}" if host else "",
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "reason": reason,
        }
        self._log.info("operator", **{name: value for name, value in line.items() if value})
