"""Real HTTP on both sides: the openai SDK, mock workers, clients that leave, workers that die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import openai
import orjson
import pytest

from service.explain import ExplainError, explain_service
from service.listener import listen
from service.mock.serving import MockHttpServer
from service.settings import MockConfig
from tests.service.live import Live, mock, serving, serving_mocks, until
from tests.service.stage import ends


def sdk(live: Live) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


MESSAGES = [{"role": "user", "content": "hello"}]


async def test_the_openai_sdk_works_streaming_and_not() -> None:
    async with serving_mocks([mock(), mock()]) as live, sdk(live) as client:
        chat = await client.chat.completions.create(
            model="mock", messages=MESSAGES, max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        assert chat.choices[0].finish_reason == "length"
        stream = await client.chat.completions.create(
            model="mock",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons[-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5
        text = await client.completions.create(
            model="mock", prompt=["a", "b"], max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert len(text.choices) == 2
        assert text.usage is not None
        assert text.usage.completion_tokens == 6
        stats = live.service.queue.stats()
        assert ends(stats) == {"completed": 3}


async def test_the_sdk_raises_its_own_errors_for_ours() -> None:
    async with serving_mocks([mock()]) as live, sdk(live) as client:
        with pytest.raises(openai.NotFoundError, match="nope"):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="mock", prompt="x", max_tokens=-1)


async def test_models_are_the_union_and_the_page_and_explain_answer() -> None:
    async with serving_mocks([mock(), mock(model="other")]) as live:
        models = (await live.client.get(f"{live.url}/v1/models")).json()
        assert models["object"] == "list"
        assert sorted(card["id"] for card in models["data"]) == ["mock", "other"]
        assert (await live.client.get(f"{live.url}/ready")).status_code == 200
        assert "version" in (await live.client.get(f"{live.url}/version")).json()
        page = (await live.client.get(f"{live.url}/metrics")).text
        assert 'bidgate_shadow_price{resource="kv"' in page
        words = await asyncio.to_thread(explain_service, live.url)
        assert "0 requests run, 0 wait" in words
        with pytest.raises(ExplainError, match=r"answers 404 Not Found; is that bidgate\?"):
            await asyncio.to_thread(explain_service, f"{live.url}/elsewhere")


async def test_what_bidgate_does_not_have_says_why_in_a_header() -> None:
    async with serving_mocks([mock()]) as live:
        for method, path, reason in (
            ("GET", "/v1/models/nope", "model_not_found"),
            ("GET", "/nowhere", "not_found_error"),
            ("POST", "/version", "method_not_allowed"),
        ):
            response = await live.client.request(method, f"{live.url}{path}")
            assert response.headers["x-bidgate-reason"] == reason
            assert (response.json()["error"]["code"] or "not_found_error") == reason
        unknown = await live.client.get(f"{live.url}/v1/models/nope")
        assert unknown.json()["error"]["message"].endswith("'nope'; served: mock")


async def test_a_model_goes_to_the_worker_that_serves_it() -> None:
    async with serving_mocks([mock(), mock(model="other")]) as live:
        for _ in range(5):
            body = {"model": "other", "prompt": "x", "max_tokens": 1}
            response = await live.client.post(f"{live.url}/v1/completions", json=body)
            assert response.status_code == 200
            assert response.json()["model"] == "other"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_disconnects_frees_its_slot_at_the_worker_within_a_second(
    streams: bool,
) -> None:
    async with serving_mocks([mock()]) as live:
        body = {"model": "mock", "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        body["stream"] = streams
        request = live.client.stream("POST", f"{live.url}/v1/completions", json=body)
        reading = asyncio.create_task(_read(request))

        async def runs() -> bool:
            return await live.running() == 1

        async def is_free() -> bool:
            return await live.running() == 0 and not live.service.queue.held

        await until(runs, within_s=5.0)
        reading.cancel()
        await asyncio.wait([reading])
        await until(is_free, within_s=1.0)
        assert ends(live.service.queue.stats()) == {"cancelled": 1}


async def _read(request: object) -> None:
    async with request as response:  # type: ignore[attr-defined]
        async for _ in response.aiter_raw():
            pass


async def test_the_workers_own_queues_stay_empty_and_no_batch_overflows() -> None:
    servers = [mock(batch_limit=4), mock(batch_limit=4)]
    async with serving_mocks(servers, batch_limit=4) as live:
        body = {"model": "mock", "prompt": "x", "max_tokens": 10, "ignore_eos": True}
        posts = [
            asyncio.create_task(live.client.post(f"{live.url}/v1/completions", json=body))
            for _ in range(60)
        ]
        waited, most = 0.0, 0.0
        while not all(post.done() for post in posts):
            for worker in live.workers:
                waited = max(waited, await live.gauge(worker, "num_requests_waiting"))
                most = max(most, await live.gauge(worker, "num_requests_running"))
        assert {post.result().status_code for post in posts} == {200}
        assert most == 4
        # A request may be between its arrival and the next iteration; none waits for a slot.
        assert waited <= 4
        stats = live.service.queue.stats()
        assert ends(stats) == {"completed": 60}


async def test_many_streams_at_once_arrive_whole_and_in_order() -> None:
    async with serving_mocks([mock(batch_limit=64)], batch_limit=64) as live:

        async def one(number: int) -> tuple[int, int]:
            tokens = 5 + number
            body = {"model": "mock", "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            response = await live.client.post(f"{live.url}/v1/completions", json=body)
            *events, done, _ = response.content.split(b"\n\n")
            assert done == b"data: [DONE]"
            messages = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
            return tokens, messages[-1]["usage"]["completion_tokens"]

        for asked, got in await asyncio.gather(*(one(number) for number in range(60))):
            assert asked == got


async def test_a_worker_that_dies_is_left_alone() -> None:
    body = {"model": "mock", "prompt": "x", "max_tokens": 2, "ignore_eos": True}
    frail = mock()
    async with serving_mocks([mock(), frail]) as live:
        frail.engine.stop()
        await until(lambda: live.usable() == 1, within_s=5.0)
        for _ in range(5):
            response = await live.client.post(f"{live.url}/v1/completions", json=body)
            assert response.status_code == 200


async def test_a_worker_that_comes_late_is_taken_in_by_itself() -> None:
    body = {"model": "mock", "prompt": "x", "max_tokens": 1}
    with listen("127.0.0.1", 0) as reserved:
        host, port = reserved.getsockname()
    async with serving([f"http://{host}:{port}"], wait=False) as live:
        early = await live.client.get(f"{live.url}/ready")
        assert (early.status_code, early.json()["why"]) == (503, "no worker is up")
        waiting = asyncio.create_task(live.client.post(f"{live.url}/v1/completions", json=body))
        await asyncio.sleep(0.1)
        server = MockHttpServer(mock(), host=host, port=port, log_level=None)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        serving_late = asyncio.create_task(server.serve())
        # The request that came while nobody was there is held, and served.
        assert (await waiting).status_code == 200
        server.stop()
        await serving_late


async def test_draining_answers_503_and_lets_streams_and_the_queue_finish() -> None:
    async with serving_mocks([mock(batch_limit=2)], batch_limit=2) as live:
        body = {"model": "mock", "prompt": "x", "max_tokens": 40, "ignore_eos": True}
        posts = [
            asyncio.create_task(live.client.post(f"{live.url}/v1/completions", json=body))
            for _ in range(5)
        ]

        async def not_ready() -> bool:
            return (await live.client.get(f"{live.url}/ready")).status_code == 503

        await until(lambda: live.service.queue.held == 5, within_s=5.0)
        live.server.handle_exit(15, None)
        await until(not_ready, within_s=1.0)
        late = await live.client.post(f"{live.url}/v1/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert {(await post).status_code for post in posts} == {200}
        assert ends(live.service.queue.stats()) == {"completed": 5}


async def test_embedded_mock_workers_serve() -> None:
    async with serving((), mock=MockConfig(workers=2, time_scale=20.0)) as live:
        await until(lambda: live.usable() == 2, within_s=10.0)
        body = {"model": "mock", "prompt": "x", "max_tokens": 2}
        response = await live.client.post(f"{live.url}/v1/completions", json=body)
        assert response.status_code == 200
        assert response.headers["x-bidgate-worker"].startswith("mock-")


async def test_a_large_body_does_not_hold_up_the_small_ones() -> None:
    """The end of the large body is sent when the small requests that came after have ended."""
    small = {"model": "mock", "prompt": "x", "max_tokens": 2, "ignore_eos": True}
    text = orjson.dumps({"model": "mock", "prompt": "x" * 8_000_000, "max_tokens": 1})
    ended = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield text[:-1]
        await ended.wait()
        yield text[-1:]

    async with serving_mocks([mock()]) as live:
        url, headers = f"{live.url}/v1/completions", {"content-type": "application/json"}
        big = asyncio.create_task(live.client.post(url, content=parts(), headers=headers))
        await until(lambda: live.service.inside.bytes.held == len(text) - 1, within_s=20.0)
        for _ in range(3):
            assert (await live.client.post(url, json=small)).status_code == 200
        assert (await live.client.get(f"{live.url}/health")).status_code == 200
        assert not big.done()
        ended.set()
        # 2,000,000 tokens fit no worker: refused here, the engine never sees it.
        assert (await big).status_code == 400
        assert ends(live.service.queue.stats()) == {"completed": 3, "too_large": 1}


async def test_a_raw_client_is_answered_and_keeps_its_connection() -> None:
    async with serving_mocks([mock()]) as live:
        port = int(live.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            body = b'{"model":"mock","prompt":"x","max_tokens":1}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert orjson.loads(await reader.readexactly(length))["choices"]
        writer.close()
        await writer.wait_closed()


async def test_httpx_sees_the_headers_of_both() -> None:
    async with serving_mocks([mock()]) as live:
        body = {"model": "mock", "prompt": "x", "max_tokens": 1}
        response = await live.client.post(
            f"{live.url}/v1/completions", json=body, headers={"x-request-id": "abc"}
        )
        assert response.headers["x-request-id"] == "abc"
        assert response.headers["content-type"] == "application/json"
        assert response.json()["id"] == "cmpl-abc"
        assert isinstance(response, httpx.Response)
