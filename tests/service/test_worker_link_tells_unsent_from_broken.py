"""Over real sockets: errors say whether the worker can have taken the request; bytes stay as is."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from aiohttp.client_proto import ResponseHandler

from service.worker_link import WorkerTransport

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[str]:
    """A server that plays a script of raw bytes on every connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def link() -> AsyncIterator[WorkerTransport]:
    transport = WorkerTransport(keepalive_s=4.0)
    try:
        yield transport
    finally:
        await transport.aclose()
        await asyncio.sleep(0)


def post(url: str, connect_s: float = 2.0) -> httpx.Request:
    timeout = httpx.Timeout(None, connect=connect_s).as_dict()
    return httpx.Request("POST", url, content=b"{}", extensions={"timeout": timeout})


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(2)


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset."""
    peer = writer.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def test_a_refused_connection_is_a_connect_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with link() as transport:
        with pytest.raises(httpx.ConnectError):
            await transport.handle_async_request(post(url))


async def test_a_connection_that_does_not_come_is_a_connect_timeout() -> None:
    # A listener whose backlog is full drops further SYNs.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        async with link() as transport:
            with pytest.raises(httpx.ConnectTimeout):
                await transport.handle_async_request(
                    post(f"http://127.0.0.1:{address[1]}", connect_s=0.2)
                )
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_connection_lost_before_the_response_is_no_connect_error(how: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if how == "reset":
            reset(writer)

    async with raw_server(script) as url, link() as transport:
        with pytest.raises(httpx.ReadError):
            await transport.handle_async_request(post(url))


async def test_a_garbled_response_is_a_protocol_error() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"SMTP ready\r\n\r\n")
        await writer.drain()

    async with raw_server(script) as url, link() as transport:
        with pytest.raises(httpx.RemoteProtocolError):
            await transport.handle_async_request(post(url))


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("framing", [b"transfer-encoding: chunked", b"content-length: 100"])
async def test_a_body_that_breaks_off_does_not_look_complete(how: str, framing: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        if how == "reset":
            reset(writer)

    async with raw_server(script) as url, link() as transport:
        response = await transport.handle_async_request(post(url))
        assert isinstance(response.stream, httpx.AsyncByteStream)
        with pytest.raises(httpx.HTTPError):
            async for _ in response.stream:
                pass
        await response.aclose()


async def test_nothing_is_added_to_the_request_and_cookies_are_forgotten() -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            seen.append(await read_request(reader))
            writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: a=1; path=/\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()

    async with raw_server(script) as url, link() as transport:
        for _ in range(2):
            response = await transport.handle_async_request(post(url))
            await response.aread()
            await response.aclose()
    names = [line.split(b":")[0].lower() for line in seen[1].split(b"\r\n")[1:-2]]
    assert sorted(names) == [b"content-length", b"host"]


async def test_closing_a_response_early_closes_the_connection_at_once() -> None:
    closed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await writer.drain()
        assert await reader.read() == b""
        closed.set()

    async with raw_server(script) as url, link() as transport:
        response = await transport.handle_async_request(post(url))
        await response.aclose()
        async with asyncio.timeout(1.0):
            await closed.wait()


async def test_cancelling_the_wait_for_a_response_closes_the_connection_at_once() -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        arrived.set()
        assert await reader.read() == b""
        closed.set()

    async with raw_server(script) as url, link() as transport:
        task = asyncio.create_task(transport.handle_async_request(post(url)))
        await arrived.wait()
        task.cancel()
        async with asyncio.timeout(1.0):
            await closed.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_reason_that_is_no_text_is_no_error() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 O\xa7\xffK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with raw_server(script) as url, link() as transport:
        response = await transport.handle_async_request(post(url))
        assert response.status_code == 200
        assert await response.aread() == b"{}"
        await response.aclose()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_outgrows_every_buffer_comes_whole_to_a_slow_reader(
    chunked: bool,
) -> None:
    body = bytes(range(256)) * 8192

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n")
        for start in range(0, len(body), 4096):
            part = body[start : start + 4096]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        await writer.drain()

    async with raw_server(answer) as url, link() as transport:
        response = await transport.handle_async_request(post(url))
        seen = bytearray()
        async for part in response.aiter_raw():
            seen += part
            await asyncio.sleep(0.001)
        await response.aclose()
    assert bytes(seen) == body


async def test_what_comes_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[bytes] = []
    feed = ResponseHandler.data_received

    def counted(connection: ResponseHandler, data: bytes) -> None:
        fed.append(data)
        feed(connection, data)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(8):
            await asyncio.sleep(0.001)
            writer.write(b"9\r\ndata: x\n\n\r\n")
        writer.write(b"0\r\n\r\n")

    monkeypatch.setattr(ResponseHandler, "data_received", counted)
    async with raw_server(answer) as url, link() as transport:
        response = await transport.handle_async_request(post(url))
        assert await response.aread() == b"data: x\n\n" * 8
        await response.aclose()
    assert fed
    assert all(fed)
