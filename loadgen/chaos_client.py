"""One client of a chaos run: sends one request over its own socket and judges what comes back.

Raw sockets, so that it can leave, stop reading, and tell a response that is complete from one that
was cut. A complete answer of the wrong sort is WRONG, no end at all is HUNG: both fail the run.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import httptools
import orjson

from loadgen.chaos_plan import UNSERVED, Kind, PlannedRequest

READ_BYTES: Final = 4096
IMPATIENT_MS: Final = 300
TOO_LARGE_TOKENS: Final = 600_000
MODEL: Final = "mock"
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
}
PATHS: Final[dict[Kind, tuple[str, str]]] = {
    Kind.MODELS: ("GET", "/v1/models"),
    Kind.METRICS: ("GET", "/metrics"),
    Kind.NO_SUCH_ROUTE: ("POST", "/no/such/route"),
    Kind.CHAT: ("POST", "/v1/chat/completions"),
    Kind.CHAT_STREAM: ("POST", "/v1/chat/completions"),
}
STREAMS: Final = frozenset(
    {Kind.STREAM, Kind.CHAT_STREAM, Kind.PARALLEL, Kind.LONG, Kind.IMPATIENT, Kind.TOKEN_IDS}
)


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
    """A response as it comes in; httptools calls the methods."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers[name.lower()] = value

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        self.body += part

    def on_message_complete(self) -> None:
        """Note that the response is whole."""
        self.complete = True


def proxied(kind: Kind) -> bool:
    """Whether the request goes to a route that bidgate counts as a request."""
    return kind not in (Kind.MODELS, Kind.METRICS, Kind.NO_SUCH_ROUTE)


def request_bytes(request: PlannedRequest, name: str) -> bytes:
    """Write the request out, head and body; name is its x-request-id."""
    method, path = PATHS.get(request.kind, ("POST", "/v1/completions"))
    body = b"" if method == "GET" else _body(request)
    wait = f"x-bidgate-max-wait-ms: {IMPATIENT_MS}\r\n" if request.kind is Kind.IMPATIENT else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\nx-request-id: {name}\r\n"
        f"content-type: application/json\r\n{wait}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _body(request: PlannedRequest) -> bytes:
    kind = request.kind
    if kind is Kind.NOT_JSON:
        return b'{"model": "mock", "prompt": '
    body: dict[str, object] = {
        "model": "no-such-model" if kind is Kind.UNKNOWN_MODEL else MODEL,
        "max_tokens": -1 if kind is Kind.WRONG_FIELD else request.decode_tokens,
        "ignore_eos": True,
        "stream": kind in STREAMS,
    }
    if kind in (Kind.CHAT, Kind.CHAT_STREAM):
        body["messages"] = [{"role": "user", "content": f"request {request.index}"}]
    elif kind is Kind.BATCH:
        body["prompt"] = ["one", "two", "three"]
    elif kind is Kind.TOKEN_IDS:
        body["prompt"] = list(range(40))
    elif kind is Kind.TOO_LARGE:
        body["prompt"] = [7] * TOO_LARGE_TOKENS
    else:
        body["prompt"] = f"request {request.index}"
    if kind is Kind.PARALLEL:
        body["n"] = 2
    return orjson.dumps(body)


async def send(
    host: str, port: int, request: PlannedRequest, name: str, within_s: float
) -> tuple[End, str]:
    """Play one client; returns how it ended and, when that is wrong, why."""
    answer = Answer()
    leave_s = within_s if request.leave_s is None else request.leave_s
    try:
        async with asyncio.timeout(min(leave_s, within_s)):
            await _converse(host, port, request_bytes(request, name), request.dawdle_s, answer)
    except TimeoutError:
        if request.leave_s is not None:
            return End.LEFT, ""
        return End.HUNG, f"{request.kind}: no end within {within_s:g} s, status {answer.status}"
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
        writer.write(data)
        # A refusal may come before all of a large body was read; then reading tells why.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        while part := await reader.read(READ_BYTES):
            parser.feed_data(part)
            answer.status = parser.get_status_code()
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
    if status != 200:
        return _judge_error(kind, status, body)
    if answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
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
    """A stream ends with [DONE] or an error event; others pass for a success and are none."""
    body = bytes(answer.body)
    if b'data: {"error":' in body:
        return End.FAILED, ""
    if body.rstrip().endswith(b"data: [DONE]") and answer.complete:
        return End.COMPLETED, ""
    return End.WRONG, f"{kind}: the stream just stops: {body[-200:]!r}"
