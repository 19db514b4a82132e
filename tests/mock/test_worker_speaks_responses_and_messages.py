"""Responses and messages of the mock worker, as their client libraries read them."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest

from tests.mock.mock_client import in_process, over_http

LENGTH: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


def named_events(body: bytes) -> list[Any]:
    """Messages of a stream whose events have their type as a name."""
    events = []
    for event in body.strip().split(b"\n\n"):
        name, data = event.split(b"\n")
        events.append(orjson.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {events[-1]['type']}"
    return events


async def test_a_client_library_reads_a_response_whole_and_streamed() -> None:
    async with over_http() as (client, _):
        sdk = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        async with sdk:
            asked: dict[str, Any] = {"model": "mock", "input": "hello", "max_output_tokens": 6}
            whole = await sdk.responses.create(**asked, **LENGTH)
            assert whole.usage is not None
            assert (whole.usage.output_tokens, whole.status) == (6, "incomplete")
            assert len(whole.output_text.split()) == 6
            streamed = await sdk.responses.create(**asked, stream=True, **LENGTH)
            events = [event async for event in streamed]
            said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert said == whole.output_text
            assert events[0].type == "response.created"
            last = events[-1]
            assert last.type == "response.completed"
            assert last.response.output_text == said
            assert [event.sequence_number for event in events] == list(range(len(events)))
            shown = await sdk.responses.retrieve(last.response.id)
            assert shown.output_text == said


async def test_what_is_stored_can_be_shown_and_continued_and_not_deleted() -> None:
    async with in_process() as (client, _):
        body = {"input": "hello", "max_output_tokens": 4, "ignore_eos": True}
        first = (await client.post("/v1/responses", json=body)).json()
        shown = await client.get(f"/v1/responses/{first['id']}")
        assert shown.json() == first
        more = {**body, "previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=more)).json()
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 405
        kept = (await client.post("/v1/responses", json={**body, "store": False})).json()
        for answer in (
            await client.get(f"/v1/responses/{kept['id']}"),
            await client.post("/v1/responses", json={**body, "previous_response_id": "resp_x"}),
        ):
            assert answer.status_code == answer.json()["error"]["code"] == 404


async def test_a_message_is_told_whole_and_as_events_with_names() -> None:
    async with over_http() as (client, _):
        asked = {
            "model": "mock",
            "system": "be brief",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        }
        body = {**asked, "max_tokens": 5, "ignore_eos": True}
        whole = (await client.post("/v1/messages", json=body)).json()
        assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 5)
        streamed = await client.post("/v1/messages", json={**body, "stream": True})
        events = named_events(streamed.content)
        assert [each["type"] for each in events] == [
            *("message_start", "content_block_start"),
            *["content_block_delta"] * 5,
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        said = "".join(each["delta"]["text"] for each in events[2:7])
        assert whole["content"] == [{"type": "text", "text": said}]
        assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        assert events[-2]["usage"] == whole["usage"]
        counted = (await client.post("/v1/messages/count_tokens", json=asked)).json()
        assert counted["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/messages", {"messages": [], "max_tokens": 3}, 400),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, 400),
        ("/v1/messages/count_tokens", {"messages": 3}, 400),
        ("/v1/responses", {"max_output_tokens": 3}, 400),
        ("/v1/responses", {"input": []}, 400),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, 400),
        ("/v1/responses", {"input": "x", "model": "other"}, 404),
    ],
)
async def test_what_vllm_refuses_is_refused_in_the_routes_own_shape(
    path: str, body: dict[str, Any], status: int
) -> None:
    async with in_process() as (client, _):
        answer = await client.post(path, json=body)
        assert answer.status_code == status
        assert answer.json().get("type") == ("error" if "messages" in path else None)
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 2000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2000}),
    ],
)
async def test_a_stream_whose_engine_dies_ends_with_an_error_event(
    path: str, body: dict[str, Any]
) -> None:
    async with over_http(time_scale=1.0) as (client, server):
        long = {**body, "ignore_eos": True, "stream": True}
        async with client.stream("POST", path, json=long) as reply:
            chunks = reply.aiter_raw()
            got = await anext(chunks)
            server.engine.stop()
            got += b"".join([chunk async for chunk in chunks])
        last = got.rstrip().split(b"\n\n")[-1]
        assert last.startswith(b"event: error\ndata: ")
