"""Bidgate between two ends whose bytes a test writes itself: a client's and a raw worker's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.service.live import Live, serving
from tests.service.raw_worker import Got, RawWorker, whole

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def in_front_of(*workers: RawWorker, **groups: object) -> AsyncIterator[Live]:
    """Bidgate in front of raw workers."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(worker.listening()) for worker in workers]
        live = await stack.enter_async_context(serving(urls, **groups))
        yield live


async def echo(request: Got) -> None:
    """Answer what was asked."""
    request.writer.write(whole(200, request.body))


async def raw(live: Live, text: bytes) -> Connection:
    """Send bytes to bidgate."""
    port = int(live.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    return reader, writer


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes; headers are whole lines."""
    lines = [f"POST {path} HTTP/1.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
