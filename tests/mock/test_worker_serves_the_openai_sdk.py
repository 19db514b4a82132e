"""The official SDK as a client of the mock worker."""

from __future__ import annotations

import openai
import pytest

from tests.mock.mock_client import over_http


def sdk(base_url: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


async def test_completions_streamed_and_whole() -> None:
    async with over_http() as (client, _), sdk(client.base_url) as api:
        length = {"ignore_eos": True}
        whole = await api.completions.create(
            model="mock", prompt=[1, 2, 3], max_tokens=6, extra_body=length
        )
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 6)
        assert whole.choices[0].finish_reason == "length"
        stream = await api.completions.create(
            model="mock",
            prompt=[1, 2, 3],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=length,
        )
        parts = [part async for part in stream]
        said = "".join(part.choices[0].text for part in parts if part.choices)
        assert said == whole.choices[0].text
        assert parts[-1].usage == whole.usage


async def test_chats_streamed_and_whole() -> None:
    async with over_http() as (client, _), sdk(client.base_url) as api:
        ask = {
            "model": "mock",
            "messages": [{"role": "user", "content": "How long is a queue?"}],
            "seed": 7,
        }
        length = {"mock_decode_tokens": 5}
        whole = await api.chat.completions.create(**ask, extra_body=length)
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        stream = await api.chat.completions.create(**ask, stream=True, extra_body=length)
        parts = [part async for part in stream]
        assert parts[0].choices[0].delta.role == "assistant"
        said = "".join(part.choices[0].delta.content or "" for part in parts)
        assert said == whole.choices[0].message.content
        assert parts[-1].choices[0].finish_reason == "stop"


async def test_models_and_refusals() -> None:
    async with over_http() as (client, _), sdk(client.base_url) as api:
        listed = await api.models.list()
        assert [model.id for model in listed.data] == ["mock"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await api.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await api.completions.create(model="mock", prompt="x", max_tokens=-1)
