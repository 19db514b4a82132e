"""A client that leaves frees its place in the engine, or in the queue, within a second."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.vllm.engine import client, completion, eventually, lines_of, sample, settle
from tests.vllm.router import Router, running_router, until_all_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from tests.vllm.conftest import Fleet

GONE_WITHIN_S = 1.0


async def engines_hold(fleet: Fleet) -> int:
    """Requests that run or wait in all engines together."""
    held = 0
    for url in fleet.urls:
        async with client(url) as http:
            now = await sample(http)
        held += (now.running or 0) + (now.waiting or 0)
    return held


async def leave(asked: asyncio.Task[object]) -> None:
    """Drop a request and its connection."""
    asked.cancel()
    await asyncio.wait([asked])


async def gone(fleet: Fleet) -> float | None:
    """Seconds until no engine holds anything."""

    async def none() -> bool:
        return await engines_hold(fleet) == 0

    return await eventually(none, GONE_WITHIN_S)


async def started(fleet: Fleet, count: int) -> bool:
    """Whether so many requests came to run."""

    async def running() -> bool:
        return await engines_hold(fleet) == count

    return await eventually(running, 30.0) is not None


async def ended(router: Router, http: httpx.AsyncClient, outcome: str, count: int) -> bool:
    """Whether bidgate counts so many ends, and loses none."""

    async def counted() -> bool:
        page = await router.page(http)
        return page("bidgate_requests_ended_total", outcome) == count

    told = await eventually(counted, GONE_WITHIN_S) is not None
    return told and (await router.page(http))("bidgate_accounting_imbalance") == 0


async def all_idle(urls: Sequence[str]) -> None:
    """Start from nothing."""
    for url in urls:
        async with client(url) as http:
            await settle(http)


async def test_leaving_a_stream_ends_it_in_the_engine(fleet: Fleet) -> None:
    await all_idle(fleet.urls)
    with running_router(fleet.urls, batch_limit=fleet.batch_limit) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, fleet.urls)
            body = completion(fleet.model, prompt_tokens=16, decode_tokens=1900)
            reader = lines_of(http, body)
            await anext(reader)
            assert await started(fleet, 1)
            await reader.aclose()
            assert await gone(fleet) is not None
            assert await ended(router, http, "cancelled", 1)


async def test_leaving_a_request_without_a_stream_ends_it_in_the_engine(fleet: Fleet) -> None:
    await all_idle(fleet.urls)
    with running_router(fleet.urls, batch_limit=fleet.batch_limit) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, fleet.urls)
            body = completion(fleet.model, prompt_tokens=16, decode_tokens=1900)
            asked = asyncio.create_task(http.post("/v1/completions", json=body))
            assert await started(fleet, 1)
            await leave(asked)
            assert await gone(fleet) is not None
            assert await ended(router, http, "cancelled", 1)


async def test_leaving_the_queue_never_reaches_an_engine(fleet: Fleet) -> None:
    await all_idle(fleet.urls)
    # One slot a worker as far as bidgate knows, so that the next request waits in bidgate.
    with running_router(fleet.urls, batch_limit=1) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, fleet.urls)
            body = completion(fleet.model, prompt_tokens=16, decode_tokens=1900)
            holders = [
                asyncio.create_task(http.post("/v1/completions", json=body)) for _ in fleet.urls
            ]
            assert await started(fleet, len(fleet.urls))
            queued = [
                asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(4)
            ]

            async def waiting() -> bool:
                return (await router.page(http))("bidgate_queue_waiting") == len(queued)

            assert await eventually(waiting, 10.0) is not None
            for asked in queued:
                await leave(asked)
            assert await ended(router, http, "cancelled", len(queued))
            assert await engines_hold(fleet) == len(holders)
            for asked in holders:
                await leave(asked)
            assert await gone(fleet) is not None
