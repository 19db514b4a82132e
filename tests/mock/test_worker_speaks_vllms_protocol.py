"""Bodies and streams of the mock worker."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.mock.mock_client import events_of, in_process, over_http

PROMPT = {"model": "mock", "prompt": [5, 6, 7], "temperature": 0}


async def test_a_stream_has_one_event_a_token_then_usage_then_done() -> None:
    async with over_http() as (client, _):
        body = {
            **PROMPT,
            "max_tokens": 5,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        response = await client.post("/v1/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *tokens, last = events_of(response.content)
        assert len(tokens) == 5
        assert [event["choices"][0]["finish_reason"] for event in tokens] == [None] * 4 + ["length"]
        assert all(event["object"] == "text_completion" for event in tokens)
        assert len({event["id"] for event in (*tokens, last)}) == 1
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] == 3
        assert last["usage"]["completion_tokens"] == 5
        assert last["usage"]["total_tokens"] == 8
        whole = await client.post(
            "/v1/completions", json={**PROMPT, "max_tokens": 5, "ignore_eos": True}
        )
        said = "".join(event["choices"][0]["text"] for event in tokens)
        assert whole.json()["choices"][0]["text"] == said
        assert whole.json()["usage"] == last["usage"]


async def test_a_chat_stream_begins_with_the_speaker() -> None:
    async with over_http() as (client, _):
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_completion_tokens": 3,
            "ignore_eos": True,
            "stream": True,
        }
        response = await client.post("/v1/chat/completions", json=body)
        first, *tokens = events_of(response.content)
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len(tokens) == 3
        assert all(set(event["choices"][0]["delta"]) == {"content"} for event in tokens)
        assert "usage" not in tokens[-1]


async def test_running_usage_counts_every_token() -> None:
    async with in_process() as (client, _):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {
            "prompt": "some text",
            "max_tokens": 4,
            "ignore_eos": True,
            "n": 2,
            "stream": True,
            "stream_options": options,
        }
        response = await client.post("/v1/completions", json=body)
        *tokens, last = events_of(response.content)
        assert [event["usage"]["completion_tokens"] for event in tokens] == list(range(1, 9))
        assert last["usage"]["completion_tokens"] == 8


async def test_choices_are_n_for_each_prompt_and_prompts_count_once() -> None:
    async with in_process() as (client, _):
        body = {"prompt": [[1, 2], [3, 4, 5]], "n": 3, "max_tokens": 2, "ignore_eos": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 12
        assert len({choice["text"] for choice in answer["choices"]}) > 1


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({}, None, None),
        ({"mock_decode_tokens": 7, "max_tokens": 50}, 7, "stop"),
        ({"mock_decode_tokens": 7, "max_tokens": 50, "ignore_eos": True}, 7, "stop"),
        ({"mock_decode_tokens": 40}, 40, "stop"),
        ({"mock_decode_tokens": 50, "max_tokens": 7}, 7, "length"),
        ({"ignore_eos": True, "max_tokens": 9}, 9, "length"),
        ({"ignore_eos": True}, 16, "length"),
    ],
)
async def test_the_outputs_length_is_told_or_the_limit(
    fields: dict[str, Any], tokens: int | None, reason: str | None
) -> None:
    async with in_process() as (client, _):
        answer = (await client.post("/v1/completions", json={**PROMPT, **fields})).json()
        assert answer["usage"]["completion_tokens"] <= (tokens or 16)
        if tokens is not None:
            assert answer["usage"]["completion_tokens"] == tokens
            assert answer["choices"][0]["finish_reason"] == reason


async def test_request_ids_come_from_the_header_then_from_the_body() -> None:
    async with in_process(request_id_headers=True) as (client, _):
        body = {**PROMPT, "request_id": "from-body"}
        named = await client.post("/v1/completions", json=body)
        assert named.json()["id"] == "cmpl-from-body"
        assert named.headers["x-request-id"] == "from-body"
        headers = {"x-request-id": "from-header"}
        named = await client.post("/v1/completions", json=body, headers=headers)
        assert named.json()["id"] == "cmpl-from-header"
        assert named.headers["x-request-id"] == "from-header"
    async with in_process() as (client, _):
        assert "x-request-id" not in (await client.post("/v1/completions", json=PROMPT)).headers


async def test_two_requests_of_one_id_are_both_served() -> None:
    async with in_process() as (client, _):
        headers = {"x-request-id": "same"}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=PROMPT, headers=headers) for _ in range(2))
        )
        assert [answer.json()["id"] for answer in answers] == ["cmpl-same"] * 2


async def test_the_small_routes_answer_as_vllms() -> None:
    async with in_process(model="m", context_tokens=2048) as (client, _):
        card = (await client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["object"], card["max_model_len"]) == ("m", "model", 2048)
        health = await client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
        assert (await client.get("/version")).json() == {"version": "0.32.0"}
        assert (await client.get("/load")).json() == {"server_load": 0}
        for method, path, status, detail in (
            ("GET", "/nothing", 404, "Not Found"),
            ("GET", "/v1/completions", 405, "Method Not Allowed"),
            ("GET", "/server_info", 404, "Not Found"),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()) == (status, {"detail": detail})


REFUSED: dict[str, tuple[str, Any, int, str, str | None]] = {
    "bad JSON": ("completions", b"{", 400, "Bad Request", None),
    "an empty body": ("completions", b"", 400, "Bad Request", None),
    "not an object": ("completions", b"[1]", 400, "Bad Request", None),
    "no prompt": ("completions", {}, 400, "Bad Request", None),
    "a wrong type": ("completions", {"max_tokens": "x"}, 400, "Bad Request", None),
    "no messages": ("chat/completions", {"messages": []}, 400, "Bad Request", None),
    "an empty prompt": ("completions", {"prompt": []}, 400, "BadRequestError", "prompt"),
    "one empty prompt": ("completions", {"prompt": [[1], []]}, 400, "BadRequestError", "prompt"),
    "a negative token": ("completions", {"prompt": [-1]}, 400, "Bad Request", None),
    "another model": ("completions", {"model": "nope"}, 404, "NotFoundError", "model"),
    "a prompt too long": (
        "completions",
        {"prompt": [1] * 101, "stream": True},
        400,
        "BadRequestError",
        "input_tokens",
    ),
    "a prompt that fills the context": (
        "completions",
        {"prompt": [1] * 100},
        400,
        "BadRequestError",
        "max_tokens",
    ),
    "max_tokens of 0": ("completions", {"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    "max_tokens of -1": ("completions", {"max_tokens": -1}, 400, "BadRequestError", "max_tokens"),
    "max_tokens too large": (
        "completions",
        {"max_tokens": 101},
        400,
        "BadRequestError",
        "max_tokens",
    ),
    "n of 0": ("completions", {"n": 0}, 400, "BadRequestError", "n"),
    "too many choices": (
        "completions",
        {"prompt": [[1]] * 600, "n": 2},
        400,
        "BadRequestError",
        "n",
    ),
    "greedy n": ("completions", {"n": 3, "temperature": 0}, 400, "BadRequestError", "n"),
    "a negative temperature": (
        "completions",
        {"temperature": -1},
        400,
        "BadRequestError",
        "temperature",
    ),
    "stream_options alone": (
        "completions",
        {"stream_options": {"include_usage": True}},
        400,
        "BadRequestError",
        "stream_options",
    ),
}


@pytest.mark.parametrize(
    ("route", "body", "status", "kind", "param"), REFUSED.values(), ids=REFUSED.keys()
)
async def test_what_vllm_refuses_is_refused_in_its_words(
    route: str, body: Any, status: int, kind: str, param: str | None
) -> None:
    async with in_process(context_tokens=100) as (client, server):
        if isinstance(body, dict) and route == "completions" and body:
            body = {"prompt": [1, 2], **body}
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"content-type": "application/json"}
        answer = await client.post(f"/v1/{route}", content=content, headers=headers)
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == status
        assert (error["type"], error["param"]) == (kind, param)
        assert error["message"]
        assert server.engine.series.stats.iterations_total == 0


async def test_other_media_types_and_ranks_are_refused() -> None:
    async with in_process() as (client, _):
        answer = await client.post(
            "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}
        )
        assert answer.status_code == 400
        assert "Unsupported Media Type" in answer.json()["error"]["message"]
        for rank, status in (("0", 200), ("abc", 200), ("1", 400), ("-1", 400)):
            headers = {"x-data-parallel-rank": rank}
            answer = await client.post("/v1/completions", json=PROMPT, headers=headers)
            assert answer.status_code == status, rank


async def test_requests_go_to_the_rank_they_name_and_else_where_there_is_least() -> None:
    async with in_process(data_parallel_size=2) as (client, server):

        def finished() -> list[int]:
            return [engine.series.stats.finished_total for engine in server.engines]

        async def ask(rank: str | None) -> int:
            headers = {} if rank is None else {"x-data-parallel-rank": rank}
            return (await client.post("/v1/completions", json=body, headers=headers)).status_code

        body = {**PROMPT, "max_tokens": 5, "ignore_eos": True}
        assert await asyncio.gather(*(ask("1") for _ in range(4))) == [200] * 4
        assert finished() == [0, 4]
        assert await asyncio.gather(*(ask(None) for _ in range(4))) == [200] * 4
        assert finished() == [2, 6]
        assert await ask("2") == 400
        assert finished() == [2, 6]


async def test_every_rank_has_its_own_series_on_one_page() -> None:
    async with in_process(data_parallel_size=2, data_parallel_start_rank=2) as (client, server):
        body = {**PROMPT, "max_tokens": 5, "ignore_eos": True}
        await client.post("/v1/completions", json=body, headers={"x-data-parallel-rank": "1"})
        page = (await client.get("/metrics")).text
        for wanted in (
            'vllm:generation_tokens_total{engine="2",model_name="mock"} 0.0',
            'vllm:generation_tokens_total{engine="3",model_name="mock"} 5.0',
            'vllm:num_requests_running{engine="2",model_name="mock"} 0.0',
            'engine="3",kv_cache_max_concurrency',
        ):
            assert wanted in page
        assert page.count("# TYPE vllm:num_requests_running gauge") == 1
        assert page.count("\nprocess_start_time_seconds ") == 1
        assert server.engines[1].series.stats.generation_tokens_total == 5
        filtered = await client.get("/metrics/", params={"name[]": "vllm:num_requests_running"})
        assert filtered.text.count("vllm:num_requests_running{") == 2


async def test_what_fits_only_in_part_is_cut_and_what_is_unknown_is_ignored() -> None:
    async with in_process(context_tokens=100) as (client, _):
        body = {"prompt": [1] * 98, "max_tokens": 100, "ignore_eos": True, "kv_transfer_params": {}}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_full_queue_refuses_with_503_and_inside_a_stream_with_200() -> None:
    async with over_http(batch_limit=1, queue_max=1, time_scale=1.0) as (client, _):
        long = {**PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with (
            client.stream("POST", "/v1/completions", json=long) as running,
            client.stream("POST", "/v1/completions", json=long),
        ):
            tokens = running.aiter_raw()
            await anext(tokens)
            async with client.stream("POST", "/v1/completions", json=long) as refused:
                assert refused.status_code == 200
                (event,) = events_of(await refused.aread())
                assert event["error"]["code"] == 503
            whole = await client.post("/v1/completions", json={**long, "stream": False})
            assert whole.status_code == 503
            assert whole.json()["error"]["type"] == "Service Unavailable"


async def test_when_the_engine_dies_streams_end_with_an_error_and_done() -> None:
    async with over_http(time_scale=1.0) as (client, server):
        long = {**PROMPT, "max_tokens": 2000, "ignore_eos": True}
        whole = asyncio.create_task(client.post("/v1/completions", json=long))
        async with client.stream("POST", "/v1/completions", json={**long, "stream": True}) as reply:
            chunks = reply.aiter_raw()
            body = await anext(chunks)
            server.engine.stop()
            body += b"".join([chunk async for chunk in chunks])
        assert events_of(body)[-1]["error"]["code"] == 500
        assert (await whole).status_code == 500
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json=long)).status_code == 500
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_lengths_that_nobody_fixed_repeat_with_the_seed() -> None:
    async def lengths(seed: int, fields: dict[str, Any]) -> list[int]:
        async with in_process(seed=seed, decode_tokens_mean=20.0) as (client, _):
            body = {"prompt": "tell me", "max_tokens": 60, **fields}
            answers = [await client.post("/v1/completions", json=body) for _ in range(6)]
            return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    drawn = await lengths(1, {})
    assert drawn == await lengths(1, {})
    assert drawn != await lengths(2, {})
    assert len(set(drawn)) > 1
    assert max(drawn) <= 60
    assert len(set(await lengths(1, {"temperature": 0}))) == 1


async def test_the_server_survives_a_body_cut_short_by_its_client() -> None:
    async with over_http() as (client, server):
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200
        assert server.engine.series.stats.finished_total == 1
