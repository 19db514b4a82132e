"""How HTTP is spoken on a client's connection: uvicorn's way, with what it leaves open closed.

uvicorn bounds neither how long a head or trailers may be nor how long they may take, so a client
could hold a connection and memory for ever without ever being a request. It takes trailers for
headers, answers HTTP/1.0 in chunks, loses the body of a request that offers another protocol, and
does not see a client leave that sent its next request already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import (
    BAD_HTTP,
    HEAD_TOO_LARGE,
    HEAD_TOO_SLOW,
    REASON_HEADER,
    Answer,
    error_body,
)
from service.headers import RawHeaders

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn._types import ASGISendEvent
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

AHEAD_MAX: Final = 4
"""Requests behind the one that is being answered up to which reading goes on; what one read brought
is parsed whole."""


@dataclass(frozen=True, slots=True)
class HeadBounds:
    """Bounds of a request's first line and headers.

    Attributes:
        bytes_max: most of them, and of trailers. timeout_s: longest time they may take to arrive;
            and the rest of a body whose request is answered already.
    """

    bytes_max: int
    timeout_s: float


Refused: TypeAlias = "Callable[[Answer, str, str], None]"
"""Told of each refusal: the answer, why, and the address it went to."""


class _BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    bounds: HeadBounds
    refused: Refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open: deque[RequestResponseCycle] = deque()
        self._framing_bytes = 0
        self._moved_on = False
        self._in_head = True
        self._in_message = False
        self._muted = False
        self._refused = False
        self._leaving = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._rest_came()
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._moved_on = False
        try:
            self._parse(data)
        except HttpParserError:
            self._refuse(BAD_HTTP, "this is no HTTP/1.1 request")
            return
        if self._moved_on:
            self._framing_bytes = 0
            return
        # A head, trailers or a chunk's extension: the parser keeps what it has seen of it.
        self._framing_bytes += len(data)
        if self._framing_bytes > self.bounds.bytes_max and not self._refused:
            self._refuse_long()

    def on_message_begin(self) -> None:
        if self._muted:
            return
        super().on_message_begin()
        self._framing_bytes = 0
        self._in_head = self._in_message = True
        if self._head_timer is None:
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes after the body is a trailer, and no header (RFC 9110, 6.5.1).
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._muted:
            return
        self._head_came()
        self._moved_on = True
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.bounds.bytes_max:
            self._refuse_long()
            return
        super().on_headers_complete()
        self._in_head = False
        if self.parser.get_http_version() != "1.1":
            _answer_without_chunks(self.cycle)
        while self._open and self._open[0].response_complete:
            self._open.popleft()
        self._open.append(self.cycle)
        self.cycle.transport = cast("asyncio.Transport", _LastReader(self.transport, self.hang_up))
        if 0 < len(self.pipeline) < AHEAD_MAX:
            # uvicorn stops reading at the first; then nobody would see this client leave.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._moved_on = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and _body_framing(self.headers):
            # The parser thinks so; _parse lets the body follow.
            return
        self._moved_on = True
        self._in_message = False
        self._rest_came()
        if self._leaving:
            self._refused = True
            self.transport.close()
            return
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        unread = self._in_message and not self._in_head and self.cycle.response_complete
        if unread and self._rest_timer is None:
            self._rest_timer = self.loop.call_later(self.bounds.timeout_s, self.transport.close)

    def hang_up(self) -> None:
        """Close after an answer, but not on a client that is still sending its request.

        That would reset the connection, and most clients then lose the answer. It is read to its
        end, for as long as on_response_complete allows.
        """
        if not self._in_message or self._in_head:
            self.transport.close()
            return
        self._leaving = True
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _parse(self, data: bytes) -> None:
        """Feed the parser, over offers of another protocol, which it takes for accepted.

        Raises:
            HttpParserError: this is no HTTP.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                framing = _body_framing(self.headers)
                if framing:
                    self._muted = True
                    self.parser = HttpRequestParser(self)
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
                    self._muted = False

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.timeout_s, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _rest_came(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._refused or self.transport.is_closing():
            return
        if all(cycle.response_complete for cycle in self._open):
            why = f"the request's head is not here after {self.bounds.timeout_s:g} s"
            self._refuse(HEAD_TOO_SLOW, why)
        else:
            self._expect_head()

    def _refuse_long(self) -> None:
        part = "head is" if self._in_head else "trailers are"
        why = f"the request's {part} longer than {self.bounds.bytes_max} bytes"
        self._refuse(HEAD_TOO_LARGE, why)

    def _refuse(self, answer: Answer, why: str) -> None:
        """Answer by hand, where no other answer is on its way, and hang up."""
        self._refused = True
        answering = [cycle for cycle in self._open if not cycle.response_complete]
        if self._in_message and not self._in_head and answering == [self.cycle]:
            answering = [self.cycle] if self.cycle.response_started else []
        if not answering:
            self.transport.write(_by_hand(answer, why))
        host, port = self.client or ("", 0)
        self.refused(answer, why, f"{host}:{port}")
        self.transport.close()


class _LastReader:
    """A transport to whoever answers a request; closing it waits for the rest of the request."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        self.close = close


def _body_framing(headers: RawHeaders) -> bytes:
    """The header that says how long the body is; nothing where there is none."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            return name + b": " + value
    return b""


def _by_hand(answer: Answer, why: str) -> bytes:
    """A whole response, for what never became a request."""
    body = error_body(why, answer)
    head = (
        b"content-type: application/json\r\nconnection: close\r\n"
        b"%s: %s\r\ncontent-length: %d\r\n\r\n"
        % (REASON_HEADER.encode(), str(answer.code).encode(), len(body))
    )
    return STATUS_LINE[answer.status] + head + body


def _answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """Let a body of unknown length end with the connection: HTTP/1.0 knows no chunks."""
    send = cycle.send
    told = True

    async def sending(message: ASGISendEvent) -> None:
        nonlocal told
        if message["type"] == "http.response.start":
            told = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if told else False
        elif message["type"] == "http.response.body" and not told:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = sending  # type: ignore[method-assign]


def bounded_http(bounds: HeadBounds, refused: Refused) -> type[asyncio.Protocol]:
    """Make the protocol class that uvicorn is to use."""
    make: Callable[..., type[_BoundedProtocol]] = type
    settled = {"bounds": bounds, "refused": staticmethod(refused)}
    return make("BoundedProtocol", (_BoundedProtocol,), settled)
