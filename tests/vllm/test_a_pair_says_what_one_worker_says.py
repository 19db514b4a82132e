"""A real prefill and a real decode worker behind bidgate: the texts of one worker, never others.

Texts are the proof: a handoff that is late, repeated or mixed up is answered by the engine with
other text under status 200, and no counter says so.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.vllm.engine import client, completion, eventually, lines_of, settle, stream
from tests.vllm.router import Router, running_router, until_all_up
from tests.vllm.workers import (
    HOME,
    SERVED_NAME,
    Worker,
    WorkerError,
    WorkerOptions,
    build_model,
    check_machine,
    free_port,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH_LIMIT = 8
AT_ONCE = 8
REQUESTS = 24
PROMPT_TOKENS = 300
# The engine's own default: on a busy machine a shorter one might end before a prompt is fetched.
LEASE_S = 30
SETTLES_WITHIN_S = 60.0


def nixl_options(kv_role: str) -> WorkerOptions:
    """A worker that keeps prompts for others and fetches theirs."""
    connector = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_buffer_device": "cpu",
        # A prefill worker that is gone costs a prefill, not an error.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"num_threads": 1, "kv_lease_duration": LEASE_S},
    }
    return WorkerOptions(
        batch_limit=BATCH_LIMIT,
        extra=("--kv-transfer-config", json.dumps(connector)),
        environment=(
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port())),
        ),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill worker and a decode worker."""

    prefill: Worker
    decode: Worker


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Both, for this module only."""
    if os.environ.get("BIDGATE_VLLM_URLS"):
        pytest.skip("a pair needs workers of its own, started with the NIXL connector")
    workers = [
        Worker(name, free_port(), nixl_options(kv_role))
        for name, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    options = workers[0].options
    if not any((HOME / "venv" / "lib").glob("python*/site-packages/nixl_cu12")):
        raise WorkerError("the NIXL connector is missing: run scripts/nixl-env first")
    check_machine(len(workers), options)
    build_model(options.python, options.model)
    with running(workers):
        yield Pair(*workers)


@pytest.fixture
def router(pair: Pair) -> Iterator[Router]:
    flags = ("--prefill-workers", pair.prefill.url, "--decode-workers", pair.decode.url)
    flags = (*flags, "--handoff.lease-s", str(LEASE_S))
    with running_router((), batch_limit=BATCH_LIMIT, flags=flags) as running_one:
        yield running_one


def body(salt: int, **extra: object) -> dict[str, object]:
    return completion(
        SERVED_NAME, prompt_tokens=PROMPT_TOKENS, decode_tokens=24 + salt % 16, salt=salt, **extra
    )


async def whole(http: httpx.AsyncClient, asked: dict[str, object]) -> dict[str, Any]:
    response = await http.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def counter(http: httpx.AsyncClient, name: str, label: str = "") -> float:
    """Sum of a counter of an engine, over its labels."""
    page = (await http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def kv_use(http: httpx.AsyncClient) -> float:
    return await counter(http, "vllm:kv_cache_usage_perc")


async def test_texts_of_the_pair_are_those_of_one_worker(pair: Pair, router: Router) -> None:
    async with client(router.url) as http, client(pair.prefill.url) as one:
        await until_all_up(router, http, [pair.prefill.url, pair.decode.url])
        async with client(pair.decode.url) as decode:
            # The prefill worker is an ordinary one to those who ask for no handoff.
            alone = [
                (await whole(one, body(salt)))["choices"][0]["text"] for salt in range(REQUESTS)
            ]
            fetched = await counter(decode, "vllm:prompt_tokens_by_source_total", "external_kv")
            gate = asyncio.Semaphore(AT_ONCE)

            async def ask(salt: int) -> tuple[str, dict[str, int]]:
                async with gate:
                    if salt % 2:
                        answer = await whole(http, body(salt))
                        return answer["choices"][0]["text"], answer["usage"]
                    streamed = await stream(http, body(salt))
                    assert streamed.ended_by_done
                    return streamed.text, streamed.events[-1]["usage"]

            told = await asyncio.gather(*(ask(salt) for salt in range(REQUESTS)))
            assert [text for text, _ in told] == alone
            for salt, (_, usage) in enumerate(told):
                assert usage["prompt_tokens"] == PROMPT_TOKENS
                assert usage["completion_tokens"] == 24 + salt % 16
            fetched = (
                await counter(decode, "vllm:prompt_tokens_by_source_total", "external_kv") - fetched
            )
            assert fetched == REQUESTS * PROMPT_TOKENS
            page = await router.page(http)
            assert page("bidgate_handoffs_total", "done") == REQUESTS
            assert page("bidgate_handoffs_total", "missing") == 0
            assert page("bidgate_handoffs_total", "failed") == 0
            # Every prompt was fetched, so the prefill worker keeps none.
            for engine in (one, decode):
                await settle(engine, SETTLES_WITHIN_S)

            async def nothing_kept() -> bool:
                return await kv_use(one) == 0

            assert await eventually(nothing_kept, SETTLES_WITHIN_S) is not None


async def test_chats_are_split_too(pair: Pair, router: Router) -> None:
    asked = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": "Say something long about nothing. " * 8}],
        "max_completion_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with client(router.url) as http, client(pair.decode.url) as one:
        alone = await one.post("/v1/chat/completions", json=asked)
        told = await http.post("/v1/chat/completions", json=asked)
        assert told.headers["x-bidgate-prefill-worker"]
        assert told.json()["choices"] == alone.json()["choices"]
        assert told.json()["usage"] == alone.json()["usage"]


async def test_a_stop_at_the_first_token_does_not_lose_the_handoff(
    pair: Pair, router: Router
) -> None:
    async with client(router.url) as http, client(pair.prefill.url) as one:
        first = (await whole(one, body(1)))["choices"][0]["text"][0]
        stopping = body(1, stop=[first])
        alone = (await whole(one, stopping))["choices"][0]
        told = await http.post("/v1/completions", json=stopping)
        assert told.headers["x-bidgate-prefill-worker"]
        assert told.json()["choices"][0]["text"] == alone["text"] == ""
        assert told.json()["choices"][0]["finish_reason"] == alone["finish_reason"] == "stop"


async def test_several_sequences_go_to_one_worker_whole(pair: Pair, router: Router) -> None:
    async with client(router.url) as http:
        asked = body(2) | {"n": 2, "temperature": 1.0, "seed": 5}
        response = await http.post("/v1/completions", json=asked)
        assert "x-bidgate-prefill-worker" not in response.headers
        assert len(response.json()["choices"]) == 2


async def test_clients_cannot_reach_the_connector(pair: Pair, router: Router) -> None:
    async with client(router.url) as http, client(pair.prefill.url) as one:
        deadly = body(3, kv_transfer_params={"do_remote_prefill": True})
        alone = await whole(one, body(3))
        told = await whole(http, deadly)
        assert told["choices"][0]["text"] == alone["choices"][0]["text"]
        whole_one = await whole(http, deadly | {"echo": True})
        assert whole_one["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


async def test_clients_that_leave_keep_no_slot_and_memory_only_for_the_lease(
    pair: Pair, router: Router
) -> None:
    async with client(router.url) as http, client(pair.prefill.url) as prefill:
        await settle(prefill, SETTLES_WITHIN_S)

        async def leave(salt: int) -> None:
            asked = completion(
                SERVED_NAME, prompt_tokens=PROMPT_TOKENS, decode_tokens=400, salt=100 + salt
            )
            try:
                async with asyncio.timeout(0.05 + 0.05 * salt):
                    async for _ in lines_of(http, asked):
                        pass
            except TimeoutError:
                pass

        await asyncio.gather(*(leave(salt) for salt in range(AT_ONCE)))

        async def all_free() -> bool:
            page = await router.page(http)
            held = page.total("bidgate_worker_active") + page.total("bidgate_prefill_worker_legs")
            return held + page("bidgate_queue_running") == 0

        assert await eventually(all_free, SETTLES_WITHIN_S) is not None
        page = await router.page(http)
        assert page("bidgate_accounting_imbalance") == 0
        async with client(pair.decode.url) as decode:
            await settle(decode, SETTLES_WITHIN_S)

        async def nothing_kept() -> bool:
            return await kv_use(prefill) == 0

        assert await eventually(nothing_kept, LEASE_S + SETTLES_WITHIN_S) is not None
        # The next prompts find room, and the right text.
        alone = (await whole(prefill, body(7)))["choices"][0]["text"]
        assert (await whole(http, body(7)))["choices"][0]["text"] == alone
