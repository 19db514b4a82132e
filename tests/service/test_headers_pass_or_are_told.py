"""Header bytes, statuses and credentials between client and worker: as they are, or an error.

T numbers are those of test_faults_of_other_routers_do_not_happen_here.py.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.service.raw_exchange import echo, in_front_of, post, raw
from tests.service.raw_worker import Got, RawWorker, whole

BODY = {"model": "m", "prompt": "x", "max_tokens": 4}
PATHS = ["/v1/completions", "/v1/embeddings", "/v1/new/things"]


@pytest.mark.parametrize("path", PATHS)
async def test_header_bytes_outside_ascii_pass_both_ways_as_they_are(path: str) -> None:
    """UTF-8 to the worker, and any bytes, Latin-1 too, from it."""
    utf8 = {"x-name": "J\u00f6rg \u6f22", "x-other": "\u00e9"}
    latin1 = b"x-name: J\xf6rg \xe9\xff"

    async def answer(request: Got) -> None:
        told = whole(200, b"{}", "application/json", "x-name: HERE")
        request.writer.write(told.replace(b"x-name: HERE", latin1))

    worker = RawWorker(answer)
    async with in_front_of(worker) as live:
        head = [f"{name}: {value}" for name, value in utf8.items()]
        body = json.dumps({**BODY, "input": "x"}).encode()
        sent = ["host: x", "content-type: application/json", "connection: close", *head]
        reader, writer = await raw(live, post(path, body, *sent))
        seen = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert seen.startswith(b"HTTP/1.1 200")
    assert latin1 in seen
    for name, value in utf8.items():
        assert [one.encode("latin-1") for one in worker.got[0].values(name)] == [value.encode()]


@pytest.mark.parametrize(
    "name", ["x-name", "user-agent", "x-session-id", "x-request-id", "traceparent", "tracestate"]
)
@pytest.mark.parametrize("path", PATHS)
async def test_header_bytes_that_cannot_pass_are_refused_or_go_no_further(
    path: str, name: str
) -> None:
    """Latin-1 to a worker: a 400 that names the header, or a header that is bidgate's to make."""
    worker = RawWorker(echo)
    async with in_front_of(worker) as live:
        body = json.dumps({**BODY, "input": "x"}).encode()
        text = post(path, body, "host: x", "content-type: application/json", "connection: close")
        reader, writer = await raw(
            live, text.replace(b"host: x", b"host: x\r\n" + name.encode() + b": J\xf6rg", 1)
        )
        status, _, rest = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n")
        writer.close()
        if worker.got:
            assert status.startswith(b"HTTP/1.1 200")
            assert not any("J" in value for value in worker.got[0].values(name))
        else:
            assert status.startswith(b"HTTP/1.1 400")
            assert f"the header {name} is not UTF-8".encode() in rest
    assert bool(worker.got) is (name == "x-request-id")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", [b"\x01", b"\x0b", b"\x1b[31m", b"\x7f"], ids=repr)
async def test_header_bytes_of_a_worker_that_no_server_may_send_become_blanks(
    path: str, wrong: bytes
) -> None:
    async def answer(request: Got) -> None:
        told = whole(200, b"{}", "application/json", "x-name: HERE")
        request.writer.write(told.replace(b"HERE", b"a" + wrong + b"b"))

    async with in_front_of(RawWorker(answer)) as live:
        response = await live.client.post(f"{live.url}{path}", json={**BODY, "input": "x"})
    if response.status_code == 200:
        assert response.headers["x-name"] == "a" + " " + wrong.decode()[1:] + "b"
    else:  # where the reader of the worker's answer takes none of them
        assert (response.status_code, response.json()["error"]["type"]) == (502, "bad_gateway")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", ["600", "999", "099", "000", "101"])
async def test_a_status_that_no_answer_has_is_a_502(path: str, status: str) -> None:
    async def answer(request: Got) -> None:
        told = whole(200, b"{}", "application/json")
        request.writer.write(told.replace(b"HTTP/1.1 200", b"HTTP/1.1 " + status.encode(), 1))

    async with in_front_of(RawWorker(answer)) as live:
        response = await live.client.post(f"{live.url}{path}", json={**BODY, "input": "x"})
    assert (response.status_code, response.json()["error"]["type"]) == (502, "bad_gateway")


@pytest.mark.parametrize("path", PATHS)
async def test_headers_of_one_connection_stay_on_it(path: str) -> None:
    """T19, T37: hop-by-hop headers and what Connection names; the worker's own Host."""

    async def answer(request: Got) -> None:
        request.writer.write(
            whole(
                200,
                b"{}",
                "application/json",
                "connection: close, x-secret",
                "x-secret: 1",
                "keep-alive: timeout=5",
                "set-cookie: a=1",
                "set-cookie: b=2",
            )
        )

    worker = RawWorker(answer)
    async with in_front_of(worker) as live:
        body = json.dumps({**BODY, "input": "x"}).encode()
        reader, writer = await raw(
            live,
            post(
                path,
                body,
                "host: foo.example",
                "content-type: application/json",
                "connection: close, x-foo",
                "x-foo: 1",
                "te: trailers",
                "keep-alive: timeout=9",
                "proxy-authorization: Basic x",
                "x-kept: 1",
                "x-kept: 2",
                "cookie: a=1",
                "cookie: b=2",
            ),
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        writer.close()
        got = worker.got[0]
        assert got.values("host") == [worker.url.removeprefix("http://")]
        assert got.values("x-kept") == ["1", "2"]
        assert got.values("cookie") == ["a=1", "b=2"]
        for name in ("x-foo", "te", "keep-alive", "proxy-authorization", "upgrade"):
            assert got.values(name) == []
        assert "x-secret" not in head
        assert "keep-alive: timeout=5" not in head
        assert (head.count("set-cookie"), head.count("content-length")) == (2, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_no_credentials_are_made_up(path: str) -> None:
    """T21: no key configured, none sent: the worker gets none, and the client's passes."""
    worker = RawWorker(echo)
    async with in_front_of(worker) as live:
        body = {**BODY, "input": "x"}
        await live.client.post(f"{live.url}{path}", json=body)
        await live.client.post(
            f"{live.url}{path}", json=body, headers={"authorization": "Bearer c"}
        )
        assert [got.values("authorization") for got in worker.got] == [[], ["Bearer c"]]
