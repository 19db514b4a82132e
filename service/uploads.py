"""1 edge, request bodies: read whole within bounds, or passed on as they come.

A body that is passed on has a head: what was read of it to find the model it is for. The rest
goes through a small buffer, so that a fast client waits for a slow worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive

from service.asgi import AsgiReply, read_chunks
from service.byte_budget import Claim
from service.errors import (
    BadRequestError,
    BidgateError,
    BodyTooLargeError,
    BodyTooSlowError,
    ClientGoneError,
    EncodedBodyError,
)
from service.headers import RawHeaders, announced_bytes, is_compressed
from service.interrupt import Interrupt

CHUNKS_AHEAD: Final = 2
"""Parts of a body that may be here and not yet at the worker."""
HEAD_PART_BYTES: Final = 64 * 1024
"""A head goes on in parts of this size, so that it is not copied whole into a socket's buffer."""
MODEL_BYTES_MAX: Final = 1024
"""Longest value of a form's model field that is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBounds:
    """How long a body may be and take.

    Attributes:
        bytes_max: longest body; longer is a 413.
        timeout_s: longest time it may take to arrive.
    """

    bytes_max: int
    timeout_s: float

    def check_announced(self, headers: RawHeaders) -> None:
        """Refuse what says itself that it is too long.

        Raises:
            BodyTooLargeError: it does.
        """
        if (announced_bytes(headers) or 0) > self.bytes_max:
            raise self.too_large()

    def too_large(self) -> BodyTooLargeError:
        """The error of a longer body."""
        return BodyTooLargeError(f"the request body is longer than {self.bytes_max} bytes")


def check_plain(headers: RawHeaders) -> None:
    """Refuse a compressed body: engines take none either.

    Raises:
        EncodedBodyError: it is one.
    """
    if is_compressed(headers):
        raise EncodedBodyError("the body has a content-encoding; send it as it is")


async def read_whole(headers: RawHeaders, receive: Receive, bounds: BodyBounds) -> bytes:
    """Read a body to its end.

    Raises:
        BodyTooLargeError, BodyTooSlowError, ClientGoneError: it cannot be had.
    """
    bounds.check_announced(headers)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(bounds.timeout_s):
            async for chunk in read_chunks(receive):
                size += len(chunk)
                if size > bounds.bytes_max:
                    raise bounds.too_large()
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTooSlowError("the request body did not arrive in time") from error
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@dataclass
class Upload:
    """A body on its way through.

    Attributes:
        claim: counts the head while it is here; what follows it is never more than CHUNKS_AHEAD.
        head: what was read of it so far.
        ended: whether that is all of it.
    """

    receive: Receive
    bounds: BodyBounds
    claim: Claim
    head: bytearray = field(default_factory=bytearray)
    ended: bool = False
    _size: int = 0
    _until_s: float = field(default_factory=lambda: asyncio.get_running_loop().time(), kw_only=True)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._until_s += self.bounds.timeout_s

    async def next_chunk(self) -> bytes:
        """Take the next part from the client.

        Raises:
            BodyTooLargeError, BodyTooSlowError, ClientGoneError: it cannot be had.
        """
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self.receive()
        except TimeoutError as error:
            raise BodyTooSlowError("the request body did not arrive in time") from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was complete")
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        if self._size > self.bounds.bytes_max:
            raise self.bounds.too_large()
        self.ended = not message.get("more_body", False)
        return chunk

    async def hand_over(self, parts: asyncio.Queue[bytes | None], chunk: bytes) -> None:
        """Put a part where the worker's connection takes it from.

        Raises:
            BodyTooSlowError: the worker does not take it in time.
        """
        try:
            async with asyncio.timeout_at(self._until_s):
                await parts.put(chunk)
        except TimeoutError as error:
            raise BodyTooSlowError("the request body could not be passed on in time") from error

    async def read_head(self, enough: Callable[[bytes], bool]) -> None:
        """Read until enough has been seen or nothing is left.

        Raises:
            RefusedError: too many bytes are held already.
        """
        while not self.ended:
            chunk = await self.next_chunk()
            self.claim.add(len(chunk))
            self.head += chunk
            if enough(chunk):
                return

    def take_whole(self) -> bytes:
        """The head of a body that has ended with it; it stays counted to the request's end."""
        body = bytes(self.head)
        self.head.clear()
        return body

    async def head_parts(self) -> AsyncIterator[bytes]:
        """The head, in parts that the worker's connection takes one by one; then it is gone."""
        for start in range(0, len(self.head), HEAD_PART_BYTES):
            yield bytes(self.head[start : start + HEAD_PART_BYTES])
        self.head.clear()
        self.claim.release()


@asynccontextmanager
async def flowing(upload: Upload, reply: AsgiReply) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the parts of a body, head first, and end the block when the client leaves.

    A body that grows too long or takes too long ends the block as well.
    """
    parts: asyncio.Queue[bytes | None] = asyncio.Queue(CHUNKS_AHEAD)

    async def pump(trip: Callable[[BidgateError], None]) -> None:
        try:
            while not upload.ended:
                await upload.hand_over(parts, await upload.next_chunk())
            await parts.put(None)
            while (await upload.receive())["type"] != "http.disconnect":
                pass
            raise ClientGoneError("the client left")
        except BidgateError as error:
            # A complete response also ends the conversation; then nobody left.
            if not reply.complete or isinstance(error, BodyTooSlowError):
                trip(error)
            else:
                _close(parts)

    async def body() -> AsyncIterator[bytes]:
        async for head_part in upload.head_parts():
            yield head_part
        while (part := await parts.get()) is not None:
            if part:
                yield part

    with Interrupt() as interrupt:
        pumping = asyncio.get_running_loop().create_task(pump(interrupt.trip))
        try:
            yield body()
        finally:
            pumping.cancel()


def _close(parts: asyncio.Queue[bytes | None]) -> None:
    """End a body that nobody wants any more."""
    while not parts.empty():
        parts.get_nowait()
    parts.put_nowait(None)


class ModelField:
    """Finds the model among the fields of a form as its bytes pass.

    Attributes:
        value: of the field, once found.
        found: whether it was read to its end.
        span: where its bytes lie in the body.
    """

    def __init__(self, content_type: bytes) -> None:
        """Prepare for a form.

        Raises:
            BadRequestError: it is no form that can be read.
        """
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise BadRequestError("multipart/form-data needs a boundary")
        self.value = bytearray()
        self.found = False
        self.span = (0, 0)
        self._seen = 0
        self._header = bytearray()
        self._content = bytearray()
        self._ours = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._name,
                "on_header_value": self._content_of,
                "on_header_end": self._header_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
            },
        )

    def feed(self, chunk: bytes) -> bool:
        """Take the next bytes; whether the model is known.

        Raises:
            BadRequestError: it is no form.
        """
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise BadRequestError(f"the form cannot be read: {error}") from error
        self._seen += len(chunk)
        return self.found

    def replaced(self, head: bytes, value: bytes) -> bytes:
        """The head of the body with another value of the field.

        Raises:
            BadRequestError: the field is not where it seemed to be.
        """
        start, end = self.span
        if head[start:end] != self.value:
            raise BadRequestError("the form's model field cannot be read", param="model")
        return head[:start] + value + head[end:]

    def _begin(self) -> None:
        self._ours = False

    def _name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _content_of(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._content))
            self._ours = options.get(b"name") == b"model" and not self.found
        self._header.clear()
        self._content.clear()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._ours:
            return
        begin = self.span[0] if self.value else self._seen + start
        self.value += data[start:end]
        self.span = (begin, begin + len(self.value))
        if len(self.value) > MODEL_BYTES_MAX:
            raise BadRequestError("model is too long", param="model")

    def _end(self) -> None:
        self.found |= self._ours
