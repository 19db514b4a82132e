"""A worker as bytes on a socket: what it got is kept raw, what it answers the test writes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from tests.service.scripted_server import page


@dataclass
class Got:
    """One request as it came.

    Attributes:
        line: the request line.
        headers: lower-case names and values, repeated ones repeated.
        body: without the framing; None when the script reads it itself.
        reader, writer: of its connection.
    """

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def path(self) -> str:
        """Path with query."""
        return self.line.split(" ")[1]

    def values(self, name: str) -> list[str]:
        """Every value of a header."""
        return [value for key, value in self.headers if key == name]


Script = Callable[[Got], Awaitable[None]]


@dataclass
class RawWorker:
    """Serves health, metrics and models as an engine does; the rest is the script's.

    Attributes:
        script: writes the answer to a request; the connection closes after it.
        models: ids on /v1/models, the base model first, or a status to answer instead.
        metrics: the page on /metrics.
        early: paths whose script is called before the body is read.
        got: requests that were the script's.
        gone: how many of them saw their connection close while the script ran.
    """

    script: Script
    models: list[str] | int = field(default_factory=lambda: ["m"])
    metrics: bytes = field(default_factory=page)
    early: tuple[str, ...] = ()
    got: list[Got] = field(default_factory=list)
    gone: int = 0
    url: str = ""

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Listen while the block runs; yields the base URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self.url
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *rows = head.strip().split("\r\n")
            headers = [
                (row.partition(":")[0].lower(), row.partition(":")[2].strip()) for row in rows
            ]
            request = Got(line, headers, b"", reader, writer)
            await self._answer(request)
            await writer.drain()
        writer.close()

    async def _answer(self, request: Got) -> None:
        path = request.path.partition("?")[0]
        if path == "/health":
            request.writer.write(whole(200, b""))
        elif path.startswith("/metrics"):
            request.writer.write(whole(200, self.metrics, "text/plain"))
        elif path == "/v1/models" and isinstance(self.models, int):
            request.writer.write(whole(self.models, b"{}"))
        elif path == "/v1/models" and isinstance(self.models, list):
            cards = [_card(name, self.models[0]) for name in self.models]
            request.writer.write(whole(200, orjson.dumps({"object": "list", "data": cards})))
        else:
            self.got.append(request)
            if path not in self.early:
                request.body = await read_body(request)
            await self._play(request)

    async def _play(self, request: Got) -> None:
        """Run the script, and stop it when the connection closes."""
        script = asyncio.ensure_future(self.script(request))
        if request.path in self.early:
            await script
            return
        leaving = asyncio.ensure_future(request.reader.read(1))
        await asyncio.wait((script, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not script.done():
            self.gone += 1
            script.cancel()
        leaving.cancel()
        await asyncio.wait((script, leaving))


def _card(name: str, base: str) -> dict[str, object]:
    """As vLLM lists a model: an adapter has no length of its own but a parent."""
    if name == base:
        return {"id": name, "object": "model", "max_model_len": 4096}
    return {"id": name, "object": "model", "parent": base}


async def read_body(request: Got) -> bytes:
    """Read a body by its length or its chunks."""
    length = request.values("content-length")
    if length:
        return await request.reader.readexactly(int(length[0]))
    if "chunked" not in request.values("transfer-encoding"):
        return b""
    body = b""
    while size := int(await request.reader.readline(), 16):
        body += await request.reader.readexactly(size)
        await request.reader.readline()
    await request.reader.readline()
    return body


def whole(status: int, body: bytes, media: str = "application/json", *headers: str) -> bytes:
    """A whole answer."""
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-type: {media}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events_head(*headers: str) -> bytes:
    """The head of an event stream."""
    lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked"]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A chunk of an answer; of nothing, the last."""
    return b"%x\r\n%b\r\n" % (len(data), data)
