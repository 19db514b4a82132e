"""A byte-for-byte copy of what a worker sends: a TCP relay on loopback that remembers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_BYTES = 1 << 16
START_MAX_S = 10.0


@dataclass(slots=True)
class Tee:
    """Relays connections to one worker.

    Attributes:
        url: where to connect instead of to the worker.
        sent: what the worker sent, one entry a connection, as it came.
    """

    worker_host: str
    worker_port: int
    url: str = ""
    sent: list[bytearray] = field(default_factory=list)

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        from_worker, to_worker = await asyncio.open_connection(self.worker_host, self.worker_port)
        copy = bytearray()
        self.sent.append(copy)
        back = asyncio.create_task(_pump(from_worker, writer, copy))
        forth = asyncio.create_task(_pump(reader, to_worker, bytearray()))
        try:
            await asyncio.wait([back, forth], return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.cancel()
            forth.cancel()
            await asyncio.wait([back, forth])
            for end in (writer, to_worker):
                end.close()

    def event_streams(self) -> list[bytes]:
        """The bodies of all event streams relayed so far, without their transfer coding."""
        return [body for copy in self.sent for body in _event_streams(bytes(copy))]


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: bytearray
) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(READ_BYTES):
            copy += chunk
            writer.write(chunk)
            await writer.drain()


def _event_streams(sent: bytes) -> Iterator[bytes]:
    """The event-stream bodies among the responses of one connection."""
    peer = h11.Connection(h11.CLIENT)
    peer.receive_data(sent)
    body: bytearray | None = None
    while True:
        if peer.our_state is h11.IDLE:
            peer.send(h11.Request(method="POST", target="/", headers=[("host", "worker")]))
            peer.send(h11.EndOfMessage())
        event = peer.next_event()
        if isinstance(event, h11.Response):
            kind = dict(event.headers).get(b"content-type", b"")
            body = bytearray() if kind.startswith(b"text/event-stream") else None
        elif isinstance(event, h11.Data) and body is not None:
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            if body is not None:
                yield bytes(body)
            if peer.their_state is not h11.DONE:
                return
            peer.start_next_cycle()
        elif event is h11.NEED_DATA:
            return


@contextlib.contextmanager
def running_tee(worker_url: str) -> Iterator[Tee]:
    """Yield a relay in front of one worker, served by a thread of its own."""
    at = urlsplit(worker_url)
    assert at.hostname is not None
    assert at.port is not None
    tee = Tee(at.hostname, at.port)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stopping = asyncio.Event()

    async def serve() -> None:
        async with await asyncio.start_server(tee.relay, "127.0.0.1", 0) as server:
            tee.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await stopping.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(START_MAX_S)
        yield tee
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
