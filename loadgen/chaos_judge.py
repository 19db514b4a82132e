"""What came back to a client of a chaos run, and how its request ended by that.

A complete answer of the wrong sort is WRONG, no end at all is HUNG: both fail the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import orjson

from loadgen.chaos_keys import LIMITED, STRANGE, Key
from loadgen.chaos_plan import LIGHT, UNSERVED, Kind
from loadgen.chaos_requests import proxied
from service.mock.faults import NONSENSE

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
OVER_LIMIT: Final = "rate_limit_exceeded"
NO_KEY: Final = "invalid_api_key"
FAILURES: Final = (b'data: {"error":', b"event: error\n")
MAY_BE_GONE: Final = frozenset({404, 405})
"""A stored response whose worker died or that cannot be deleted; a route that no worker has."""


class End(StrEnum):
    """How a request ended for its client."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"
    LIMITED = "limited"
    LOCKED_OUT = "locked_out"
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

    @property
    def reason(self) -> str:
        """Why the router refused it; "" when it did not."""
        return self.headers.get(b"x-bidgate-reason", b"").decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers[name.lower()] = value

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        self.body += part

    def on_message_complete(self) -> None:
        """Note that the response is whole."""
        self.complete = True


def judge(kind: Kind, answer: Answer, key: Key = Key.OPEN) -> tuple[End, str]:
    """Say how a request ended whose connection was closed by the server."""
    if not answer.status:
        return End.WRONG, f"{kind}: closed without a response"
    if key in STRANGE and kind is not Kind.METRICS:
        return _judge_at_door(f"{kind}, {key}", answer, 401, End.LOCKED_OUT)
    if key in LIMITED and proxied(kind) and answer.reason == OVER_LIMIT:
        return _judge_at_door(f"{kind}, {key}", answer, 429, End.LIMITED)
    if answer.reason in (OVER_LIMIT, NO_KEY):
        return End.WRONG, f"{kind}, {key}: {answer.reason}"
    return _judge_inside(kind, answer)


def _judge_inside(kind: Kind, answer: Answer) -> tuple[End, str]:
    """Judge the answer to a request that was let in."""
    status = answer.status
    if status not in EXPECTED.get(kind, GENERATED):
        return End.WRONG, f"{kind}: status {status}: {bytes(answer.body[:200])!r}"
    if kind in UNSERVED:
        return _judge_unserved(kind, answer)
    if status in MAY_BE_GONE:
        return (End.REFUSED, "") if answer.complete else (End.FAILED, "")
    if status != 200:
        return _judge_error(kind, answer)
    # Of a stream on a light route only its connection tells whether it is complete.
    events = answer.headers.get(b"content-type", b"").startswith(b"text/event-stream")
    if events and kind not in LIGHT:
        return _judge_events(kind, answer)
    said = answer.complete and bytes(answer.body) != NONSENSE
    return (End.COMPLETED if said else End.FAILED), ""


def _judge_at_door(what: str, answer: Answer, status: int, end: End) -> tuple[End, str]:
    """Who is kept out is told so by a whole answer, and when to come again."""
    well = answer.complete and answer.status == status
    if not well or _error_type(answer) is None:
        return End.WRONG, f"{what}: status {answer.status}: {bytes(answer.body[:200])!r}"
    if end is End.LIMITED and not int(answer.headers.get(b"retry-after", b"0")):
        return End.WRONG, f"{what}: no Retry-After"
    return end, ""


def _error_type(answer: Answer) -> str | None:
    """Type of the error object of an answer; None where there is none."""
    try:
        kind = orjson.loads(bytes(answer.body))["error"]["type"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return str(kind)


def _judge_unserved(kind: Kind, answer: Answer) -> tuple[End, str]:
    if not answer.complete:
        return End.WRONG, f"{kind}: the answer was cut"
    return (End.COMPLETED if answer.status == 200 else End.REFUSED), ""


def _judge_error(kind: Kind, answer: Answer) -> tuple[End, str]:
    error, body = _error_type(answer), bytes(answer.body)
    if error is None:
        return End.WRONG, f"{kind}: status {answer.status} without an error object: {body[:200]!r}"
    if error == "server_error":
        return End.WRONG, f"{kind}: a bug of the router: {body[:200]!r}"
    return (End.REFUSED if answer.status in (429, 503) else End.FAILED), ""


def _judge_events(kind: Kind, answer: Answer) -> tuple[End, str]:
    """A stream ends as its format says or with an error event; others only pass for a success."""
    body = bytes(answer.body)
    if any(mark in body for mark in FAILURES):
        return End.FAILED, ""
    last = body.rstrip().rpartition(b"\n\n")[2]
    if last.startswith(STREAM_ENDS.get(kind, b"data: [DONE]")) and answer.complete:
        return End.COMPLETED, ""
    return End.WRONG, f"{kind}: the stream just stops: {body[-200:]!r}"
