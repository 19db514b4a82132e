"""What can end a request early, and the HTTP answer each cause gets.

    BidgateError
    |-- ClientError                     the client's fault
    |   |-- BadRequestError         400 invalid_request_error
    |   |-- BodyTooLargeError       413 invalid_request_error
    |   |-- BodyTooSlowError        408 timeout_error
    |   |-- EncodedBodyError        415 invalid_request_error
    |   |-- UnauthorizedError       401 authentication_error
    |   |-- OperatorRouteError      403 permission_error
    |   |-- MethodNotAllowedError   405 invalid_request_error
    |   |-- UnknownResponseError    404 not_found_error: no worker is known to hold it
    |   |-- RateLimitedError        429 rate_limit_error
    |   |-- NoSuchRouteError        404 not_found_error
    |   |-- NoSuchWorkerError       404 not_found_error, to the operator
    |   `-- WorkerConflictError     409 invalid_request_error, to the operator
    |-- ClientGoneError             499 in logs only: nobody is left to read an answer
    |-- RefusedError(reason)            REFUSAL_ANSWERS, one row per Refusal
    |-- StoppedError                503 service_unavailable: bidgate stops before the end
    |-- DeadlineExceededError       504 timeout_error: the client's own deadline has passed
    |-- UpstreamError                   the worker's fault
    |   |-- WorkerUnreachableError  502 bad_gateway: no connection, so nothing was generated
    |   |-- WorkerBrokeError        502 bad_gateway: the connection died after the request was sent
    |   |-- HandoffMissingError     502 bad_gateway: prefilled, but not told how to fetch it
    |   `-- WorkerLateError         504 timeout_error: no byte for too long
    `-- RouterBrokeError            500 server_error: our own bug

429 means "full, try again", 503 "nobody can serve this now". Overload is never a 500.
A request that can never fit is a 400 (code context_length_exceeded): its length is wrong, while
413 is kept for bodies over the byte limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from service.control.events import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

ASK_LATER_S: Final = 5
"""When a client that was refused may try again, where nothing better is known."""
REASON_HEADER: Final = "x-bidgate-reason"
"""Tells which error an answer of our own is, whatever the format of its body."""
ANTHROPIC_TYPES: Final = MappingProxyType(
    {
        "server_error": "api_error",
        "bad_gateway": "api_error",
        "service_unavailable": "overloaded_error",
    }
)
"""Anthropic's names of error types, where they differ from OpenAI's."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an error looks to a client.

    Attributes:
        status: HTTP status.
        type: OpenAI error type.
        code: OpenAI error code, or None.
        retry: whether a Retry-After header makes sense.
    """

    status: int
    type: str
    code: str | None = None
    retry: bool = False


HEAD_TOO_LARGE: Final = Answer(431, "invalid_request_error", "head_too_large")
HEAD_TOO_SLOW: Final = Answer(408, "timeout_error", "head_too_slow")
BAD_HTTP: Final = Answer(400, "invalid_request_error", "bad_http")
NO_REQUEST: Final = (HEAD_TOO_LARGE, HEAD_TOO_SLOW, BAD_HTTP)
"""Answers to what never became a request."""

REFUSAL_ANSWERS: Final[Mapping[Refusal, Answer]] = MappingProxyType(
    {
        Refusal.QUEUE_FULL: Answer(429, "rate_limit_error", "queue_full", retry=True),
        Refusal.DISPLACED: Answer(429, "rate_limit_error", "displaced", retry=True),
        Refusal.WAITED_TOO_LONG: Answer(429, "rate_limit_error", "waited_too_long", retry=True),
        Refusal.WOULD_WAIT: Answer(429, "rate_limit_error", "would_wait", retry=True),
        Refusal.TOO_LARGE: Answer(400, "invalid_request_error", "context_length_exceeded"),
        Refusal.UNKNOWN_MODEL: Answer(404, "not_found_error", "model_not_found"),
        Refusal.NO_WORKER: Answer(503, "service_unavailable", "no_worker", retry=True),
        Refusal.DRAINING: Answer(503, "service_unavailable", "draining", retry=True),
    }
)


class BidgateError(Exception):
    """Base of everything that ends a request early; not raised itself.

    Attributes:
        answer: status, type and code for the client.
        param: the request field at fault, or None.
        retry_after_s: whole seconds for Retry-After, or None.
    """

    answer: ClassVar[Answer] = Answer(500, "server_error")

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def reply(self) -> Answer:
        """The answer of this very error; a class-wide value for most."""
        return self.answer

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.reply.status

    @property
    def cause(self) -> str:
        """What a program may tell causes apart by: the code, else the type."""
        return self.reply.code or self.reply.type

    def body(self, *, anthropic: bool = False) -> bytes:
        """The OpenAI error object, as JSON; with what Anthropic's clients look for as well."""
        return error_body(str(self), self.reply, self.param, anthropic=anthropic)


class ClientError(BidgateError):
    """The request itself is wrong."""

    answer = Answer(400, "invalid_request_error")


class BadRequestError(ClientError):
    """The body or a header cannot be understood."""


class BodyTooLargeError(ClientError):
    """The body is longer than the limit."""

    answer = Answer(413, "invalid_request_error", "body_too_large")


class BodyTooSlowError(ClientError):
    """The body did not arrive in time."""

    answer = Answer(408, "timeout_error", "body_too_slow")


class EncodedBodyError(ClientError):
    """The body is compressed, and bidgate must read it."""

    answer = Answer(415, "invalid_request_error", "encoded_body")


class UnauthorizedError(ClientError):
    """The API key is missing or wrong."""

    answer = Answer(401, "authentication_error", "invalid_api_key")


class OperatorRouteError(ClientError):
    """The route acts on one engine, for which operators ask that engine."""

    answer = Answer(403, "permission_error", "operator_route")


class MethodNotAllowedError(ClientError):
    """The route takes another method."""

    answer = Answer(405, "invalid_request_error", "method_not_allowed")


class UnknownResponseError(ClientError):
    """Nobody is known to hold the stored response."""

    answer = Answer(404, "not_found_error", "response_not_found")


class DeadlineExceededError(BidgateError):
    """The client's own deadline has passed."""

    answer = Answer(504, "timeout_error", "deadline_exceeded")


class RateLimitedError(ClientError):
    """The API key's limits are reached."""

    answer = Answer(429, "rate_limit_error", "rate_limit_exceeded", retry=True)


class NoSuchRouteError(ClientError):
    """There is no such route, or it is not served under these settings."""

    answer = Answer(404, "not_found_error")


class NoSuchWorkerError(ClientError):
    """The operator names a worker that is not in the fleet."""

    answer = Answer(404, "not_found_error", "no_such_worker")


class WorkerConflictError(ClientError):
    """The operator adds a worker whose id or URL is another's."""

    answer = Answer(409, "invalid_request_error", "worker_conflict")


class ClientGoneError(BidgateError):
    """The client left, or stopped reading for too long."""

    answer = Answer(499, "client_closed_request")


class StoppedError(BidgateError):
    """Bidgate stops, and the request was not at its end."""

    answer = Answer(503, "service_unavailable", "stopped", retry=True)


class RefusedError(BidgateError):
    """The router turned the request away."""

    def __init__(self, reason: Refusal, message: str, *, retry_after_s: int | None = None) -> None:
        known = REFUSAL_ANSWERS[reason]
        super().__init__(
            message, retry_after_s=(retry_after_s or ASK_LATER_S) if known.retry else None
        )
        self.reason = reason

    @property
    def reply(self) -> Answer:
        """The row of the reason."""
        return REFUSAL_ANSWERS[self.reason]


class UpstreamError(BidgateError):
    """The worker is at fault."""

    answer = Answer(502, "bad_gateway")


class WorkerUnreachableError(UpstreamError):
    """No connection could be made: the worker cannot have taken the request."""

    answer = Answer(502, "bad_gateway", "worker_unreachable")


class WorkerBrokeError(UpstreamError):
    """The connection died once the request was sent: it may have been generated in part."""

    answer = Answer(502, "bad_gateway", "worker_broke")


class HandoffMissingError(UpstreamError):
    """A prefill worker did not tell how to fetch what it computed."""

    answer = Answer(502, "bad_gateway", "handoff_missing")


class WorkerLateError(UpstreamError):
    """The worker sent nothing for too long."""

    answer = Answer(504, "timeout_error", "worker_late")


class RouterBrokeError(BidgateError):
    """Our own bug."""


def error_body(
    message: str, answer: Answer, param: str | None = None, *, anthropic: bool = False
) -> bytes:
    """Write the OpenAI error object that every client library understands.

    Anthropic's clients want a type beside it, and names of their own for two of ours.
    """
    kind = ANTHROPIC_TYPES.get(answer.type, answer.type) if anthropic else answer.type
    detail = {"message": message, "type": kind, "param": param, "code": answer.code}
    return orjson.dumps({"type": "error", "error": detail} if anthropic else {"error": detail})
