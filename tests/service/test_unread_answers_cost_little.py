"""What a client that does not read its answer may cost: a slot for a while, and little memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from service.forward_config import ForwardConfig
from tests.service.live import Live, mock, serving_mocks, until
from tests.service.raw_exchange import Connection, in_front_of, post
from tests.service.raw_worker import Got, RawWorker, chunk, events_head
from tests.service.stage import ends, event

MIB = 1 << 20
ANSWER_BYTES = 256 * MIB
KERNELS_BYTES_MAX = 96 * MIB
"""What the buffers of four sockets may hold between a worker and a client, at the most."""
PIECE = b"x" * 60_000
TEXT_HEAD = events_head() + chunk(event())
NAMED = b'event: content_block_delta\ndata: {"delta":{"text":"%b"}}\n\n'
WHOLE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SIZED_HEAD = WHOLE_HEAD + b"content-length: %d\r\n\r\n" % ANSWER_BYTES
CUT_HEAD = WHOLE_HEAD + b"transfer-encoding: chunked\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
UNREAD = [
    pytest.param(
        "/v1/completions", {"stream": True}, TEXT_HEAD, chunk(event("x" * 60_000)), id="stream"
    ),
    pytest.param(
        "/v1/messages", CHAT | {"stream": True}, events_head(), chunk(NAMED % PIECE), id="messages"
    ),
    pytest.param("/v1/completions", {}, SIZED_HEAD, PIECE, id="whole"),
    pytest.param("/v1/embeddings", {}, SIZED_HEAD, PIECE, id="light"),
    pytest.param("/v1/embeddings", {}, CUT_HEAD, chunk(PIECE), id="light in chunks"),
    pytest.param("/v1/things", {}, SIZED_HEAD, PIECE, id="unknown route"),
    pytest.param("/v1/things", {}, TEXT_HEAD, chunk(event("x" * 60_000)), id="unknown stream"),
    pytest.param("/v1/things", None, SIZED_HEAD, PIECE, id="GET"),
]


async def test_a_client_that_stops_reading_frees_its_slot_at_the_engine() -> None:
    forward = ForwardConfig(client_stall_timeout_s=1.0)
    async with (
        serving_mocks([mock(time_scale=20.0)], forward=forward) as live,
        connected_by(await narrow_socket(live)) as (_, writer),
    ):
        fields = {"model": "mock", "ignore_eos": True, "max_tokens": 30000, "n": 4, "stream": True}
        writer.write(asking("/v1/completions", fields))
        await until(lambda: live.service.queue.held == 1, within_s=10.0)
        # 20 MB of events wait for this client; bidgate takes no more than its buffers hold.
        await until(lambda: live.service.queue.held == 0, within_s=30.0)
        assert ends(live.service.queue.stats()) == {"cancelled": 1}
        assert await live.running() <= 4

        async def is_free() -> bool:
            return await live.running() == 0

        await until(is_free, within_s=5.0)


@pytest.mark.parametrize(("path", "fields", "head", "piece"), UNREAD)
async def test_a_client_that_stops_reading_costs_little_memory(
    path: str, fields: dict[str, object] | None, head: bytes, piece: bytes
) -> None:
    poured = 0
    left = asyncio.Event()

    async def pour(request: Got) -> None:
        nonlocal poured
        request.writer.write(head)
        try:
            while poured < ANSWER_BYTES:
                request.writer.write(piece)
                poured += len(piece)
                await request.writer.drain()
        finally:
            left.set()

    worker = RawWorker(pour)
    forward = ForwardConfig(client_stall_timeout_s=1.0)
    async with in_front_of(worker, forward=forward) as live:
        async with connected_by(await narrow_socket(live)) as (_, writer):
            with traced() as grown:
                writer.write(asking(path, fields))
                await until(lambda: bool(worker.got), within_s=20.0)
                await until(lambda: not live.service.held, within_s=30.0)
                assert grown() < 8 * MIB
        # It was cut off in the middle: what it left unread is nowhere but in the sockets.
        assert len(piece) < poured < KERNELS_BYTES_MAX
        await asyncio.wait_for(left.wait(), 20.0)
        ended = Counter(ends(live.service.queue.stats())) + live.service.light.ended
        assert ended == {"cancelled": 1}


def asking(path: str, fields: dict[str, object] | None) -> bytes:
    """A request as bytes: a POST with these fields, or a GET."""
    if fields is None:
        return b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode()
    body = json.dumps({"model": "m", "max_tokens": 9, "prompt": "x", **fields}).encode()
    return post(path, body, "host: x", "content-type: application/json")


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Count Python's memory; yields how many bytes more than at first there were at the most."""
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[1] - first
    finally:
        tracemalloc.stop()


async def narrow_socket(live: Live) -> socket.socket:
    """A connection that takes little before it is read."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.setblocking(False)
    host, port = live.url.removeprefix("http://").rsplit(":", 1)
    await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
    return narrow


@contextlib.asynccontextmanager
async def connected_by(
    peer: socket.socket,
) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(sock=peer, limit=1024)
    # Read nothing at all, not even into the stream's own buffer.
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
