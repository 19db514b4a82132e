"""1 edge, the ASGI ends of a request: its body in, its response out, and the client's leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Message, Receive, Send

from service.errors import BidgateError, ClientGoneError
from service.headers import RawHeaders
from service.interrupt import Interrupt
from service.placement import Placement


class AsgiReply:
    """The response of one request, with bidgate's headers on it.

    Attributes:
        status: as sent, 0 before.
        complete: whether the last byte was handed over.
        placement: once known, named in the headers.
    """

    def __init__(self, send: Send, request_id: bytes) -> None:
        self.status = 0
        self.complete = False
        self.placement: Placement | None = None
        self._send = send
        self._request_id = request_id

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers."""
        self.status = status
        headers = [*headers, (b"x-request-id", self._request_id)]
        if self.placement is not None:
            queued_ms = f"{self.placement.queued_s * 1e3:.1f}".encode()
            worker = self.placement.worker_id.encode("latin-1", "replace")
            headers += [(b"x-bidgate-worker", worker), (b"x-bidgate-queue-ms", queued_ms)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """Finish."""
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, status: int, body: bytes, retry_after_s: int | None = None) -> None:
        """Answer with an error object."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after_s).encode()))
        await self.start(status, headers)
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
