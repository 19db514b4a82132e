"""1 edge: raw ASGI around the proxied routes; reads a request, places it, streams the answer back.

Everything else goes to FastAPI (routes.py) with a request id. A proxied request passes neither
FastAPI nor a Request object: that costs more than all of bidgate's own work.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from service.asgi import AsgiReply, read_chunks, while_client_stays, with_request_id
from service.central_queue import CentralQueue
from service.control.events import Request
from service.errors import (
    Answer,
    BidgateError,
    BodyTooLargeError,
    BodyTooSlowError,
    ClientGoneError,
    RefusedError,
    RouterBrokeError,
    UnauthorizedError,
    error_body,
)
from service.forwarder import Call, Forwarder
from service.headers import RawHeaders, first, to_worker
from service.intake import BodyFacts, HeaderFacts, read_body, read_headers
from service.secrets import Secret
from service.telemetry import RequestRecord, Telemetry

PROXIED: Final = MappingProxyType({"/v1/chat/completions": "chat", "/v1/completions": "text"})
REQUEST_ID_CHARS_MAX: Final = 128
MODEL_LABEL_CHARS_MAX: Final = 128
METHOD_NOT_ALLOWED: Final = Answer(405, "invalid_request_error", "method_not_allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Bounds and secrets of the front.

    Attributes:
        api_key: clients must send it as a bearer token to every /v1 route; None lets all in.
        body_bytes_max: longest request body; longer is a 413.
        body_timeout_s: longest time a body may take to arrive.
        parse_off_loop_bytes: bodies this long are parsed in a thread, so that others do not wait.
        log_requests: write one line per proxied request.
    """

    api_key: Secret | None = None
    body_bytes_max: int = 64 * 1024 * 1024
    body_timeout_s: float = 60.0
    parse_off_loop_bytes: int = 1024 * 1024
    log_requests: bool = True

    def __post_init__(self) -> None:
        """Refuse bounds that are none."""
        if self.body_bytes_max < 1 or self.parse_off_loop_bytes < 1 or not self.body_timeout_s > 0:
            raise ValueError(
                "body_bytes_max, parse_off_loop_bytes, body_timeout_s must be positive"
            )


class Edge:
    """The front door: relays proxied routes itself, hands the rest to the application inside."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        queue: CentralQueue,
        forwarder: Forwarder,
        telemetry: Telemetry,
        config: EdgeConfig,
        log: FilteringBoundLogger,
    ) -> None:
        self._app = app
        self._queue = queue
        self._forwarder = forwarder
        self._telemetry = telemetry
        self._config = config
        self._log = log
        key = config.api_key
        self._key = None if key is None else b"Bearer " + key.get_secret_value().encode()
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope["headers"])
        reply = AsgiReply(send, request_id)
        try:
            self._check_key(scope)
        except UnauthorizedError as error:
            await reply.fail(error.status, error.body())
            return
        if scope["path"] not in PROXIED:
            await self._app(scope, receive, with_request_id(send, request_id))
        elif scope["method"] != "POST":
            body = error_body("only POST is allowed here", METHOD_NOT_ALLOWED)
            await reply.fail(METHOD_NOT_ALLOWED.status, body)
        else:
            record = RequestRecord(request_id=request_id.decode(), path=scope["path"])
            await self._serve(scope, receive, reply, record)

    async def _serve(
        self, scope: Scope, receive: Receive, reply: AsgiReply, record: RequestRecord
    ) -> None:
        """Relay, answer what went wrong, and record how it ended."""
        loop = asyncio.get_running_loop()
        arrival_s = loop.time()
        error: BaseException | None = None
        try:
            await self._relay(scope, receive, reply, record, arrival_s)
        except BidgateError as known:
            error = known
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except Exception as unknown:
            error = RouterBrokeError("internal error")
            self._log.exception("request_failed", request_id=record.request_id, exc_info=unknown)
        finally:
            _conclude(record, reply, error, loop.time() - arrival_s)
            self._telemetry.observe_request(record)
        if reply.status or not isinstance(error, BidgateError):
            return
        if not isinstance(error, ClientGoneError):
            await reply.fail(error.status, error.body(), error.retry_after_s)

    async def _relay(
        self,
        scope: Scope,
        receive: Receive,
        reply: AsgiReply,
        record: RequestRecord,
        arrival_s: float,
    ) -> None:
        stopwatch = self._queue.stopwatch
        body = await self._read(scope["headers"], receive)
        began_s = stopwatch()
        async with while_client_stays(receive, reply):
            kind = PROXIED[scope["path"]]
            facts = await self._parse(body, chat=kind == "chat")
            hints = read_headers(scope["headers"])
            record.model = facts.model[:MODEL_LABEL_CHARS_MAX]
            record.prompt_tokens = facts.prompt_tokens
            request = _as_request(facts, hints, kind, arrival_s)
            call = self._call(scope, facts, record.request_id)
            async with self._queue.place(request) as placement:
                reply.placement = placement
                record.queued_s = placement.queued_s
                record.overhead_s = stopwatch() - began_s - placement.queued_s
                await self._forwarder.relay(call, placement, reply)

    def _call(self, scope: Scope, facts: BodyFacts, request_id: str) -> Call:
        headers = to_worker(
            scope["headers"], streams=facts.streams, drop_authorization=self._key is not None
        )
        headers.append((b"x-request-id", request_id.encode()))
        query = scope["query_string"].decode("latin-1")
        path = scope["path"]
        return Call(path=f"{path}?{query}" if query else path, headers=headers, body=facts.body)

    async def _parse(self, body: bytes, *, chat: bool) -> BodyFacts:
        if len(body) < self._config.parse_off_loop_bytes:
            return read_body(body, chat=chat)
        return await asyncio.to_thread(read_body, body, chat=chat)

    async def _read(self, headers: RawHeaders, receive: Receive) -> bytes:
        limit = self._config.body_bytes_max
        announced = first(headers, b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for chunk in read_chunks(receive):
                    size += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
                    chunks.append(chunk)
        except TimeoutError as error:
            raise BodyTooSlowError("the request body did not arrive in time") from error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or not scope["path"].startswith("/v1/"):
            return
        sent = first(scope["headers"], b"authorization") or b""
        if not hmac.compare_digest(sent, self._key):
            raise UnauthorizedError("missing or wrong API key")

    def _request_id(self, headers: RawHeaders) -> bytes:
        """The client's x-request-id if it is short and printable, else one of our own."""
        given = first(headers, b"x-request-id") or b""
        text = given.decode("ascii", "replace")
        if 0 < len(text) <= REQUEST_ID_CHARS_MAX and text.isascii() and text.isprintable():
            return given
        return f"{self._prefix}-{next(self._count):x}".encode()


def _as_request(facts: BodyFacts, hints: HeaderFacts, kind: str, arrival_s: float) -> Request:
    hint = hints.decode_tokens_hint or facts.decode_tokens_hint
    return Request(
        request_id="",
        arrival_s=arrival_s,
        prompt_tokens=facts.prompt_tokens,
        decode_tokens_hint=hint,
        decode_tokens_limit=facts.decode_tokens_limit,
        model=facts.model,
        tenant=hints.tenant,
        group=f"{kind}:{facts.model[:MODEL_LABEL_CHARS_MAX]}",
        sequences=facts.sequences,
        value=facts.value if hints.value is None else hints.value,
        ttft_bound_s=hints.ttft_bound_s,
        max_wait_s=hints.max_wait_s,
        streams=facts.streams,
    )


def _conclude(
    record: RequestRecord, reply: AsgiReply, error: BaseException | None, e2e_s: float
) -> None:
    placement = reply.placement
    record.e2e_s = e2e_s
    if placement is not None:
        record.worker = placement.worker_id
        record.starts = placement.starts
        record.queued_s = placement.queued_s
        record.decode_tokens = placement.decode_tokens
        record.outcome = placement.outcome
        if placement.first_token_s is not None:
            record.ttft_s = placement.first_token_s - placement.request.arrival_s
    elif error is not None:
        record.outcome = "refused" if isinstance(error, RefusedError) else "failed"
    if isinstance(error, BidgateError):
        record.status = reply.status or error.status
        record.reason = error.reply.code or error.reply.type
        if isinstance(error, ClientGoneError):
            record.status, record.outcome = error.status, "cancelled"
        elif isinstance(error, RefusedError):
            record.outcome = "refused"
    elif reply.status:
        record.status = reply.status


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is longer than {limit} bytes")
