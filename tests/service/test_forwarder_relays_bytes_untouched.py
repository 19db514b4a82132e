"""What a client sends reaches the worker, what the worker answers reaches the client, as it was."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from pydantic import SecretStr

from service.edge_config import EdgeConfig
from tests.clock import run_virtual
from tests.service.stage import (
    DONE,
    HandlerTransport,
    Stage,
    TimedStream,
    answer,
    completion,
    event,
    stream,
)

ODD_BODIES = [
    b'{"model":"m","prompt":"x","max_tokens":2,"big":123456789012345678901234567890}',
    b'{"model":"m","prompt":"x","max_tokens":2,"huge":1e400,"nan":NaN}',
    b'{ "model" : "m",\n "prompt":"\\u00e9\\ud83d\\ude00", "max_tokens":2,"max_tokens":3}',
    b'{"model":"m","prompt":"\\ud800","max_tokens":2}',
    '{"model":"m","prompt":"grüße","chat_template_kwargs":{"a":[1,{"b":null}]}}'.encode(),
]


async def plain(_: httpx.Request) -> httpx.Response:
    return answer()


@pytest.mark.parametrize("body", ODD_BODIES, ids=range(len(ODD_BODIES)))
def test_the_body_arrives_byte_for_byte(body: bytes) -> None:
    async def scenario() -> None:
        worker = HandlerTransport(plain)
        async with Stage({"a": worker}).open() as stage:
            exchange = await stage.post(body)
        assert exchange.status == 200
        assert worker.requests[0].content == body
        assert worker.requests[0].headers["content-length"] == str(len(body))

    run_virtual(scenario())


def test_a_field_that_lets_clients_kill_engines_is_taken_out_and_nothing_else() -> None:
    body = (
        b'{"model":"m","prompt":"x","big":123456789012345678901234567890,'
        b'"kv_transfer_params":{"do_remote_prefill":true}}'
    )

    async def scenario() -> None:
        worker = HandlerTransport(plain)
        async with Stage({"a": worker}).open() as stage:
            await stage.post(body)
        sent = json.loads(worker.requests[0].content)
        expected = json.loads(body)
        del expected["kv_transfer_params"]
        assert sent == expected

    run_virtual(scenario())


def test_events_pass_one_by_one_as_they_come() -> None:
    parts = [event("a"), event("b"), event("c") + DONE]

    async def handler(_: httpx.Request) -> httpx.Response:
        return stream(*((1.0, part) for part in parts))

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            exchange = await stage.post(completion(stream=True))
        assert exchange.chunks == [(1.0, parts[0]), (2.0, parts[1]), (3.0, parts[2])]
        assert exchange.complete
        assert exchange.header("content-type") == "text/event-stream; charset=utf-8"
        assert exchange.header("x-accel-buffering") == "no"
        assert stage.ends() == {"completed": 1}

    run_virtual(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "Text/Event-Stream;charset=UTF-8"},
        {"content-type": " text/event-stream ", "content-encoding": "Identity"},
    ],
)
def test_a_stream_is_known_by_its_media_type_in_any_spelling(headers: dict[str, str]) -> None:
    """RFC 9110, 8.3.1 and 8.4.1: both are case-insensitive."""

    async def handler(_: httpx.Request) -> httpx.Response:
        parts = TimedStream(((1.0, event("a")), (1.0, httpx.ReadError("cut"))))
        return httpx.Response(200, headers=headers, stream=parts)

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            exchange = await stage.post(completion(stream=True))
        assert exchange.header("x-accel-buffering") == "no"
        assert exchange.chunks[0] == (1.0, event("a"))
        assert b'"error"' in exchange.body
        assert exchange.complete

    run_virtual(scenario())


def test_the_query_string_goes_along() -> None:
    async def scenario() -> None:
        worker = HandlerTransport(plain)
        async with Stage({"a": worker}).open() as stage:
            await stage.post(path="/v1/chat/completions?trace=1", body={"model": "m"})
        assert str(worker.requests[0].url) == "http://a/v1/chat/completions?trace=1"

    run_virtual(scenario())


def test_hop_by_hop_headers_stop_in_both_directions_and_repeated_ones_stay() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        headers = [
            ("content-type", "application/json"),
            ("connection", "close, x-inner"),
            ("x-inner", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authenticate", "Basic"),
            ("trailer", "x"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("x-kept", "yes"),
        ]
        return httpx.Response(200, headers=headers, content=b"{}")

    async def scenario() -> None:
        worker = HandlerTransport(handler)
        sent = [
            ("host", "foo.example"),
            ("connection", "close, X-Foo"),
            ("x-foo", "1"),
            ("te", "trailers"),
            ("keep-alive", "1"),
            ("proxy-authorization", "x"),
            ("upgrade", "h2c"),
            ("x-multi", "1"),
            ("x-multi", "2"),
            ("content-type", "application/json"),
        ]
        async with Stage({"a": worker}).open() as stage:
            exchange = await stage.post(headers=sent)
        arrived = worker.requests[0].headers
        gone = {"connection", "x-foo", "te", "keep-alive", "proxy-authorization", "upgrade"}
        assert not gone & set(arrived)
        assert arrived["host"] == "a"
        assert arrived.get_list("x-multi") == ["1", "2"]
        names = [name for name, _ in exchange.headers]
        assert not {b"connection", b"x-inner", b"keep-alive", b"trailer"} & set(names)
        assert b"proxy-authenticate" not in names
        cookies = [value for name, value in exchange.headers if name == b"set-cookie"]
        assert cookies == [b"a=1", b"b=2"]
        assert exchange.header("x-kept") == "yes"

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("own_key", "worker_key", "sent", "arrives"),
    [
        (None, None, None, None),
        (None, None, "Bearer client", "Bearer client"),
        (None, "w", "Bearer client", "Bearer w"),
        ("own", None, "Bearer own", None),
        ("own", "w", "Bearer own", "Bearer w"),
    ],
)
def test_the_worker_gets_its_own_key_or_the_clients_but_never_bidgates(
    own_key: str | None, worker_key: str | None, sent: str | None, arrives: str | None
) -> None:
    async def scenario() -> None:
        worker = HandlerTransport(plain)
        keys = {"a": worker_key} if worker_key else {}
        own = EdgeConfig(api_key=None if own_key is None else SecretStr(own_key))
        stage = Stage({"a": worker}, edge=own, api_keys=keys)
        async with stage.open():
            exchange = await stage.post(headers={"authorization": sent} if sent else {})
        assert exchange.status == 200
        assert worker.requests[0].headers.get("authorization") == arrives

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("streams", "sent", "arrives"),
    [
        (False, "gzip, br", "gzip, br"),
        (False, None, "identity"),
        (True, "gzip, br", "identity"),
        (True, None, "identity"),
    ],
)
def test_the_worker_may_compress_what_the_client_can_read_but_no_stream(
    streams: bool, sent: str | None, arrives: str
) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return stream((0.0, event() + DONE)) if streams else answer()

    async def scenario() -> None:
        worker = HandlerTransport(handler)
        async with Stage({"a": worker}).open() as stage:
            await stage.post(
                completion(stream=streams), headers={"accept-encoding": sent} if sent else {}
            )
        assert worker.requests[0].headers.get_list("accept-encoding") == [arrives]

    run_virtual(scenario())


def test_compressed_bytes_pass_as_they_are_with_their_name() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        parts = TimedStream([(0.0, b"\x1f\x8b-not-really"), (0.0, b"-gzip")])
        return httpx.Response(200, headers=headers, stream=parts)

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            exchange = await stage.post()
        assert exchange.body == b"\x1f\x8b-not-really-gzip"
        assert exchange.header("content-encoding") == "gzip"
        assert stage.ends() == {"completed": 1}

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (502, b"<html>bad gateway</html>", "text/html"),
        (500, b"", "text/plain"),
        (400, b"no", "text/plain"),
        (404, b'{"error":{"message":"no such model","code":404}}', "application/json"),
    ],
)
def test_what_the_worker_refuses_passes_unchanged_and_counts_as_failed(
    status: int, body: bytes, kind: str
) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-type": kind}, content=body)

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            exchange = await stage.post()
        assert (exchange.status, exchange.body) == (status, body)
        assert exchange.header("content-type") == kind
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_the_answer_names_the_worker_and_the_wait() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1.0)
        return answer()

    async def scenario() -> None:
        stage = Stage({"a": HandlerTransport(handler)}, batch_limit=1)
        async with stage.open():
            first, second = await asyncio.gather(stage.post(), stage.post())
        assert first.header("x-bidgate-worker") == "a"
        assert first.header("x-bidgate-queue-ms") == "0.0"
        assert second.header("x-bidgate-queue-ms") == "1000.0"

    run_virtual(scenario())
