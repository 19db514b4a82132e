"""A real vLLM with --data-parallel-size 2: two engines behind one URL, each a worker of bidgate."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from service.engine_metrics import WANTED_SERIES, parse_engine_page
from service.engine_ranks import ADVICE_FEW
from tests.vllm.conftest import KV_BLOCKS
from tests.vllm.engine import client, completion, eventually, lines_of, settle, stream
from tests.vllm.router import running_router, until_workers_up, worker_id
from tests.vllm.workers import SERVED_NAME, Worker, WorkerOptions, running_workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import httpx

    from service.engine_metrics import EngineSample

RANKS = 2
BATCH_LIMIT = 4
LOOK_S = 0.02
SETTLES_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Worker]:
    """One server with two ranks, for this module only: each rank is a process with its own KV."""
    if os.environ.get("BIDGATE_VLLM_URLS"):
        pytest.skip("ranks are tested on a server of our own")
    options = WorkerOptions(batch_limit=BATCH_LIMIT, kv_blocks=KV_BLOCKS, data_parallel_size=RANKS)
    with running_workers(1, options) as (worker,):
        yield worker


async def engines(http: httpx.AsyncClient) -> Mapping[str, EngineSample]:
    """What the server says about each of its engines now."""
    page = await http.get("/metrics/", params=[("name[]", name) for name in WANTED_SERIES])
    return parse_engine_page(page.content).engines


def succeeded(samples: Mapping[str, EngineSample]) -> list[int]:
    return [samples[str(rank)].requests_succeeded_total or 0 for rank in range(RANKS)]


async def test_each_rank_gets_its_own_requests_and_never_queues(server: Worker) -> None:
    names = [f"{worker_id(server.url)}@{rank}" for rank in range(RANKS)]
    flags = ("--data-parallel-size", str(RANKS))
    with running_router([server.url], batch_limit=BATCH_LIMIT, flags=flags) as router:
        async with client(router.url) as http, client(server.url) as engine:
            await until_workers_up(router, http, names)
            await settle(engine)
            before = succeeded(await engines(engine))
            waiting: list[int] = []

            async def look_on() -> None:
                while True:
                    samples = await engines(engine)
                    waiting.extend(sample.waiting or 0 for sample in samples.values())
                    await asyncio.sleep(LOOK_S)

            looking = asyncio.create_task(look_on())
            headers = {"X-data-parallel-rank": "7"}
            bodies = [
                completion(SERVED_NAME, prompt_tokens=60, decode_tokens=40 + number, salt=number)
                for number in range(4 * RANKS * BATCH_LIMIT)
            ]
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body, headers=headers) for body in bodies)
            )
            looking.cancel()
            await settle(engine)
            after = succeeded(await engines(engine))
        # A rank out of range is a 400 from the engine: the client's header did not reach it.
        assert {answer.status_code for answer in answers} == {200}
        served = Counter(answer.headers["x-bidgate-worker"] for answer in answers)
        assert [served[name] for name in names] == [
            now - then for now, then in zip(after, before, strict=True)
        ]
        assert min(served.values()) >= BATCH_LIMIT
        assert max(waiting) <= 1


async def test_the_ledger_of_each_rank_agrees_with_its_engine(server: Worker) -> None:
    flags = ("--data-parallel-size", str(RANKS))
    with running_router([server.url], batch_limit=BATCH_LIMIT, flags=flags) as router:
        async with client(router.url) as http, client(server.url) as engine:
            names = [f"{worker_id(server.url)}@{rank}" for rank in range(RANKS)]
            await until_workers_up(router, http, names)
            await settle(engine)
            long = [
                completion(SERVED_NAME, prompt_tokens=60, decode_tokens=900, salt=number)
                for number in range(3)
            ]
            streams = [lines_of(http, body) for body in long]
            for lines in streams:
                await anext(lines)

            async def agree() -> bool:
                page, samples = await router.page(http), await engines(engine)
                active = [page("bidgate_worker_active", name) for name in names]
                return active == [samples[str(rank)].running for rank in range(RANKS)]

            assert await eventually(agree, SETTLES_WITHIN_S) is not None
            page = await router.page(http)
            assert sum(page("bidgate_worker_active", name) for name in names) == len(long)
            capacity = {page("bidgate_worker_kv_capacity_tokens", name) for name in names}
            assert capacity == {32 * (KV_BLOCKS - 1)}
            for lines in streams:
                await lines.aclose()
            await settle(engine)
            assert await eventually(agree, SETTLES_WITHIN_S) is not None


async def test_a_rank_that_the_server_does_not_have_gets_nothing(server: Worker) -> None:
    flags = ("--data-parallel-size", str(RANKS + 1))
    with running_router([server.url], batch_limit=BATCH_LIMIT, flags=flags) as router:
        async with client(router.url) as http:
            names = [f"{worker_id(server.url)}@{rank}" for rank in range(RANKS)]
            await until_workers_up(router, http, names)
            bodies = [
                completion(SERVED_NAME, prompt_tokens=20, decode_tokens=20, salt=number)
                for number in range(2 * (RANKS + 1) * BATCH_LIMIT)
            ]
            answers = await asyncio.gather(*(stream(http, body) for body in bodies))
            assert {answer.status for answer in answers} == {200}
            assert all(answer.decode_tokens == 20 for answer in answers)
            page = await router.page(http)
            missing = f"{worker_id(server.url)}@{RANKS}"
            assert page("bidgate_worker_state", missing, "down") == 1
        (warning,) = router.log_events("engines_differ")
        assert warning["advice"] == ADVICE_FEW
