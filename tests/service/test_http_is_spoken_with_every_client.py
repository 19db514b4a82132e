"""Clients that speak HTTP in their own way: old, pipelining, upgrading, chunking, ill-mannered."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator

import pytest

from service.auth_settings import AuthConfig, ClientKey
from service.edge_config import EdgeConfig
from service.secrets import Secret
from service.settings import ServerConfig
from tests.service.live import Live, mock, serving_mocks, until

ANSWER_S = 10.0
SERVER = ServerConfig(port=0, head_bytes_max=4096, head_timeout_s=1.0, client_keepalive_s=5)
FAST = {"server": SERVER, "edge": EdgeConfig(body_timeout_s=1.0, body_bytes_max=100_000)}
BODY = b'{"model":"mock","prompt":"x","max_tokens":2,"ignore_eos":true}'
STREAM = BODY[:-1] + b',"stream":true}'
LONG = b'{"model":"mock","prompt":"x","max_tokens":2000,"ignore_eos":true}'


def post(body: bytes = BODY, *, version: bytes = b"1.1", lines: bytes = b"") -> bytes:
    """A completion's request as bytes; header lines end with CRLF."""
    return (
        b"POST /v1/completions HTTP/%s\r\nhost: x\r\ncontent-type: application/json\r\n%s"
        b"content-length: %d\r\n\r\n%s" % (version, lines, len(body), body)
    )


def chunked(*parts: bytes, trailers: bytes = b"", lines: bytes = b"") -> bytes:
    """The same in chunks, with trailers after them."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s"
        b"transfer-encoding: chunked\r\n\r\n%s0\r\n%s\r\n" % (lines, chunks, trailers)
    )


class Peer:
    """A client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def go_on_sending(self) -> None:
        """Send a byte now and then, as if nothing had been answered."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                await self.send(b"x")
                await asyncio.sleep(0.05)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next whole response, by its own framing; status 0 where the connection ends."""
        try:
            async with asyncio.timeout(ANSWER_S):
                head = await self._reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                status = int(lines[0].split()[1])
                if fields.get("transfer-encoding") == "chunked":
                    return status, fields, await self._chunks()
                if "content-length" in fields:
                    length = int(fields["content-length"])
                    return status, fields, await self._reader.readexactly(length)
                if status == 100:
                    return status, fields, b""
                return status, fields, await self._reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}, b""

    async def rest(self) -> bytes:
        """Everything until the other end hangs up, reset or not."""
        got = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ANSWER_S):
                while part := await self._reader.read(65536):
                    got += part
        return got

    async def _chunks(self) -> bytes:
        whole = b""
        while size := int(await self._reader.readline(), 16):
            whole += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return whole


@contextlib.asynccontextmanager
async def connected(live: Live) -> AsyncIterator[Peer]:
    host, port = live.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def ask(live: Live, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    async with connected(live) as peer:
        await peer.send(data)
        return await peer.answer()


def text_of(body: bytes) -> str:
    """What a completion says, streamed or whole."""
    if body.startswith(b"data: "):
        events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
        assert events.pop() == b"[DONE]"
        return "".join(c["text"] for event in events for c in json.loads(event)["choices"])
    return str(json.loads(body)["choices"][0]["text"])


async def test_a_client_of_http_1_0_gets_bytes_without_chunks_and_the_end_of_the_connection() -> (
    None
):
    async with serving_mocks([mock()], **FAST) as live:
        _, _, body = await ask(live, post(STREAM))
        expected = text_of(body)
        for lines in (b"", b"connection: keep-alive\r\n"):
            for asked in (STREAM, BODY):
                async with connected(live) as peer:
                    await peer.send(post(asked, version=b"1.0", lines=lines))
                    status, fields, body = await peer.answer()
                    assert (status, text_of(body)) == (200, expected)
                    assert "transfer-encoding" not in fields
                    assert fields["connection"] == "close"
                    assert await peer.rest() == b""


async def test_requests_may_follow_each_other_without_waiting_and_are_answered_in_order() -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        ids = [b"x-request-id: r%d\r\n" % number for number in range(6)]
        sent = [post(STREAM if number % 2 else BODY, lines=one) for number, one in enumerate(ids)]
        await peer.send(b"".join(sent))
        for number in range(6):
            status, fields, body = await peer.answer()
            assert (status, fields["x-request-id"]) == (200, f"r{number}")
            assert text_of(body)


async def test_a_pipelining_client_that_leaves_frees_the_slot_of_the_request_that_runs() -> None:
    async with serving_mocks([mock()], **FAST) as live:
        async with connected(live) as peer:
            await peer.send(post(LONG) + post(LONG))
            await until(lambda: live.service.held == 1, within_s=ANSWER_S)
        await until(lambda: live.service.held == 0, within_s=5.0)


async def test_more_pipelined_requests_than_anybody_needs_wait_in_the_socket() -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        # Without a bound each of these would be a task's worth of memory at once.
        await peer.send(post(LONG))
        await until(lambda: live.service.held == 1, within_s=ANSWER_S)
        sending = asyncio.create_task(peer.send(post(b"{}" + b" " * 3000) * 4000))
        await asyncio.sleep(0.5)
        assert not sending.done()
        sending.cancel()


async def test_connection_close_is_obeyed_and_said() -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        await peer.send(post(lines=b"connection: close\r\n") + post())
        status, fields, _ = await peer.answer()
        assert (status, fields["connection"]) == (200, "close")
        assert await peer.rest() == b""


async def test_a_body_may_wait_for_a_100_and_a_refusal_comes_without_one() -> None:
    expect = b"expect: 100-continue\r\n"
    async with serving_mocks([mock()], **FAST) as live:
        head, body = post(lines=expect).split(b"\r\n\r\n", 1)
        async with connected(live) as peer:
            await peer.send(head + b"\r\n\r\n")
            assert (await peer.answer())[0] == 100
            await peer.send(body)
            assert (await peer.answer())[0] == 200
        async with connected(live) as peer:
            await peer.send(head.replace(b"length: 62", b"length: 200000") + b"\r\n\r\n")
            assert (await peer.answer())[0] == 413


@pytest.mark.parametrize(
    "target",
    [b"http://elsewhere.example/v1/completions", b"/v1/completions?", b"//v1//completions"],
)
async def test_a_target_may_be_absolute_and_decides_nothing_but_the_path(target: bytes) -> None:
    async with serving_mocks([mock()], **FAST) as live:
        status, _, _ = await ask(live, post().replace(b"/v1/completions", target, 1))
        assert status == (404 if target.startswith(b"//") else 200)


async def test_an_offer_of_another_protocol_is_passed_over_again_and_again() -> None:
    # Java's HttpClient offers HTTP/2 with every request to a plain http:// address.
    offer = (
        b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAEAAEAAAAIAAAAB\r\n"
    )
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        for body in (BODY, STREAM, BODY):
            await peer.send(post(body, lines=offer))
            status, fields, body = await peer.answer()
            assert status == 200
            assert "upgrade" not in fields
            assert text_of(body)
        await peer.send(chunked(BODY[:9], BODY[9:], lines=offer))
        assert (await peer.answer())[0] == 200


async def test_trailers_are_no_headers() -> None:
    trailers = b"x-request-id: late\r\nx-bidgate-max-wait-ms: nonsense\r\n"
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        for _ in range(2):
            await peer.send(chunked(BODY[:9], BODY[9:], trailers=trailers))
            status, fields, body = await peer.answer()
            assert status == 200
            assert fields["x-request-id"] != "late"
            assert text_of(body)


@pytest.mark.parametrize("line", [b"x: y\r\n", b"y"], ids=["many", "one without end"])
async def test_trailers_without_end_are_cut(line: bytes) -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        await peer.send(chunked(BODY)[:-2] + b"x-0: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                await peer.send(line * (1000 // len(line)))
                await asyncio.sleep(0)
        await peer.rest()
        await until(lambda: live.service.held == 0, within_s=5.0)
        assert (await live.client.get(f"{live.url}/health")).status_code == 200


async def test_a_client_that_goes_on_sending_after_its_answer_is_let_go() -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        head = post().replace(b"content-length: 62", b"content-length: 99999999")
        await peer.send(head)
        assert (await peer.answer())[0] == 413
        with pytest.raises(ConnectionError):
            await peer.go_on_sending()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        post().replace(b"content-length: 62", b"content-length: -1"),
        post().replace(b"content-length: 62", b"content-length: 62\r\ncontent-length: 63"),
        post(lines=b"transfer-encoding: chunked\r\n"),
        post(lines=b"a header without colon\r\n"),
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n",
    ],
    ids=lambda data: data[:20],
)
async def test_what_is_no_http_is_an_error_in_the_usual_shape(data: bytes) -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        await peer.send(data)
        status, fields, body = await peer.answer()
        assert status == 400
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "bad_http")
        assert fields["x-bidgate-reason"] == "bad_http"
        assert fields["connection"] == "close"
        assert await peer.rest() == b""
        page = (await live.client.get(f"{live.url}/metrics")).text
        assert 'bidgate_connections_refused_total{reason="bad_http"} 1.0' in page


async def test_a_compressed_body_is_told_that_bidgate_reads_none() -> None:
    squeezed = gzip.compress(BODY)
    async with serving_mocks([mock()], **FAST) as live:
        status, _, body = await ask(live, post(squeezed, lines=b"content-encoding: gzip\r\n"))
        assert status == 415
        assert "content-encoding" in json.loads(body)["error"]["message"]
        status, _, _ = await ask(live, post(lines=b"content-encoding: identity\r\n"))
        assert status == 200


async def test_an_answer_to_head_has_no_body() -> None:
    async with serving_mocks([mock()], **FAST) as live, connected(live) as peer:
        await peer.send(b"HEAD /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = await peer.rest()
        assert re.fullmatch(rb"HTTP/1\.1 405 [^\r]+\r\n(?:[^\r]+\r\n)+\r\n", got)


async def test_an_answer_before_the_request_is_sent_is_not_lost_by_hanging_up() -> None:
    body = b"x" * (8 * 1024 * 1024)
    auth = AuthConfig(keys=(ClientKey(key=Secret("right")),))
    async with serving_mocks([mock()], auth=auth) as live:
        host, port = live.url.removeprefix("http://").rsplit(":", 1)

        def ask() -> bytes:
            with socket.create_connection((host, int(port)), timeout=20.0) as client:
                client.sendall(
                    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
                    b"authorization: Bearer wrong\r\ncontent-type: multipart/form-data; boundary=b"
                    b"\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                # All of it can be sent although the answer is there long before.
                client.sendall(body)
                return b"".join(iter(lambda: client.recv(65536), b""))

        answer = await asyncio.to_thread(ask)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b'"code":"invalid_api_key"' in answer
