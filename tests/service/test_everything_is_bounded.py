"""Memory, sockets and time a client can take: heads, bodies, open files.

Readers that do not read are in test_unread_answers_cost_little.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator

import httpx
import pytest
import structlog
from starlette.types import Message
from structlog.testing import capture_logs

from service.edge_config import EdgeConfig
from service.listener import ListenError, listen
from service.open_files import allow_open_files, files_needed
from service.settings import ServerConfig, Settings
from tests.asgi import http_scope
from tests.clock import run_virtual
from tests.service.live import Live, mock, serving_mocks
from tests.service.raw_exchange import Connection, post
from tests.service.stage import HandlerTransport, Stage, answer, completion

SMALL_HEAD = ServerConfig(port=0, head_bytes_max=4096, head_timeout_s=0.5)


@contextlib.asynccontextmanager
async def small_heads() -> AsyncIterator[tuple[Live, Connection]]:
    """A service that takes little and waits little for a head, and a connection to it."""
    async with serving_mocks([mock()], server=SMALL_HEAD) as live:
        host, port = live.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield live, (reader, writer)
        finally:
            writer.transport.abort()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server hangs up, reset or not."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65536), 10.0):
            got += part
    return got


@pytest.mark.parametrize("complete", [True, False], ids=["whole", "without end"])
@pytest.mark.parametrize("many", [True, False], ids=["many headers", "one long header"])
async def test_a_head_over_its_bound_is_a_431(many: bool, complete: bool) -> None:
    short = [b"x-%d: %s\r\n" % (number, b"y" * 90) for number in range(60)]
    lines = short if many else [b"x: " + b"y" * 6000]
    async with small_heads() as (live, (reader, writer)):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(lines))
        if complete:
            writer.write(b"\r\n\r\n")
        got = await read_all(reader)
        assert got.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"head_too_large"' in got
        assert (await live.client.get(f"{live.url}/health")).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhos"])
async def test_a_head_that_does_not_come_is_a_408(sent: bytes) -> None:
    with capture_logs() as logs:
        async with small_heads() as (_, (reader, writer)):
            writer.write(sent)
            got = await read_all(reader)
            assert got.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"head_too_slow"' in got
            port = writer.get_extra_info("sockname")[1]
    lines = [line for line in logs if line["event"] == "connection_refused"]
    assert [(line["reason"], line["client"]) for line in lines] == [
        ("head_too_slow", f"127.0.0.1:{port}")
    ]


async def test_a_connection_may_idle_between_requests_and_a_long_answer_is_no_slow_head() -> None:
    body = json.dumps(completion(model="mock", max_tokens=80, ignore_eos=True)).encode()
    async with small_heads() as (_, (reader, writer)):
        for _ in range(2):
            writer.write(post("/v1/completions", body, "content-type: application/json"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            await asyncio.sleep(2 * SMALL_HEAD.head_timeout_s)


def test_bodies_together_are_bounded_and_what_is_over_is_told_to_come_back() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1.0)
        return answer()

    async def scenario() -> None:
        edge = EdgeConfig(body_bytes_max=1000, held_bytes_max=2500)
        async with Stage({"a": HandlerTransport(slow)}, edge=edge).open() as stage:
            body = completion(prompt="x" * 800)
            tasks = [asyncio.create_task(stage.post(body)) for _ in range(4)]
            done = await asyncio.gather(*tasks)
            assert sorted(exchange.status for exchange in done) == [200, 200, 429, 429]
            refused = next(exchange for exchange in done if exchange.status == 429)
            assert refused.error["code"] == "queue_full"
            assert int(refused.header("retry-after") or "") >= 1
            assert (await stage.post(body)).status == 200

    run_virtual(scenario())


async def never(_: httpx.Request) -> httpx.Response:
    raise AssertionError("unreachable")


def form_field(name: bytes, value: bytes) -> bytes:
    return b'--b0\r\ncontent-disposition: form-data; name="' + name + b'"\r\n\r\n' + value + b"\r\n"


FORM = {"content-type": "multipart/form-data; boundary=b0"}
SOUND = form_field(b"file", b"x" * 800)
MODEL = form_field(b"model", b"m")
END = b"--b0--\r\n"
SPEECH = "/v1/audio/transcriptions"
KEPT = [
    pytest.param("/v1/completions", {}, json.dumps(completion(prompt="x" * 800)), id="queued"),
    pytest.param(
        "/v1/embeddings",
        {"content-type": "application/json"},
        json.dumps({"model": "m", "input": "x" * 800}),
        id="light",
    ),
    pytest.param(SPEECH, FORM, (SOUND + MODEL + END).decode(), id="form, file first"),
    pytest.param(SPEECH, FORM, (SOUND + END).decode(), id="form without a model"),
    pytest.param(SPEECH, FORM, (MODEL + SOUND + END).decode(), id="form in one part"),
    pytest.param("/v1/blobs", {"content-type": "audio/wav"}, "x" * 850, id="other media"),
    pytest.param("/v1/responses/resp_1/cancel", {}, "x" * 850, id="stored"),
]


@pytest.mark.parametrize("cut_bytes", [1000, 100])
@pytest.mark.parametrize(("path", "headers", "text"), KEPT)
def test_whatever_a_body_is_the_bytes_that_are_here_are_bounded(
    path: str, headers: dict[str, str], text: str, cut_bytes: int
) -> None:
    body = text.encode()
    parts = [body[start : start + cut_bytes] for start in range(0, len(body), cut_bytes)]
    flows = cut_bytes < len(body) and (path in ("/v1/blobs", "/v1/responses/resp_1/cancel"))
    flows |= cut_bytes < len(body) and body.startswith(MODEL)

    async def slow(request: httpx.Request) -> httpx.Response:
        await request.aread()
        await asyncio.sleep(1.0)
        return answer()

    async def scenario() -> None:
        edge = EdgeConfig(body_bytes_max=1000, held_bytes_max=2000)
        async with Stage({"a": HandlerTransport(slow)}, edge=edge).open() as stage:
            held = stage.inside.bytes
            tasks = [
                asyncio.create_task(stage.send("POST", path, list(parts), headers=headers))
                for _ in range(4)
            ]
            await asyncio.sleep(0.5)
            # What flows on is here no more; the rest is counted to its last byte, and bounded.
            assert held.held == (0 if flows else 2 * len(body))
            done = await asyncio.gather(*tasks)
            refused = [exchange for exchange in done if exchange.status == 429]
            assert len(refused) == (0 if flows else 2)
            assert {exchange.error["code"] for exchange in refused} <= {"queue_full"}
            assert {exchange.status for exchange in done} - {429} == {200}

    run_virtual(scenario())


def test_a_file_that_still_arrives_before_its_model_is_counted_as_it_comes() -> None:
    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(never)}).open() as stage:
            arrived: asyncio.Queue[bytes] = asyncio.Queue()

            async def receive() -> Message:
                part = await arrived.get()
                more = {"type": "http.request", "body": part, "more_body": True}
                return more if part else {"type": "http.disconnect"}

            async def send(_: Message) -> None:
                raise AssertionError("nobody is left to read")

            scope = http_scope("POST", SPEECH, FORM)
            task = asyncio.create_task(stage.app(scope, receive, send))
            for count, part in enumerate([SOUND[:400], *[b"y" * 100] * 5]):
                arrived.put_nowait(part)
                await asyncio.sleep(0.1)
                assert stage.inside.bytes.held == 400 + 100 * count
            arrived.put_nowait(b"")
            await task
            assert stage.inside.bytes.held == 0

    run_virtual(scenario())


def test_body_bytes_of_clients_that_leave_while_sending_are_given_back() -> None:
    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(never)}).open() as stage:
            for body in (b"{", b"x" * 100, b'{"model": "nope", "prompt": "x"}'):
                await stage.post(body)
            assert stage.inside.bytes.held == 0

    run_virtual(scenario())


def test_files_needed_grow_with_the_queue_and_with_the_slots() -> None:
    settings = Settings(workers=("http://a:1", "http://b:1"))
    needed = settings.open_files_needed()
    assert needed == files_needed(queue_max=10_000, slots=512, workers=2)
    assert needed > 10_000 + 2 * 512


@pytest.mark.parametrize("host", ["x" * 300, "a..b", "no\0where", "no such host"])
def test_a_host_that_is_none_is_one_line(host: str) -> None:
    with pytest.raises(ListenError, match="cannot listen on"):
        listen(host, 0)


def test_a_queue_beyond_all_limits_is_told_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (1024, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    with capture_logs() as logs:
        allow_open_files(10**30, structlog.get_logger())
    assert [line["event"] for line in logs] == ["open_files_limit_too_low"]


def test_a_limit_of_open_files_that_is_too_low_is_raised_else_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    with capture_logs() as logs:
        allow_open_files(2000, structlog.get_logger())
    assert (limits[-1], logs) == ((2000, 4096), [])
    with capture_logs() as logs:
        allow_open_files(9000, structlog.get_logger())
    assert limits[-1] == (4096, 4096)
    (line,) = logs
    assert (line["event"], line["needed"], line["limit"]) == (
        "open_files_limit_too_low",
        9000,
        4096,
    )
