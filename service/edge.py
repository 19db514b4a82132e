"""1 edge: raw ASGI around the proxied routes; names a request, finds its way, answers its errors.

What bidgate answers itself goes to FastAPI (routes.py) with a request id. A proxied request passes
neither FastAPI nor a Request object: that costs more than all of bidgate's own work. Read
queued_route.py next.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from service.asgi import AsgiReply, with_request_id
from service.auth import Door, Visit
from service.byte_budget import ByteBudget
from service.conclusion import conclude, tokens_spent
from service.edge_config import EdgeConfig
from service.errors import (
    BidgateError,
    ClientError,
    ClientGoneError,
    MethodNotAllowedError,
    NoSuchRouteError,
    OperatorRouteError,
    RouterBrokeError,
    StoppedError,
)
from service.exchange import Exchange
from service.headers import RawHeaders, first
from service.interrupt import Interrupt, OpenRequests
from service.operator_lines import OperatorLines
from service.request_record import RequestRecord
from service.surface import Api, Route, Way, find_route, no_such_path
from service.telemetry import Telemetry
from service.trace import Trace, Tracer
from service.ways import Ways

REQUEST_ID_CHARS_MAX: Final = 128
REQUEST_ID_HEADERS: Final = (b"x-request-id", b"x-correlation-id", b"x-trace-id", b"request-id")


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
        here = route.way is Way.HERE
        reply = AsgiReply(send, request_id, tells=self._config().response_headers)
        reply.anthropic = route.api is Api.MESSAGES
        reply.names_events = route.api in (Api.MESSAGES, Api.RESPONSES)
        now_s = asyncio.get_running_loop().time()
        try:
            visit = self._admit(scope, route, now_s)
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
                metered=visit.metered,
            )
            await self._serve(exchange, visit)

    def _admit(self, scope: Scope, route: Route, now_s: float) -> Visit:
        """Let a request in that goes somewhere; only what goes to a worker counts against limits.

        Raises:
            ClientError: it may not come in, or leads nowhere whoever sends it.
        """
        misfit = _misfit(scope["method"], route)
        limited = route.way is not Way.HERE and misfit is None
        visit = self._door.admit(scope["path"], scope["headers"], now_s, limited=limited)
        if misfit is not None:
            raise misfit
        return visit

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
            conclude(exchange, error, now_s)
            self._telemetry.observe_request(record)
            exchange.trace.end(record)
            visit.spend(tokens_spent(exchange), now_s)
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
    if route.way is Way.OPERATORS:
        return OperatorRouteError(f"{route.path} changes one engine; ask that engine")
    if route.way is Way.MISSPELT:
        return NoSuchRouteError(no_such_path(route.path))
    if route.way is Way.QUEUED and method != "POST":
        return MethodNotAllowedError("only POST is allowed here")
    return None


def _record(scope: Scope, request_id: bytes, trace: Trace) -> RequestRecord:
    """What is known about a request at first."""
    return RequestRecord(
        request_id=request_id.decode(), path=scope["path"], trace_id=trace.trace_id
    )
