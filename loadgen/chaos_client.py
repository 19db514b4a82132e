"""One client of a chaos run: sends one request over its own socket and judges what comes back.

Raw sockets, so that it can leave, stop reading, and tell a response that is complete from one that
was cut. A complete answer of the wrong sort is WRONG, no end at all is HUNG: both fail the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import httptools
import orjson

from loadgen.chaos_plan import LIGHT, UNSERVED, Kind, PlannedRequest
from loadgen.chaos_requests import request_bytes

if TYPE_CHECKING:
    from loadgen.chaos_patience import Patience

READ_BYTES: Final = 4096
GENERATED: Final = frozenset({200, 429, 500, 502, 503, 504})
"""What a request that a worker could serve may be answered."""
EXPECTED: Final[dict[Kind, frozenset[int]]] = {
    Kind.TOO_LARGE: frozenset({400, 429}),
    Kind.UNKNOWN_MODEL: frozenset({404, 429}),
    Kind.NOT_JSON: frozenset({400}),
    Kind.WRONG_FIELD: frozenset({400}),
    Kind.MODELS: frozenset({200}),
    Kind.METRICS: frozenset({200}),
    Kind.NO_SUCH_ROUTE: frozenset({404}),
    Kind.SHOWN: GENERATED | {404},
    Kind.DELETED: GENERATED | {404, 405},
    Kind.NEWER_ROUTE: GENERATED - {200} | {404},
}
STREAM_ENDS: Final[dict[Kind, bytes]] = {
    Kind.RESPONSE_STREAM: b"event: response.completed\n",
    Kind.MESSAGE_STREAM: b"event: message_stop\n",
}
FAILURES: Final = (b'data: {"error":', b"event: error\n")
MAY_BE_GONE: Final = frozenset({404, 405})
"""A stored response whose worker died or that cannot be deleted; a route that no worker has."""


class End(StrEnum):
    """How a request ended for its client."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    LEFT = "left"
    WRONG = "wrong"
    HUNG = "hung"


@dataclass(slots=True)
class Answer:
    """A response as it comes in; httptools calls the methods.

    Attributes:
        status: 0 before it is known. headers, body: what came of them. complete: it is whole.
        stage: what its client waits for.
    """

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    stage: str = "a connection"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers[name.lower()] = value

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        self.body += part

    def on_message_complete(self) -> None:
        """Note that the response is whole."""
        self.complete = True


async def send(
    host: str, port: int, request: PlannedRequest, name: str, patience: Patience
) -> tuple[End, str]:
    """Play one client; returns how it ended and, when that is wrong, why."""
    answer = Answer()
    leaving = request.leave_s is not None
    limit = asyncio.timeout(request.leave_s) if leaving else patience.limit()
    try:
        async with limit:
            await _converse(host, port, request_bytes(request, name), request.dawdle_s, answer)
    except TimeoutError:
        if leaving:
            return End.LEFT, ""
        return End.HUNG, (
            f"{request.kind}: no end within {patience.within_s:g} s; it waits for"
            f" {answer.stage}, status {answer.status}, {len(answer.body)} bytes"
        )
    except httptools.HttpParserError as error:
        return End.WRONG, f"{request.kind}: the response is no HTTP: {error}"
    except OSError as error:
        if not answer.status:
            return End.WRONG, f"{request.kind}: no response: {error}"
    return judge(request.kind, answer)


async def _converse(host: str, port: int, data: bytes, dawdle_s: float, answer: Answer) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
    parser = httptools.HttpResponseParser(answer)
    try:
        answer.stage = "its request to be taken"
        writer.write(data)
        # A refusal may come before all of a large body was read; then reading tells why.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        answer.stage = "an answer"
        while part := await reader.read(READ_BYTES):
            parser.feed_data(part)
            answer.status = parser.get_status_code()
            answer.stage = "the end of the connection" if answer.complete else "more"
            if dawdle_s:
                await asyncio.sleep(dawdle_s)
                dawdle_s = 0.0
    finally:
        # Unsent bytes must not keep the socket of a client that left.
        writer.transport.abort()


def judge(kind: Kind, answer: Answer) -> tuple[End, str]:
    """Say how a request ended whose connection was closed by the server."""
    status, body = answer.status, bytes(answer.body)
    if not status:
        return End.WRONG, f"{kind}: closed without a response"
    if status not in EXPECTED.get(kind, GENERATED):
        return End.WRONG, f"{kind}: status {status}: {body[:200]!r}"
    if kind in UNSERVED:
        return _judge_unserved(kind, answer)
    if status in MAY_BE_GONE:
        return (End.REFUSED, "") if answer.complete else (End.FAILED, "")
    if status != 200:
        return _judge_error(kind, status, body)
    # Of a stream on a light route only its connection tells whether it is complete.
    events = answer.headers.get(b"content-type", b"").startswith(b"text/event-stream")
    if events and kind not in LIGHT:
        return _judge_events(kind, answer)
    if not answer.complete:
        return End.FAILED, ""
    return End.COMPLETED, ""


def _judge_unserved(kind: Kind, answer: Answer) -> tuple[End, str]:
    if not answer.complete:
        return End.WRONG, f"{kind}: the answer was cut"
    return (End.COMPLETED if answer.status == 200 else End.REFUSED), ""


def _judge_error(kind: Kind, status: int, body: bytes) -> tuple[End, str]:
    try:
        error = orjson.loads(body)["error"]
        ours = error["type"] == "server_error"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return End.WRONG, f"{kind}: status {status} without an error object: {body[:200]!r}"
    if ours:
        return End.WRONG, f"{kind}: a bug of the router: {body[:200]!r}"
    return (End.REFUSED if status in (429, 503) else End.FAILED), ""


def _judge_events(kind: Kind, answer: Answer) -> tuple[End, str]:
    """A stream ends as its format says or with an error event; others only pass for a success."""
    body = bytes(answer.body)
    if any(mark in body for mark in FAILURES):
        return End.FAILED, ""
    last = body.rstrip().rpartition(b"\n\n")[2]
    if last.startswith(STREAM_ENDS.get(kind, b"data: [DONE]")) and answer.complete:
        return End.COMPLETED, ""
    return End.WRONG, f"{kind}: the stream just stops: {body[-200:]!r}"
