"""Turns of conversations go where their prompts are cached, as vLLM's own counters say.

And where vLLM caches nothing, its counters make bidgate stop to believe in its guesses.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from tests.vllm.engine import client, completion, prompt_of, sample, settle, stream
from tests.vllm.router import running_router, until_all_up, worker_id
from tests.vllm.workers import SERVED_NAME, WorkerOptions, running_workers

if TYPE_CHECKING:
    import httpx

    from tests.vllm.conftest import Fleet

CONVERSATIONS = 4
TURNS = 4
FIRST_TOKENS, TURN_TOKENS, DECODE_TOKENS = 512, 64, 24
APART_S = 0.03
TOLERANCE = 0.1
"""Difference of the hit rates that vLLM counts and that bidgate guesses."""
FLAGS = ("--metrics-interval-s", "0.1")


async def converse(http: httpx.AsyncClient, model: str, salt: int) -> None:
    """All conversations at once, turn by turn; another one begins each turn."""
    for turn in range(TURNS):

        async def ask(place: int, turn: int = turn) -> None:
            await asyncio.sleep(place * APART_S)
            number = (place + turn) % CONVERSATIONS
            tokens = FIRST_TOKENS + turn * TURN_TOKENS
            body = completion(model, prompt_tokens=1, decode_tokens=DECODE_TOKENS)
            body["prompt"] = prompt_of(2000, salt + number)[:tokens]
            answer = await stream(http, body)
            assert answer.error is None

        await asyncio.gather(*(ask(place) for place in range(CONVERSATIONS)))


async def hit_rates(fleet: Fleet, weight: float, salt: int) -> tuple[float, float, float]:
    """(vLLM's hit rate, bidgate's guess, its guess without the reward) of some conversations."""
    flags = (*FLAGS, "--affinity.weight", str(weight))
    with running_router(fleet.urls, batch_limit=fleet.batch_limit, flags=flags) as router:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(client(router.url))
            engines = [await stack.enter_async_context(client(url)) for url in fleet.urls]
            await until_all_up(router, http, fleet.urls)
            before = [await settle(engine) for engine in engines]
            await converse(http, fleet.model, salt)
            for engine in engines:
                await settle(engine)
            after = [await sample(engine) for engine in engines]
            page = await router.page(http)
    queries, hits = (
        sum(
            (getattr(now, name) or 0) - (getattr(then, name) or 0)
            for now, then in zip(after, before, strict=True)
        )
        for name in ("prefix_queries_total", "prefix_hits_total")
    )
    assert queries > 0
    return (
        hits / queries,
        page("bidgate_affinity_hit_rate", "with"),
        page("bidgate_affinity_hit_rate", "without"),
    )


async def test_vllm_hits_as_bidgate_guesses_and_more_than_without_affinity(fleet: Fleet) -> None:
    """Two routers in turn, the same conversations under other salts."""
    hit, guessed, without = await hit_rates(fleet, 1.0, salt=5000)
    plain, _, _ = await hit_rates(fleet, 0.0, salt=6000)
    told = f"vLLM {hit:.3f}, guessed {guessed:.3f}, without {without:.3f}, weight 0: {plain:.3f}"
    assert abs(hit - guessed) <= TOLERANCE, told
    assert hit > plain + TOLERANCE, told
    assert guessed > without, told
    logging.getLogger(__name__).info(told)


BATCH_LIMIT = 8
BELIEVED_AT_MOST = 0.6
"""Of its guess, after some ten thousand prompt tokens of which the engine found none."""


async def test_an_engine_without_prefix_caching_takes_the_reward_away() -> None:
    """The guess cannot know; the counters do."""
    if os.environ.get("BIDGATE_VLLM_URLS"):
        pytest.skip("an engine with other flags must be ours")
    options = WorkerOptions(batch_limit=BATCH_LIMIT, extra=("--no-enable-prefix-caching",))
    with running_workers(1, options) as workers:
        url = workers[0].url
        flags = (*FLAGS, "--affinity.weight", "1")
        with running_router((url,), batch_limit=BATCH_LIMIT, flags=flags) as router:
            async with client(router.url) as http, client(url) as engine:
                await until_all_up(router, http, (url,))
                await converse(http, SERVED_NAME, salt=7000)
                await converse(http, SERVED_NAME, salt=7000)
                await settle(engine)
                told = await sample(engine)
                page = await router.page(http)
    believed = page("bidgate_worker_prefix_correction", worker_id(url))
    assert not told.prefix_hits_total
    assert page("bidgate_worker_prefix_guessed_rate", worker_id(url)) > BELIEVED_AT_MOST / 2
    assert 0 < believed < BELIEVED_AT_MOST
