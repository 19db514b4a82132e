"""1 edge, the ASGI ends of a request: its body in, its response out, and the client's leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.types import Message, Receive, Send

from service.control.events import Outcome
from service.errors import BidgateError, ClientGoneError
from service.headers import RawHeaders
from service.interrupt import Interrupt


class Place(Protocol):
    """What headers tell about where a request was served.

    Attributes:
        worker_id: where it was started last.
        prefill_id: the prefill worker that computed its prompt, or "".
        starts: how often it was started.
        queued_s: wait in the central queue, seconds.
        first_token_s: when the first output token was seen, on the loop's clock, or None.
        decode_tokens: output tokens of all its sequences, or None.
        outcome: how it ends if nothing is raised.
    """

    worker_id: str
    prefill_id: str
    starts: int
    queued_s: float
    first_token_s: float | None
    decode_tokens: int | None
    outcome: Outcome

    def price(self) -> float:
        """What it costs there, in reward per decode iteration."""


class AsgiReply:
    """The response of one request, with bidgate's headers on it.

    Attributes:
        status: as sent, 0 before.
        complete: whether the last byte was handed over.
        placement: once known, named in the headers.
        overhead_s: bidgate's own time before the worker, once known.
        anthropic: whether errors go to Anthropic's clients.
    """

    def __init__(self, send: Send, request_id: bytes, *, tells: bool) -> None:
        self.status = 0
        self.complete = False
        self.placement: Place | None = None
        self.overhead_s: float | None = None
        self.anthropic = False
        self._send = send
        self._request_id = request_id
        self._tells = tells

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers."""
        self.status = status
        headers = [*headers, (b"x-request-id", self._request_id)]
        if self._tells and self.placement is not None:
            headers += self._account(self.placement)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _account(self, place: Place) -> RawHeaders:
        """Where the request was served, and what that took."""
        account = [
            (b"x-bidgate-worker", place.worker_id.encode("latin-1", "replace")),
            (b"x-bidgate-queue-ms", f"{place.queued_s * 1e3:.1f}".encode()),
            (b"x-bidgate-price", f"{place.price():.6g}".encode()),
        ]
        if place.prefill_id:
            prefill = place.prefill_id.encode("latin-1", "replace")
            account.append((b"x-bidgate-prefill-worker", prefill))
        if self.overhead_s is not None:
            account.append((b"x-bidgate-overhead-ms", f"{self.overhead_s * 1e3:.2f}".encode()))
        return account

    async def write(self, chunk: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """Finish."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: BidgateError) -> None:
        """Answer with an error object; its reason is in a header as well."""
        body = error.body(anthropic=self.anthropic)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-bidgate-reason", error.cause.encode()),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        await self.start(error.status, headers)
        await self.write(body)
        await self.end()


async def read_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the request body as it comes.

    Raises:
        ClientGoneError: the client left before it was complete.
    """
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was complete")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


@asynccontextmanager
async def while_client_stays(receive: Receive, reply: AsgiReply) -> AsyncIterator[None]:
    """End the block with ClientGoneError as soon as the client disconnects."""
    with Interrupt() as interrupt:
        watcher = asyncio.get_running_loop().create_task(_watch(receive, reply, interrupt.trip))
        try:
            yield
        finally:
            watcher.cancel()


async def _watch(receive: Receive, reply: AsgiReply, trip: Callable[[BidgateError], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    # A complete response also ends the conversation; then nobody left.
    if not reply.complete:
        trip(ClientGoneError("the client left"))


def with_request_id(send: Send, request_id: bytes) -> Send:
    """Add x-request-id to whatever response passes."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
        await send(message)

    return sending
