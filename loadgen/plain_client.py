"""A client that costs next to nothing: bytes that are ready, answers that are only counted.

The load generator for people (replay.py) reads every event, which costs more than a router does;
here it would measure itself.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD: Final = re.compile(rb"^HTTP/1\.1 (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_CHUNK: Final = b"0\r\n\r\n"
ENDED: Final = b"data: [DONE]"


def posted(body: Mapping[str, object], headers: Mapping[str, str]) -> bytes:
    """A completion request as bytes."""
    raw = orjson.dumps(body)
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"content-length: {len(raw)}", "", ""]
    return "\r\n".join(lines).encode() + raw


HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[bool] | None = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to ask."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        """Send; resolves to whether the answer is whole and a 200."""
        self._data = b""
        self._answered = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self._answered.set_result(False)
        else:
            self._transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        """Look whether that is all."""
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._data, 0, end)
        if length is not None:
            whole = len(self._data) >= end + 4 + int(length[1])
        else:
            whole = self._data.endswith(LAST_CHUNK)
        if whole:
            status = _HEAD.match(self._data)
            good = status is not None and status[1] == b"200"
            self._end(good and (length is not None or ENDED in self._data))

    def connection_lost(self, error: Exception | None) -> None:
        """What was asked will not be answered."""
        self._end(False)

    def close(self) -> None:
        """Ask no more."""
        if self._transport is not None:
            self._transport.close()

    def _end(self, good: bool) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(good)


@dataclass(slots=True)
class Seen:
    """What a client saw.

    Attributes:
        latencies_s: of good answers. lost: requests without one.
    """

    latencies_s: list[float] = field(default_factory=list)
    lost: int = 0

    def note(self, good: bool, latency_s: float) -> None:
        """Count an answer."""
        if good:
            self.latencies_s.append(latency_s)
        else:
            self.lost += 1


async def connect(url: str, count: int) -> list[Connection]:
    """Open connections to a server."""
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    host, port = parts.hostname or "", parts.port or 80
    made = [await loop.create_connection(Connection, host, port) for _ in range(count)]
    return [connection for _, connection in made]


async def closed_loop(url: str, request: bytes, connections: int, duration_s: float) -> Seen:
    """Ask on every connection again as soon as it is answered."""
    seen, loop = Seen(), asyncio.get_running_loop()
    opened = await connect(url, connections)
    until_s = loop.time() + duration_s

    async def one(connection: Connection) -> None:
        while (began_s := loop.time()) < until_s:
            seen.note(await connection.ask(request), loop.time() - began_s)

    await asyncio.gather(*map(one, opened))
    for connection in opened:
        connection.close()
    return seen


async def open_loop(
    url: str, request: bytes, connections: int, rate_per_s: float, duration_s: float
) -> Seen:
    """Ask at a steady rate, whether answers come or not; time counts from when it was due."""
    seen, loop = Seen(), asyncio.get_running_loop()
    idle = deque(await connect(url, connections))
    opened = list(idle)
    freed = asyncio.Semaphore(connections)
    tasks: set[asyncio.Task[None]] = set()
    began_s = loop.time()

    async def one(due_s: float) -> None:
        async with freed:
            connection = idle.popleft()
            seen.note(await connection.ask(request), loop.time() - due_s)
            idle.append(connection)

    for number in range(int(rate_per_s * duration_s)):
        due_s = began_s + number / rate_per_s
        if loop.time() < due_s:
            await asyncio.sleep(due_s - loop.time())
        task = loop.create_task(one(due_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.gather(*tasks)
    for connection in opened:
        connection.close()
    return seen


async def probe(url: str, every_s: float, seen: Seen) -> None:
    """Ask for /health at a steady rate, until cancelled: what waits there waits for the loop."""
    loop = asyncio.get_running_loop()
    (connection,) = await connect(url, 1)
    try:
        while True:
            began_s = loop.time()
            seen.note(await connection.ask(HEALTH), loop.time() - began_s)
            await asyncio.sleep(every_s)
    finally:
        connection.close()
