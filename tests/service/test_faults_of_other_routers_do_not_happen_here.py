"""What users of other routers reported, over real sockets: T numbers are the report's rows.

Rows that other files test are linked from docs/conformance.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from structlog.testing import capture_logs

from service.edge_config import EdgeConfig
from service.forward_config import ForwardConfig
from tests.service.live import until
from tests.service.raw_exchange import echo, in_front_of, post, raw
from tests.service.raw_worker import Got, RawWorker, chunk, events_head, whole
from tests.service.stage import ends

BODY = {"model": "m", "prompt": "x", "max_tokens": 4}
TOKEN = b'data: {"id":"1","choices":[{"index":0,"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/pooling"])
async def test_a_client_that_leaves_before_the_first_byte_is_known_to_the_worker(
    path: str, streams: bool
) -> None:
    """T01, T02: whatever the route, also in a long prefill."""

    async def silent(_: Got) -> None:
        await asyncio.sleep(30)

    worker = RawWorker(silent)
    async with in_front_of(worker) as live:
        body = json.dumps({**BODY, "input": "x", "stream": streams}).encode()
        _, writer = await raw(live, post(path, body, "host: x", "content-type: application/json"))
        await until(lambda: bool(worker.got), within_s=10.0)
        writer.close()
        await until(lambda: worker.gone == 1 and not live.service.held, within_s=10.0)


async def test_events_pass_when_they_come_and_not_when_the_answer_ends() -> None:
    """T16: a worker that goes on only after the client has seen the last event."""
    go_on = asyncio.Event()

    async def one_by_one(request: Got) -> None:
        request.writer.write(events_head())
        for _ in range(3):
            request.writer.write(chunk(TOKEN))
            await request.writer.drain()
            await asyncio.wait_for(go_on.wait(), 20)
            go_on.clear()
        request.writer.write(chunk(DONE) + chunk(b""))

    async with in_front_of(RawWorker(one_by_one)) as live:
        url = f"{live.url}/v1/completions"
        async with live.client.stream("POST", url, json={**BODY, "stream": True}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            assert response.headers["x-accel-buffering"] == "no"
            seen = b""
            async for part in response.aiter_raw():
                seen += part
                if part == TOKEN:
                    go_on.set()
            assert seen == 3 * TOKEN + DONE


async def test_a_rewritten_request_and_a_longer_error_arrive_whole() -> None:
    """T17: no stale length after an alias has changed the body, in either direction."""
    message = json.dumps({"error": {"message": "n" * 9000, "code": 400}}).encode()

    async def refuse(request: Got) -> None:
        request.writer.write(whole(400, message))

    worker = RawWorker(refuse)
    edge = EdgeConfig(model_aliases={"a-much-longer-name-than-the-served-one": "m"})
    async with in_front_of(worker, edge=edge) as live:
        body = {**BODY, "model": "a-much-longer-name-than-the-served-one"}
        response = await live.client.post(f"{live.url}/v1/completions", json=body)
        assert (response.status_code, response.content) == (400, message)
        assert json.loads(worker.got[0].body) == {**BODY, "model": "m"}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/score"]
)
async def test_fields_nobody_knows_arrive_byte_for_byte(path: str) -> None:
    """T23: unknown and nested fields, big numbers, escapes, repeated keys."""
    text = (
        b'{"model":"m","chat_template_kwargs":{"a":[1,{"b":null}]},"guided_json":{"x":"\\u00e9\\ud83d'
        b'\\ude00"},"big":123456789012345678901234567890,"inf":1e400,"return_token_ids":true,'
        b'"n":1,"n":1,"\\u0061":"\xc3\xa9"  }'
    )
    worker = RawWorker(echo)
    async with in_front_of(worker) as live:
        response = await live.client.post(
            f"{live.url}{path}", content=text, headers={"content-type": "application/json"}
        )
        assert response.status_code == 200
        assert (worker.got[0].body, response.content) == (text, text)


async def test_usage_is_neither_asked_for_nor_taken_away() -> None:
    """T24, T25: the client's own stream_options, and every detail of the usage that comes."""
    usage = (
        b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10,'
        b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    )

    async def stream(request: Got) -> None:
        wants = b"include_usage" in request.body
        events = [TOKEN, usage, DONE] if wants else [TOKEN, DONE]
        request.writer.write(events_head() + b"".join(map(chunk, events)) + chunk(b""))

    worker = RawWorker(stream)
    async with in_front_of(worker) as live:
        url = f"{live.url}/v1/completions"
        without = await live.client.post(url, json={**BODY, "stream": True})
        assert without.content == TOKEN + DONE
        assert b"stream_options" not in worker.got[0].body
        options = {"include_usage": True, "continuous_usage_stats": True}
        with_usage = await live.client.post(
            url, json={**BODY, "stream": True, "stream_options": options}
        )
        assert with_usage.content == TOKEN + usage + DONE


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_pass_or_get_a_413_and_hold_up_nobody(chunked: bool) -> None:
    """T26."""

    async def count(request: Got) -> None:
        request.writer.write(whole(200, str(len(request.body)).encode()))

    async with in_front_of(RawWorker(count), edge=EdgeConfig(body_bytes_max=9_000_000)) as live:

        async def send(size: int, go_on: asyncio.Event | None = None) -> httpx.Response:
            body = b'{"model":"m","input":"' + b"x" * size + b'"}'

            async def parts() -> AsyncIterator[bytes]:
                for start in range(0, len(body), 1 << 16):
                    yield body[start : start + (1 << 16)]
                    if go_on is not None:
                        await go_on.wait()

            length = {} if chunked else {"content-length": str(len(body))}
            return await live.client.post(
                f"{live.url}/v1/embeddings",
                content=parts(),
                headers={"content-type": "application/json"} | length,
            )

        # The rest of the large body is sent only when small requests have been answered.
        go_on = asyncio.Event()
        big = asyncio.create_task(send(8_000_000, go_on))
        await until(lambda: live.service.inside.bytes.held > 0, within_s=20.0)
        small = await send(10)
        assert (small.status_code, small.text) == (200, "34")
        assert (await live.client.get(f"{live.url}/health")).status_code == 200
        assert not big.done()
        go_on.set()
        assert (await big).text == str(8_000_000 + 24)
        # A server that answers early may close before a client has sent everything.
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            refused = await send(10_000_000)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("status", "body", "media"),
    [(502, b"<html>bad</html>", "text/html"), (500, b"", "text/plain"), (400, b"no", "text/plain")],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/new"])
async def test_errors_that_are_no_json_pass_as_they_are(
    status: int, body: bytes, media: str, path: str
) -> None:
    """T28."""

    async def fail(request: Got) -> None:
        request.writer.write(whole(status, body, media))

    async with in_front_of(RawWorker(fail), forward=ForwardConfig(failures_to_suspect=99)) as live:
        response = await live.client.post(f"{live.url}{path}", json={**BODY, "input": "x"})
        assert (response.status_code, response.content) == (status, body)
        assert response.headers["content-type"] == media


@pytest.mark.parametrize(
    ("path", "first", "named"),
    [
        ("/v1/completions", TOKEN, b""),
        (
            "/v1/responses",
            b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n',
            b"event: error\n",
        ),
        (
            "/v1/messages",
            b'event: content_block_delta\ndata: {"delta":{"text":"x"}}\n\n',
            b"event: error\n",
        ),
    ],
)
@pytest.mark.parametrize("clean", [False, True])
async def test_a_stream_that_dies_never_looks_complete(
    path: str, first: bytes, named: bytes, clean: bool
) -> None:
    """T30, T43: reset in the middle, or ended in order but without its end; nothing is appended."""

    async def die(request: Got) -> None:
        request.writer.write(events_head() + chunk(first))
        await request.writer.drain()
        if clean:
            request.writer.write(chunk(b""))
        else:
            request.writer.transport.abort()

    workers = [RawWorker(die), RawWorker(die)]
    async with in_front_of(*workers) as live:
        body = {**BODY, "messages": [], "input": "x", "stream": True}
        response = await live.client.post(f"{live.url}{path}", json=body)
        rest = response.content.removeprefix(first)
        assert rest.startswith(named + b"data: {")
        assert json.loads(rest.removeprefix(named).removeprefix(b"data: "))["error"]
        assert b"[DONE]" not in response.content
        assert response.content.count(first) == 1
        assert sum(len(worker.got) for worker in workers) == 1
        assert ends(live.service.queue.stats()) == {"failed": 1}


@pytest.mark.parametrize(
    ("path", "events", "tokens"),
    [
        (
            "/v1/responses",
            b'event: response.created\ndata: {"response":{"id":"resp_1"}}\n\n'
            b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n'
            b'event: response.output_text.delta\ndata: {"delta":"b"}\n\n'
            b'event: response.completed\ndata: {"response":{"usage":{"output_tokens":5}}}\n\n',
            5,
        ),
        (
            "/v1/messages",
            b'event: message_start\ndata: {"message":{"usage":{"output_tokens":0}}}\n\n'
            b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\n'
            b'event: message_delta\ndata: {"delta":{},"usage":{"output_tokens":3}}\n\n'
            b"event: message_stop\ndata: {}\n\n",
            3,
        ),
    ],
)
async def test_streams_with_named_events_pass_whole_and_are_counted(
    path: str, events: bytes, tokens: int
) -> None:
    """T107: as served by vLLM, without [DONE]."""

    async def stream(request: Got) -> None:
        request.writer.write(events_head() + chunk(events) + chunk(b""))

    with capture_logs() as lines:
        async with in_front_of(RawWorker(stream)) as live:
            body = {"model": "m", "messages": [], "input": "x", "max_tokens": 9, "stream": True}
            response = await live.client.post(f"{live.url}{path}", json=body)
            assert response.content == events
            assert ends(live.service.queue.stats()) == {"completed": 1}
    told = [line["decode_tokens"] for line in lines if line["event"] == "request"]
    assert told == [tokens]


async def test_small_questions_do_not_meet_a_dead_worker() -> None:
    """T52, T94: models, version and unknown GETs answer while one worker is bad."""
    bad = RawWorker(echo, models=500)
    good = RawWorker(echo, models=["m", "lora-a"])
    async with in_front_of(bad, good) as live:
        listed = (await live.client.get(f"{live.url}/v1/models")).json()
        assert listed["object"] == "list"
        assert sorted(card["id"] for card in listed["data"]) == ["lora-a", "m"]
        one = await live.client.get(f"{live.url}/v1/models/lora-a")
        assert (one.status_code, one.json()["id"]) == (200, "lora-a")
        assert (await live.client.get(f"{live.url}/v1/models/none")).status_code == 404
        for path in ("/version", "/load", "/livez", "/readyz"):
            assert (await live.client.get(f"{live.url}{path}")).status_code == 200
        assert (await live.client.head(f"{live.url}/health")).status_code == 200


async def test_an_adapter_is_asked_for_where_it_is_loaded() -> None:
    """T95."""
    plain, adapted = RawWorker(echo, models=["m"]), RawWorker(echo, models=["m", "lora-a"])
    async with in_front_of(plain, adapted) as live:
        for path in ("/v1/completions", "/v1/embeddings"):
            for _ in range(10):
                body = {**BODY, "model": "lora-a", "input": "x"}
                response = await live.client.post(f"{live.url}{path}", json=body)
                assert response.status_code == 200
        assert (len(plain.got), len(adapted.got)) == (0, 20)


async def test_a_light_request_that_dies_at_its_worker_is_not_sent_again() -> None:
    """T41: nothing that a worker may have begun runs twice."""

    async def die(request: Got) -> None:
        request.writer.transport.abort()

    workers = [RawWorker(die), RawWorker(die)]
    async with in_front_of(*workers) as live:
        response = await live.client.post(f"{live.url}/v1/embeddings", json={"model": "m"})
        assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_broke")
        assert sum(len(worker.got) for worker in workers) == 1


async def test_no_age_of_a_connection_cuts_a_stream_that_goes_on() -> None:
    """T55: a stream that outlives every time for which idle connections are kept."""

    async def slowly(request: Got) -> None:
        request.writer.write(events_head())
        for _ in range(6):
            request.writer.write(chunk(TOKEN))
            await request.writer.drain()
            await asyncio.sleep(0.1)
        request.writer.write(chunk(DONE) + chunk(b""))

    async with in_front_of(RawWorker(slowly), forward=ForwardConfig(keepalive_s=0.05)) as live:
        response = await live.client.post(
            f"{live.url}/v1/completions", json={**BODY, "stream": True}
        )
        assert response.content == 6 * TOKEN + DONE


async def test_dropped_clients_leave_no_connection_behind() -> None:
    """T07: streams whose clients all leave at once."""

    async def forever(request: Got) -> None:
        request.writer.write(events_head() + chunk(TOKEN))
        await request.writer.drain()
        await asyncio.sleep(60)

    worker = RawWorker(forever)
    async with in_front_of(worker) as live:
        body = json.dumps({**BODY, "stream": True}).encode()
        request = post("/v1/completions", body, "host: x", "content-type: application/json")
        clients = [await raw(live, request) for _ in range(100)]
        await until(lambda: len(worker.got) == 100, within_s=20.0)
        for reader, writer in clients:
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
        await until(lambda: worker.gone == 100 and not live.service.held, within_s=20.0)
        assert ends(live.service.queue.stats()) == {"cancelled": 100}
