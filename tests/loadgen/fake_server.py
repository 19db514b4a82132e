"""A bare HTTP/1.1 server on a free loopback port whose answers a test writes byte by byte."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"x-bidgate-worker: w0\r\nx-bidgate-queue-ms: 12.5\r\nconnection: close\r\n\r\n"
)


@dataclass
class Received:
    """One request as the server read it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float


@dataclass
class FakeServer:
    """Where it listens and what it has received."""

    url: str = ""
    received: list[Received] = field(default_factory=list)


def event(record: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def token_event(finish_reason: str | None = None) -> bytes:
    """Write the event of one output token."""
    return event({"choices": [{"index": 0, "text": " a", "finish_reason": finish_reason}]})


async def stream_answer(writer: asyncio.StreamWriter, tokens: int, gap_s: float = 0.0) -> None:
    """Stream a whole, well-formed completion."""
    writer.write(STREAM_HEAD)
    for number in range(tokens):
        await asyncio.sleep(gap_s)
        writer.write(token_event("length" if number == tokens - 1 else None))
        await writer.drain()
    writer.write(event({"choices": [], "usage": {"completion_tokens": tokens}}))
    writer.write(b"data: [DONE]\n\n")


def plain_answer(status: int, record: dict[str, Any]) -> bytes:
    """Write a whole answer that is not streamed."""
    body = json.dumps(record).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def fake_server(
    behave: Callable[[Received, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[FakeServer]:
    """Serve until the block ends; behave writes each answer to /v1/completions."""
    fake = FakeServer()
    handling: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _read_request(reader)
        if request.path == "/v1/models":
            writer.write(plain_answer(200, {"data": [{"id": "tiny"}]}))
        else:
            fake.received.append(request)
            await behave(request, writer)
        await writer.drain()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await answer(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with server:
            yield fake
    finally:
        # Nothing of one test may be left for the next one's garbage collection to complain about.
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)


async def _read_request(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    path = head[0].split(" ")[1]
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    record = json.loads(body) if body else {}
    return Received(path, headers, record, asyncio.get_running_loop().time())
