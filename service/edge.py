"""1 edge: raw ASGI around the proxied routes; names a request, finds its way, answers its errors.

What bidgate answers itself goes to FastAPI (routes.py) with a request id. A proxied request passes
neither FastAPI nor a Request object: that costs more than all of bidgate's own work. Read
queued_route.py next.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

import orjson
from pydantic import BeforeValidator
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from service import surface
from service.asgi import AsgiReply, Place, with_request_id
from service.auth import Door, Visit
from service.byte_budget import ByteBudget
from service.central_queue import CentralQueue
from service.errors import (
    BidgateError,
    ClientError,
    ClientGoneError,
    MethodNotAllowedError,
    OperatorRouteError,
    RefusedError,
    RouterBrokeError,
    StoppedError,
)
from service.exchange import Exchange, Handler
from service.forwarder import Forwarder
from service.headers import RawHeaders, first
from service.intake import Rules
from service.interrupt import Interrupt, OpenRequests
from service.light import LightConfig, LightPath
from service.light_route import LightRoute
from service.operator_lines import OperatorLines
from service.owners import Owners
from service.queued_route import QueuedRoute, ReadingConfig
from service.request_record import RequestRecord
from service.secrets import Secret
from service.surface import Api, Route, find_route
from service.telemetry import Telemetry
from service.trace import Trace, Tracer
from service.uploads import BodyBounds

REQUEST_ID_CHARS_MAX: Final = 128
REQUEST_ID_HEADERS: Final = (b"x-request-id", b"x-correlation-id", b"x-trace-id", b"request-id")


def _as_mapping(value: object) -> object:
    """Read the JSON that an environment variable holds; anything else is judged as it is."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Bounds and secrets of the front.

    Attributes:
        api_key: clients must send it as a bearer token; auth.keys is for several, with limits.
        body_bytes_max: longest request body; longer is a 413.
        held_bytes_max: bytes of request bodies in memory, over all requests that arrive, wait or
            run; a request over it is a 429. Of a body that flows through, what came before its
            model was known counts until the worker has it.
        queue_comment_s: a client that waits in the queue for a stream gets a comment this often,
            so that proxies between do not give it up; its answer is then a 200 whatever comes, and
            refusals are error events; 0 switches it off.
        body_timeout_s: longest time a body may take to arrive.
        parse_off_loop_bytes: bodies this long are parsed in a thread, so that others do not wait.
        log_requests: write one line per proxied request.
        response_headers: tell the worker, the wait, bidgate's own time and the price in headers.
        model_aliases: other names of models: the name that clients use, then the served one.
        forward_priority: send the body's `priority` on; engines that do not schedule by priority
            may refuse it.
        clients_pin: let a client name the one worker it wants, in the header x-bidgate-worker.
        session_headers: headers in which a client names its conversation, with commas between; its
            next request finds the worker again where its prompt cannot be known by its text
            (images, sounds, stored responses). Left empty, none.
    """

    api_key: Secret | None = None
    body_bytes_max: int = 64 * 1024 * 1024
    held_bytes_max: int = 1024 * 1024 * 1024
    queue_comment_s: float = 0.0
    body_timeout_s: float = 60.0
    parse_off_loop_bytes: int = 1024 * 1024
    log_requests: bool = True
    response_headers: bool = True
    model_aliases: Annotated[dict[str, str], BeforeValidator(_as_mapping)] = field(
        default_factory=dict
    )
    forward_priority: bool = True
    clients_pin: bool = False
    session_headers: str = "x-session-id,x-session-token,x-smg-routing-key,x-dynamo-session-id"

    def __post_init__(self) -> None:
        """Refuse bounds that are none."""
        if self.body_bytes_max < 1 or self.parse_off_loop_bytes < 1 or not self.body_timeout_s > 0:
            raise ValueError(
                "body_bytes_max, parse_off_loop_bytes, body_timeout_s must be positive"
            )
        if not self.queue_comment_s >= 0:
            raise ValueError("queue_comment_s must not be negative")
        if self.held_bytes_max < self.body_bytes_max:
            raise ValueError("held_bytes_max must be at least body_bytes_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """What proxied requests go through.

    Attributes:
        queue: for those that generate.
        light: for the others.
        forwarder: to the workers.
        context_tokens: longest context of a model, if known.
    """

    queue: CentralQueue
    light: LightPath
    forwarder: Forwarder
    context_tokens: Callable[[str], int | None]


def reading(config: EdgeConfig, *, keeps_keys: bool) -> ReadingConfig:
    """How the proxied routes read bodies.

    Args:
        config: of the front.
        keeps_keys: whether clients' keys are for bidgate, and so stay here.
    """
    return ReadingConfig(
        bounds=BodyBounds(bytes_max=config.body_bytes_max, timeout_s=config.body_timeout_s),
        off_loop_bytes=config.parse_off_loop_bytes,
        rules=Rules(aliases=config.model_aliases, forward_priority=config.forward_priority),
        keeps_authorization=not keeps_keys,
        clients_pin=config.clients_pin,
        comment_s=config.queue_comment_s,
        session_headers=tuple(
            name.strip().lower().encode() for name in config.session_headers.split(",")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How each kind of proxied route is served."""

    queued: QueuedRoute
    light: LightRoute

    def find(self, way: surface.Way) -> Handler:
        """Who serves a way."""
        return self.queued if way is surface.Way.QUEUED else self.light

    def reconfigure(self, config: ReadingConfig) -> None:
        """Read bodies otherwise, from the next request on."""
        self.queued.config = self.light.config = config


def make_ways(doors: Doors, config: ReadingConfig, light: LightConfig) -> Ways:
    """Build how each kind of proxied route is served."""
    owners = Owners(entries_max=light.responses_max, ttl_s=light.responses_ttl_s)
    queued = QueuedRoute(
        queue=doors.queue,
        forwarder=doors.forwarder,
        owners=owners,
        context_tokens=doors.context_tokens,
        config=config,
    )
    straight = LightRoute(
        light=doors.light, forwarder=doors.forwarder, owners=owners, config=config
    )
    return Ways(queued=queued, light=straight)


class Inside:
    """What is inside the front door now.

    Attributes:
        bytes: of request bodies. requests: all that are being served.
    """

    def __init__(self, config: EdgeConfig) -> None:
        self.bytes = ByteBudget(config.held_bytes_max)
        self.requests = OpenRequests()

    def end_all(self) -> None:
        """End every request now: streams with an error event, those that wait with a 503."""
        self.requests.end_all(lambda: StoppedError("bidgate stops"))


class Edge:
    """The front door: relays proxied routes itself, hands the rest to the application inside."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ways: Ways,
        telemetry: Telemetry,
        door: Door,
        inside: Inside,
        config: Callable[[], EdgeConfig],
        log: FilteringBoundLogger,
        tracer: Tracer,
    ) -> None:
        self._app = app
        self._operator = OperatorLines(app, log, lambda: config().log_requests)
        self._ways = ways
        self._telemetry = telemetry
        self._door = door
        self._inside = inside
        self._config = config
        self._log = log
        self._tracer = tracer
        self._prefix = os.urandom(6).hex()
        self._count = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope["headers"])
        route = find_route(scope["path"])
        here = route.way is surface.Way.HERE
        reply = AsgiReply(send, request_id, tells=self._config().response_headers)
        reply.anthropic = route.api is Api.MESSAGES
        reply.names_events = route.api in (Api.MESSAGES, Api.RESPONSES)
        now_s = asyncio.get_running_loop().time()
        misfit = _misfit(scope["method"], route)
        limited = not here and misfit is None
        try:
            visit = self._door.admit(scope["path"], scope["headers"], now_s, limited=limited)
            if misfit is not None:
                raise misfit
        except ClientError as error:
            if here:
                self._operator.refused(scope, request_id, error)
            else:
                self._note_refusal(scope, route, request_id, error)
            await reply.fail(error)
            return
        if here:
            sending = with_request_id(send, request_id)
            await self._operator.answer(scope, receive, sending, request_id)
            return
        trace = self._tracer.begin(scope["method"], route, scope["headers"])
        with visit, self._inside.bytes.claim() as claim:
            exchange = Exchange(
                scope=scope,
                receive=receive,
                reply=reply,
                route=route,
                record=_record(scope, request_id, trace),
                trace=trace,
                claim=claim,
                arrival_s=now_s,
                tenant=visit.tenant,
            )
            await self._serve(exchange, visit)

    async def _serve(self, exchange: Exchange, visit: Visit) -> None:
        """Relay, answer what went wrong, and record how it ended."""
        reply, record = exchange.reply, exchange.record
        error: BaseException | None = None
        try:
            with Interrupt() as interrupt, self._inside.requests.listed(interrupt):
                await self._ways.find(exchange.route.way).relay(exchange)
        except BidgateError as known:
            error = known
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except Exception as unknown:
            error = RouterBrokeError("internal error")
            self._log.exception("request_failed", request_id=record.request_id, exc_info=unknown)
        finally:
            now_s = asyncio.get_running_loop().time()
            _conclude(exchange, error, now_s)
            self._telemetry.observe_request(record)
            exchange.trace.end(record)
            visit.spend(_tokens(exchange), now_s)
        if not isinstance(error, BidgateError) or isinstance(error, ClientGoneError):
            return
        if reply.status:
            await reply.break_off(error)
        else:
            await reply.fail(error)

    def _note_refusal(
        self, scope: Scope, route: Route, request_id: bytes, error: ClientError
    ) -> None:
        """Tell of a request that did not come in."""
        trace = self._tracer.begin(scope["method"], route, scope["headers"])
        record = _record(scope, request_id, trace)
        record.status, record.reason, record.outcome = error.status, error.cause, "refused"
        self._telemetry.observe_refusal(record)
        trace.end(record)

    def _request_id(self, headers: RawHeaders) -> bytes:
        """The client's request id if it is short and printable, else one of our own."""
        given = next((value for name in REQUEST_ID_HEADERS if (value := first(headers, name))), b"")
        text = given.decode("ascii", "replace")
        if 0 < len(text) <= REQUEST_ID_CHARS_MAX and text.isascii() and text.isprintable():
            return given
        return f"{self._prefix}-{next(self._count):x}".encode()


def _misfit(method: str, route: Route) -> ClientError | None:
    """Why a request goes to no worker whoever sends it, or None."""
    if route.way is surface.Way.OPERATORS:
        return OperatorRouteError(f"{route.path} changes one engine; ask that engine")
    if route.way is surface.Way.QUEUED and method != "POST":
        return MethodNotAllowedError("only POST is allowed here")
    return None


def _record(scope: Scope, request_id: bytes, trace: Trace) -> RequestRecord:
    """What is known about a request at first."""
    return RequestRecord(
        request_id=request_id.decode(), path=scope["path"], trace_id=trace.trace_id
    )


def _conclude(exchange: Exchange, error: BaseException | None, now_s: float) -> None:
    reply, record = exchange.reply, exchange.record
    placement = reply.placement
    record.e2e_s = now_s - exchange.arrival_s
    if placement is not None:
        _note_place(exchange, placement)
    elif error is not None:
        record.outcome = "refused" if isinstance(error, RefusedError) else "failed"
    if isinstance(error, BidgateError):
        record.status = reply.status or error.status
        record.reason = error.cause
        if isinstance(error, ClientGoneError):
            record.status, record.outcome = error.status, "cancelled"
        elif isinstance(error, RefusedError):
            record.outcome = "refused"
        elif placement is not None:
            record.outcome = "failed"
    elif reply.status:
        record.status = reply.status


def _note_place(exchange: Exchange, placement: Place) -> None:
    """Take over what its place at a worker knows."""
    record = exchange.record
    record.worker = placement.worker_id
    record.prefill_worker = placement.prefill_id
    record.starts = placement.starts
    if not record.light:
        record.queued_s, record.price = placement.queued_s, placement.price()
        record.price_batch, record.price_kv = placement.prices
    elif exchange.route.way is surface.Way.LIGHT:
        record.prompt_tokens = placement.told_prompt_tokens
    record.decode_tokens = placement.decode_tokens
    record.outcome = placement.outcome
    if placement.first_token_s is not None:
        record.ttft_s = placement.first_token_s - exchange.arrival_s


def _tokens(exchange: Exchange) -> int:
    """Tokens that a request cost its tenant; one that never started cost nothing.

    Prompts cost what the answer says, else the estimate. To ask again for a stored response costs
    no prompt.
    """
    record, placement = exchange.record, exchange.reply.placement
    if placement is None or not record.starts:
        return 0
    told = None if record.light else placement.told_prompt_tokens
    prompt_tokens = record.prompt_tokens if told is None else told
    return (prompt_tokens or 0) + (record.decode_tokens or 0)
