"""1 edge: what tells a tracer how far a request is; without tracing, it costs a call each.

Nothing here knows a tracing library: spans.py does, and only where tracing is on. Without it the
client's `traceparent` and `tracestate` go to the worker as any other header.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from service.control.events import Command
from service.headers import RawHeaders, first
from service.request_record import RequestRecord
from service.surface import Route

TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
RELAY: Final = "relay"
PREFILL: Final = "prefill"
_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-")


class Trace(Protocol):
    """One request on its way.

    Attributes:
        trace_id: 32 hex digits, or "".
    """

    trace_id: str

    def waits(self) -> None:
        """It waits for a start."""

    def decided(self, command: Command, took_s: float, price: float) -> None:
        """The router said something about it.

        Args:
            command: that.
            took_s: from the beginning of the decision.
            price: what it costs where it is started, in reward per decode iteration.
        """

    def waited(self) -> None:
        """It waits no more."""

    def sent(self, headers: RawHeaders, worker_id: str, leg: str) -> RawHeaders:
        """It goes to a worker; the headers to send."""

    def answered(self, status: int) -> None:
        """The worker's status and headers are here."""

    def unanswered(self, error: Exception) -> None:
        """They will not come."""

    def end(self, record: RequestRecord) -> None:
        """It ended, however that was."""


class Tracer(Protocol):
    """Where traces come from."""

    def begin(self, method: str, route: Route, headers: RawHeaders) -> Trace:
        """A request came."""

    def spans(self) -> dict[str, int]:
        """How many spans ended, were exported, and could not be."""

    async def aclose(self) -> None:
        """Send what is left, within a bound."""


class Untraced:
    """A request of which no spans are made."""

    __slots__ = ("trace_id",)

    def __init__(self, trace_id: str = "") -> None:
        self.trace_id = trace_id

    def waits(self) -> None:
        """Nothing."""

    def decided(self, command: Command, took_s: float, price: float) -> None:
        """Nothing."""

    def waited(self) -> None:
        """Nothing."""

    def sent(self, headers: RawHeaders, worker_id: str, leg: str) -> RawHeaders:
        """The headers as they are."""
        return headers

    def answered(self, status: int) -> None:
        """Nothing."""

    def unanswered(self, error: Exception) -> None:
        """Nothing."""

    def end(self, record: RequestRecord) -> None:
        """Nothing."""


class NoTracer:
    """Makes no spans; clients' trace ids still reach the log."""

    def begin(self, method: str, route: Route, headers: RawHeaders) -> Trace:
        """Read the client's trace id."""
        return Untraced(trace_id_of(headers))

    def spans(self) -> dict[str, int]:
        """None."""
        return {"ended": 0, "exported": 0, "failed": 0}

    async def aclose(self) -> None:
        """Nothing."""


def trace_id_of(headers: RawHeaders) -> str:
    """The trace id of a `traceparent`, or "" without a right one."""
    value = first(headers, TRACEPARENT)
    found = None if value is None else _TRACEPARENT.match(value)
    return "" if found is None else found[1].decode()
