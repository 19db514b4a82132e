"""1 edge, the ASGI ends of a request: its body in, its response out, and the client's leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

import orjson
from starlette.types import Message, Receive, Send

from service.control.events import Outcome
from service.errors import REASON_HEADER, Answer, BidgateError, ClientGoneError, error_body
from service.headers import EVENT_STREAM, RawHeaders, is_compressed, media_type
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
        told_prompt_tokens: tokens of all its prompts by the answer's word, or None.
        column_tokens: output tokens that were set aside for it.
        outcome: how it ends if nothing is raised.
        prices: of a batch slot and of a KV token there, when it was started.
    """

    prices: tuple[float, float]
    worker_id: str
    prefill_id: str
    starts: int
    queued_s: float
    first_token_s: float | None
    decode_tokens: int | None
    told_prompt_tokens: int | None
    column_tokens: int
    outcome: Outcome

    def price(self) -> float:
        """What it costs there, in reward per decode iteration."""


LAST_WORD_S: Final = 1.0
"""How long a client may take to read that its stream is broken off."""
WRAPPED_BYTES_MAX: Final = 64 * 1024
"""Of an answer that has to become an event."""
NO_STREAM: Final = Answer(502, "bad_gateway", "worker_broke")
EARLY_HEADERS: Final = (
    (b"content-type", EVENT_STREAM + b"; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class AsgiReply:
    """The response of one request, with bidgate's headers on it.

    Attributes:
        status: as sent, 0 before.
        complete: whether the last byte was handed over.
        sent_bytes: of the body so far.
        placement: once known, named in the headers.
        overhead_s: bidgate's own time before the worker, once known.
        anthropic: whether errors go to Anthropic's clients.
        names_events: whether the events of its streams have names.
    """

    def __init__(self, send: Send, request_id: bytes, *, tells: bool) -> None:
        self.status = 0
        self.complete = False
        self.sent_bytes = 0
        self.placement: Place | None = None
        self.overhead_s: float | None = None
        self.anthropic = False
        self.names_events = False
        self._send = send
        self._request_id = request_id
        self._tells = tells
        self._takes_events = False
        self._last = b""
        self._early = False
        self._wrapped: bytearray | None = None

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers.

        When `comment` has begun the stream, they are too late: another stream just goes on in it,
        and any other answer becomes one event.
        """
        events = media_type(headers) == EVENT_STREAM and not is_compressed(headers)
        if self._early:
            if not (status == 200 and events):
                self._wrapped = bytearray()
            return
        self.status = status
        self._takes_events = events
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
        if self._wrapped is not None:
            self._wrapped += chunk[: WRAPPED_BYTES_MAX - len(self._wrapped)]
            return
        self._last = chunk
        self.sent_bytes += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """Finish."""
        if self._wrapped is not None:
            event, self._wrapped = self._as_event(bytes(self._wrapped)), None
            await self.write(event)
        self.complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def comment(self) -> None:
        """Show a client that waits for a stream that it is not forgotten."""
        if not self.status:
            await self.start(200, list(EARLY_HEADERS))
            self._early = True
        await self.write(b": waiting\n\n")

    async def break_off(self, error: BidgateError) -> None:
        """End a begun event stream with an error event; any other answer just stops."""
        if self.complete or not self._takes_events:
            return
        gap = b"" if self._last.endswith(b"\n\n") or not self._last else b"\n\n"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                body = error.body(anthropic=self.anthropic)
                await self.write(gap + self._error_event(body))
                await self.end()

    def _error_event(self, body: bytes) -> bytes:
        """Readers of responses and messages look at the name of an event, others at its data."""
        name = b"event: error\n" if self.names_events else b""
        return name + b"data: " + body + b"\n\n"

    def _as_event(self, body: bytes) -> bytes:
        """Put an answer that is no event stream into one event: JSON on one line."""
        try:
            line = orjson.dumps(orjson.loads(body))
        except orjson.JSONDecodeError:
            why = "the worker's answer is neither a stream nor JSON"
            line = error_body(why, NO_STREAM, anthropic=self.anthropic)
        return self._error_event(line)

    async def fail(self, error: BidgateError) -> None:
        """Answer with an error object; its reason is in a header as well."""
        body = error.body(anthropic=self.anthropic)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (REASON_HEADER.encode(), error.cause.encode()),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        await self.start(error.status, headers)
        await self.write(body)
        await self.end()


@asynccontextmanager
async def comments_while_waiting(
    reply: AsgiReply, pause_s: float
) -> AsyncIterator[Callable[[], None]]:
    """Comment on the wait every pause_s seconds (0: never), until what is yielded is called."""
    if not pause_s:
        yield lambda: None
        return

    async def comment() -> None:
        while True:
            await asyncio.sleep(pause_s)
            await reply.comment()

    task = asyncio.get_running_loop().create_task(comment())

    def stop() -> None:
        task.cancel()

    try:
        yield stop
    finally:
        stop()


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
