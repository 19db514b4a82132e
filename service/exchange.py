"""1 edge, one proxied request from its first byte to its last: where it is from and how it goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import quote

from starlette.types import Receive, Scope

from service.asgi import AsgiReply
from service.byte_budget import Claim
from service.control.displacement import Bid
from service.errors import BadRequestError
from service.headers import RawHeaders, announced_bytes
from service.hints import HeaderFacts, read_headers
from service.request_record import RequestRecord
from service.surface import Route
from service.trace import Trace


@dataclass
class Exchange:
    """One request and its answer.

    Attributes:
        scope: the ASGI scope. receive: where the body comes from. reply: where the answer goes.
        route: where its path leads.
        record: what will be told about it.
        claim: bytes of its body in memory.
        arrival_s: when it was here as a whole, on the loop's clock; before, when it began.
        trace: told how far it is.
        tenant: whom its API key stands for; "" when it does not say.
        body_bytes: of a JSON body that skips the queue; 0 of any other.
        metered: whether its key has a rate of tokens, which must be read from the answer.
    """

    scope: Scope
    receive: Receive
    reply: AsgiReply
    route: Route
    record: RequestRecord
    claim: Claim
    arrival_s: float
    trace: Trace
    tenant: str = ""
    metered: bool = False
    body_bytes: int = 0

    def hints(self) -> HeaderFacts:
        """What the headers say; whom a key stands for is not for its holder to say.

        Raises:
            BadRequestError: one of them makes no sense.
        """
        hints = read_headers(self.headers)
        return replace(hints, tenant=self.tenant) if self.tenant else hints

    @property
    def headers(self) -> RawHeaders:
        """Lower-case names and values as the client sent them."""
        headers: RawHeaders = self.scope["headers"]
        return headers

    @property
    def receive_held(self) -> Receive:
        """Where a body comes from that stays in memory until the request ends.

        Raises:
            RefusedError: when called, too many bytes are held already.
        """
        self.claim.expected = announced_bytes(self.headers) or 0
        return self.claim.counting(self.receive)

    def bid(self) -> Bid | None:
        """What its headers say that it is worth; None where only its body could say that.

        None too where they do not say how long that is: others might go for it in vain.
        """
        if not self.claim.expected:
            return None
        try:
            hints = self.hints()
        except BadRequestError:
            return None
        return None if hints.value is None else Bid(value=hints.value, tenant=hints.tenant)

    @property
    def target(self) -> str:
        """Path and query for the worker; escapes stay as they are."""
        raw = self.scope.get("raw_path") or quote(self.scope["path"]).encode()
        path = raw.decode("latin-1").rstrip("/") if self.route.response_id else self.route.path
        if path is self.route.path:
            path = quote(path)
        query = self.scope["query_string"].decode("latin-1")
        return f"{path}?{query}" if query else path

    def arrived(self, now_s: float) -> None:
        """The body is here: from now on the time counts."""
        self.record.upload_s = now_s - self.arrival_s
        self.arrival_s = now_s


class Handler(Protocol):
    """How one kind of route is served."""

    async def relay(self, exchange: Exchange) -> None:
        """Serve a request.

        Raises:
            BidgateError: it could not be served; if the answer had begun it was finished or cut.
        """
