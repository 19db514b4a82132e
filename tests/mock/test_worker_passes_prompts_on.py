"""Two mock workers as a prefill and a decode worker: what vLLM does with NIXL, traps included."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from service.mock.serving import running_mock_workers
from service.mock.worker import MockServer
from tests.mock.mock_client import events_of, over_http, unit_config

PROMPT = list(range(40))
ASKED = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
KEEP = {"do_remote_decode": True}


@asynccontextmanager
async def pair(**overrides: Any) -> AsyncIterator[tuple[httpx.AsyncClient, ...]]:
    """Clients of a prefill and of a decode worker, both with a connector."""
    config = unit_config(kv_transfer=True, **overrides)
    async with (
        running_mock_workers([MockServer(config), MockServer(config)]) as (first, second),
        httpx.AsyncClient(base_url=first, timeout=30, trust_env=False) as prefill,
        httpx.AsyncClient(base_url=second, timeout=30, trust_env=False) as decode,
    ):
        yield prefill, decode


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=ASKED | fields)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


async def prefilled(client: httpx.AsyncClient) -> dict[str, Any]:
    """The first leg's parameters."""
    answer = await complete(client, max_tokens=1, kv_transfer_params=KEEP)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    page = (await client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def kv_use(client: httpx.AsyncClient) -> float:
    return await gauge(client, "kv_cache_usage_perc")


async def until(told: Callable[[], Awaitable[float]], value: float) -> None:
    """Wait until something has a value."""
    async with asyncio.timeout(20):
        for pause_s in itertools.repeat(0.02):
            if await told() == value:
                return
            await asyncio.sleep(pause_s)


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


async def test_two_legs_say_what_one_worker_says_and_compute_the_prompt_once() -> None:
    async with pair() as (prefill, decode):
        alone = await complete(prefill)
        computed = await gauge(decode, "prompt_tokens_total")
        params = await prefilled(prefill)
        assert params["do_remote_prefill"] is True
        second = await complete(decode, kv_transfer_params=params)
        assert text_of(second) == text_of(alone)
        assert second["usage"] == alone["usage"]
        assert second["kv_transfer_params"] is None
        assert computed == 0


async def test_the_second_leg_may_stream() -> None:
    async with pair() as (prefill, decode):
        params = await prefilled(prefill)
        body = ASKED | {"stream": True, "kv_transfer_params": params}
        response = await decode.post("/v1/completions", json=body)
        said = "".join(event["choices"][0]["text"] for event in events_of(response.content))
        assert said == text_of(await complete(decode))


async def test_chats_are_passed_on_too() -> None:
    async with pair() as (prefill, decode):
        asked = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
        asked |= {"max_tokens": 5, "ignore_eos": True}
        first = asked | {"max_tokens": 1, "kv_transfer_params": KEEP}
        path = "/v1/chat/completions"
        params = (await prefill.post(path, json=first)).json()["kv_transfer_params"]
        second = await decode.post(path, json=asked | {"kv_transfer_params": params})
        alone = await decode.post(path, json=asked)
        assert second.json()["choices"] == alone.json()["choices"]


async def test_memory_is_kept_until_it_is_fetched() -> None:
    async with pair() as (prefill, decode):
        params = await prefilled(prefill)
        assert await gauge(prefill, "num_requests_running") == 0
        assert await kv_use(prefill) > 0
        await complete(decode, kv_transfer_params=params)
        assert await kv_use(prefill) == 0


async def test_memory_nobody_fetches_is_kept_for_the_lease_and_then_the_text_is_wrong() -> None:
    async with pair(kv_lease_s=0.3) as (prefill, decode):
        params = await prefilled(prefill)
        assert await kv_use(prefill) > 0
        await until(lambda: kv_use(prefill), 0)
        late = await complete(decode, kv_transfer_params=params)
        assert text_of(late) != text_of(await complete(decode))


async def test_parameters_used_twice_give_wrong_text_and_no_error() -> None:
    async with pair() as (prefill, decode):
        params = await prefilled(prefill)
        once = await complete(decode, kv_transfer_params=params)
        twice = await complete(decode, kv_transfer_params=params)
        assert text_of(twice) != text_of(once)
        assert twice["usage"] == once["usage"]


async def test_memory_of_an_engine_that_was_restarted_since_costs_a_prefill() -> None:
    async with pair() as (prefill, decode):
        params = await prefilled(prefill)
        lost = params | {"remote_engine_id": "an engine of before"}
        alone = await complete(decode)
        assert text_of(await complete(decode, kv_transfer_params=lost)) == text_of(alone)
        # It was not taken by that.
        assert await kv_use(prefill) > 0


async def test_parameters_of_another_prompt_give_wrong_text() -> None:
    async with pair() as (prefill, decode):
        params = await prefilled(prefill)
        other = {"prompt": [7] * len(PROMPT)}
        wrong = await complete(decode, kv_transfer_params=params, **other)
        assert text_of(wrong) != text_of(await complete(decode, **other))


async def test_a_prefill_worker_that_is_gone_costs_a_prefill() -> None:
    async with pair() as (prefill, decode):
        params = await prefilled(prefill) | {"remote_port": 9}
        second = await complete(decode, kv_transfer_params=params)
        assert text_of(second) == text_of(await complete(decode))


async def test_parameters_that_name_no_source_kill_the_engine() -> None:
    async with pair() as (_, decode):
        body = ASKED | {"kv_transfer_params": {"do_remote_prefill": True}}
        assert (await decode.post("/v1/completions", json=body)).status_code == 500

        async def health() -> float:
            return (await decode.get("/health")).status_code

        await until(health, 503)


async def test_a_first_leg_that_streams_tells_nobody_how_to_fetch_it() -> None:
    async with pair() as (prefill, _):
        body = ASKED | {"max_tokens": 1, "stream": True, "kv_transfer_params": KEEP}
        response = await prefill.post("/v1/completions", json=body)
        assert b"remote_request_id" not in response.content


async def test_without_a_connector_the_parameters_are_ignored() -> None:
    async with over_http() as (client, _):
        answer = await complete(client, max_tokens=1, kv_transfer_params=KEEP)
        assert answer["kv_transfer_params"] is None
        assert await kv_use(client) == 0
        fetching = await complete(client, kv_transfer_params={"do_remote_prefill": True})
        assert text_of(fetching) == text_of(await complete(client))
