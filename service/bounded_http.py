"""How HTTP is spoken on a client's connection: uvicorn's way, with bounds on the head of a request.

uvicorn bounds neither how long a head may be nor how long it may take, so a client could hold a
connection and memory for ever without ever being a request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import Answer, error_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HEAD_TOO_LARGE: Final = Answer(431, "invalid_request_error", "head_too_large")
HEAD_TOO_SLOW: Final = Answer(408, "timeout_error", "head_too_slow")


@dataclass(frozen=True, slots=True)
class HeadBounds:
    """Bounds of a request's first line and headers.

    Attributes:
        bytes_max: most of them. timeout_s: longest time they may take to arrive.
    """

    bytes_max: int
    timeout_s: float


class _BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    bounds: HeadBounds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._head_timer is not None and not self._refused:
            # Part of a head: the parser keeps what it has seen of it.
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.bytes_max:
                self._refuse(HEAD_TOO_LARGE, f"longer than {self.bounds.bytes_max} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.bounds.bytes_max:
            self._refuse(HEAD_TOO_LARGE, f"longer than {self.bounds.bytes_max} bytes")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.timeout_s, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        # None until the first request, whatever uvicorn's annotation says.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        answering = cycle is not None and not cycle.response_complete
        if not (self._refused or answering or self.transport.is_closing()):
            self._refuse(HEAD_TOO_SLOW, f"not here after {self.bounds.timeout_s:g} s")

    def _refuse(self, answer: Answer, why: str) -> None:
        """Answer by hand, as there is no request yet, and hang up."""
        self._refused = True
        body = error_body(f"the request's head is {why}", answer)
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[answer.status] + head + body)
        self.transport.close()


def bounded_http(bounds: HeadBounds) -> type[asyncio.Protocol]:
    """Make the protocol class that uvicorn is to use."""
    make: Callable[..., type[_BoundedProtocol]] = type
    return make("BoundedProtocol", (_BoundedProtocol,), {"bounds": bounds})
