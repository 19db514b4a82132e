"""The mock worker's prefix cache: what is found, what is evicted, what it saves and tells."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.cli import make_app
from service.mock.decode_model import DecodeWorker
from service.mock.prefix_blocks import PrefixBlocks
from service.mock.profiles import DecodeProfile
from service.mock.serving import running_mock_workers
from tests.mock.mock_client import in_process, unit_config

AMPLE = 10_000
BLOCK = 16
PREFILL_ONLY = DecodeProfile(
    name="prefill-only",
    base_ms=1.0,
    per_request_ms=0.0,
    per_kv_token_ms=0.0,
    prefill_ms_per_token=1.0,
    kv_capacity_tokens=20 * BLOCK,
    batched_tokens_limit=None,
)


def caching_worker() -> DecodeWorker:
    return DecodeWorker(PREFILL_ONLY, 4, block_tokens=BLOCK, piece_tokens=BLOCK)


def answer(worker: DecodeWorker, request_id: str, pieces: tuple[int, ...], tokens: int) -> float:
    """Run a request of one output token alone; milliseconds of its prefill: 1 a computed token."""
    worker.submit(request_id, tokens, 1, pieces=pieces)
    duration_s = worker.begin_iteration()
    worker.end_iteration()
    assert duration_s is not None
    assert worker.begin_iteration() is None
    return 1e3 * duration_s - PREFILL_ONLY.base_ms


def test_only_a_common_beginning_is_found() -> None:
    cache = PrefixBlocks(BLOCK)
    assert cache.enter((1, 2, 3), 50, AMPLE) == 0
    assert cache.enter((1, 2, 9), 50, AMPLE) == 2 * BLOCK
    # Piece 3 is there, but not behind a piece that is.
    assert cache.enter((8, 3), 50, AMPLE) == 0
    assert (cache.queries, cache.hits) == (150, 2 * BLOCK)


def test_one_token_of_a_prompt_is_always_computed() -> None:
    cache = PrefixBlocks(BLOCK)
    cache.enter((1, 2), 2 * BLOCK, AMPLE)
    assert cache.enter((1, 2), 2 * BLOCK, AMPLE) == 2 * BLOCK - 1


def test_the_least_recently_used_goes_first_and_ends_before_heads() -> None:
    cache = PrefixBlocks(BLOCK)
    for ids in ((1, 2, 3), (4, 5)):
        cache.enter(ids, BLOCK * len(ids), AMPLE)
        cache.leave(ids, AMPLE)
    # Room for three of five pieces: 3 and 2 go, the oldest prompt's end before its head.
    cache.enter((), 1, 3 * BLOCK)
    assert cache.enter((1, 2, 3), 50, AMPLE) == BLOCK
    assert cache.enter((4, 5), 50, AMPLE) == 2 * BLOCK


def test_what_is_used_again_outlives_what_is_not() -> None:
    cache = PrefixBlocks(BLOCK)
    for piece in (1, 2, 1):
        cache.enter((piece,), 20, AMPLE)
        cache.leave((piece,), AMPLE)
    cache.enter((), 1, BLOCK)
    assert cache.enter((2,), 20, AMPLE) == 0
    assert cache.enter((1,), 20, AMPLE) == BLOCK


def test_what_running_requests_use_stays_however_little_is_free() -> None:
    cache = PrefixBlocks(BLOCK)
    cache.enter((1,), 20, AMPLE)
    cache.enter((1,), 20, AMPLE)
    cache.leave((1,), 0)
    assert cache.enter((1,), 20, 0) == BLOCK
    cache.leave((1,), 0)
    cache.leave((1,), 0)
    assert cache.enter((1,), 20, 0) == 0


def test_without_a_cache_nothing_is_looked_up() -> None:
    cache = PrefixBlocks(0)
    assert [cache.enter((1,), 20, AMPLE) for _ in range(2)] == [0, 0]
    cache.leave((1,), AMPLE)
    assert (cache.queries, cache.hits) == (0, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        PrefixBlocks(-1)


def test_hits_shorten_the_prefill_by_their_tokens() -> None:
    worker = caching_worker()
    assert answer(worker, "first", (1, 2, 3), 50) == pytest.approx(50)
    assert answer(worker, "again", (1, 2, 3), 50) == pytest.approx(50 - 3 * BLOCK)
    assert answer(worker, "half", (1, 2, 9), 50) == pytest.approx(50 - 2 * BLOCK)
    stats = worker.stats()
    assert stats.prefix_queries_total == 150
    assert stats.prefix_hits_total == 5 * BLOCK
    assert stats.prefill_tokens_total == 150 - 5 * BLOCK
    assert stats.kv_blocks_used == 0


def test_a_request_that_fills_the_memory_leaves_nothing_cached() -> None:
    worker = caching_worker()
    answer(worker, "first", (1, 2), 2 * BLOCK)
    answer(worker, "large", (), PREFILL_ONLY.kv_capacity_tokens)
    assert answer(worker, "again", (1, 2), 2 * BLOCK) == pytest.approx(2 * BLOCK)


async def test_usage_and_metrics_tell_what_was_found() -> None:
    async with in_process(prefix_caching=True) as (client, _):
        block_tokens = unit_config().block_tokens
        beginning = "once upon a time " * 20
        usages = [await _usage(client, beginning + end) for end in ("one", "two")]
        found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert found[0] == 0
        assert found[1] > 0
        assert found[1] % block_tokens == 0
        assert found[1] < usages[1]["prompt_tokens"]
        prompts = sum(usage["prompt_tokens"] for usage in usages)
        assert await _counters(client) == (prompts, found[1])


async def test_a_worker_without_the_cache_tells_of_none() -> None:
    async with in_process() as (client, _):
        usages = [await _usage(client, "once upon a time " * 20) for _ in range(2)]
        assert [usage.get("prompt_tokens_details") for usage in usages] == [None, None]
        assert await _counters(client) == (0, 0)


@pytest.mark.parametrize("flag", ["--enable-prefix-caching", "--no-enable-prefix-caching"])
async def test_the_command_has_vllms_flag(flag: str) -> None:
    """A worker made from the flag keeps prompts, or does not; both say so."""
    flags = ["mock-worker", flag, "--profile", "unit", "--time-scale", "100"]
    _, bound, _ = make_app().parse_args(flags, exit_on_error=False, print_error=False)
    on = not flag.startswith("--no-")
    async with (
        running_mock_workers([bound.arguments["options"].config()]) as (url,),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        for _ in range(2):
            await _usage(client, "once upon a time " * 20)
        _, hits = await _counters(client)
        page = (await client.get("/metrics")).text
    assert (hits > 0) is on
    assert f'enable_prefix_caching="{on}"' in page


async def _usage(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200
    usage: dict[str, Any] = response.json()["usage"]
    return usage


async def _counters(client: httpx.AsyncClient) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix cache and found there, as the page has them."""
    page = (await client.get("/metrics")).text
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
    queries, hits = (
        next(s.value for s in samples if s.name == f"vllm:prefix_cache_{name}_total")
        for name in ("queries", "hits")
    )
    return queries, hits
