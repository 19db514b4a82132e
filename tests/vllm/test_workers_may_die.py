"""Engines that are killed, that hang on SIGTERM, that shut down in order, and that come back.

The tests end processes; the fleet fixture revives what the one before left dead.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.vllm.engine import Stream, client, completion, eventually, stream
from tests.vllm.router import Router, running_router, until_all_up, worker_id

if TYPE_CHECKING:
    import httpx

    from tests.vllm.conftest import Fleet

STALL_TIMEOUT_S = 4.0
# After the stall timeout: the error frame's way to a client on a busy machine.
GRACE_S = 6.0
OUT_OF_ROTATION_MAX_S = 10.0
FLAGS = ("--stall-timeout-s", str(STALL_TIMEOUT_S), "--reprobe-max-s", "1")
LONG_TOKENS = 330
SLOTS = 4
SHUTDOWN_TIMEOUT_S = 30


@dataclass(slots=True)
class Answered:
    """One request's stream, the worker that had it, and when it ended."""

    seen: Stream
    worker: str = ""
    ended_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether it came to its end without an error."""
        return self.seen.error is None and self.seen.ended_by_done


async def ask(http: httpx.AsyncClient, body: dict[str, object], answered: Answered) -> None:
    """Read one stream to its end, noting the worker from the response header."""
    request = http.build_request("POST", "/v1/completions", json=body | {"stream": True})
    response = await http.send(request, stream=True)
    try:
        answered.seen.status = response.status_code
        if response.status_code != 200:
            answered.seen.events.append(json.loads(await response.aread()))
            return
        answered.worker = response.headers.get("x-bidgate-worker", "")
        async for line in response.aiter_lines():
            answered.seen.add(line)
    finally:
        answered.ended_s = time.monotonic()
        await response.aclose()


@dataclass(slots=True)
class Load:
    """Long streams in flight on every worker, and more in bidgate's queue."""

    answers: list[Answered]
    tasks: list[asyncio.Task[None]]

    def on(self, url: str) -> list[Answered]:
        """Those that a worker has taken."""
        return [answered for answered in self.answers if answered.worker == worker_id(url)]

    @property
    def queued(self) -> list[Answered]:
        """Those that no worker has answered."""
        return [answered for answered in self.answers if not answered.worker]

    async def over(self, within_s: float) -> None:
        """Wait for all of them."""
        _, pending = await asyncio.wait(self.tasks, timeout=within_s)
        assert not pending, f"{len(pending)} requests never ended"
        for task in self.tasks:
            task.result()


async def put_load(http: httpx.AsyncClient, fleet: Fleet, count: int) -> Load:
    """Send long streams; return when each of the workers' slots that the load fills produces.

    A request that a worker has but that nobody has seen answered would be neither lost nor
    queued to a test.
    """
    filled = min(count, SLOTS * len(fleet.urls))
    bodies = [
        completion(fleet.model, prompt_tokens=40, decode_tokens=LONG_TOKENS, salt=salt)
        for salt in range(count)
    ]
    answers = [Answered(Stream()) for _ in bodies]
    asked = zip(bodies, answers, strict=True)
    tasks = [asyncio.create_task(ask(http, body, answered)) for body, answered in asked]
    load = Load(answers, tasks)

    async def producing() -> bool:
        return sum(len(answered.seen.arrived_s) > 3 for answered in answers) >= filled

    assert await eventually(producing, 60.0) is not None
    return load


async def state_is(router: Router, http: httpx.AsyncClient, url: str, state: str) -> bool:
    """Whether bidgate comes to see a worker in a state."""

    async def seen() -> bool:
        page = await router.page(http)
        return page("bidgate_worker_state", worker_id(url), state) == 1

    return await eventually(seen, OUT_OF_ROTATION_MAX_S) is not None


async def test_streams_left_hanging_by_sigterm_end_with_an_error_after_the_stall_timeout(
    fleet: Fleet,
) -> None:
    victim = fleet.process(1)
    with running_router(fleet.urls, batch_limit=SLOTS, flags=FLAGS) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, fleet.urls)
            load = await put_load(http, fleet, SLOTS * len(fleet.urls))
            lost = load.on(victim.url)
            victim.send(signal.SIGTERM)
            told_s = time.monotonic()
            await load.over(within_s=120.0)
            hit = [answered for answered in lost if not answered.complete]
            for answered in hit:
                assert answered.seen.error is not None
                last_s = max([told_s, *answered.seen.arrived_s])
                assert answered.ended_s - last_s < STALL_TIMEOUT_S + GRACE_S
            elsewhere = [answered for answered in load.answers if answered not in lost]
            assert all(answered.complete for answered in elsewhere)
            assert await state_is(router, http, victim.url, "down")
            page = await router.page(http)
            assert page("bidgate_requests_ended_total", "failed") == len(hit)
            assert page("bidgate_accounting_imbalance") == 0
            # bidgate goes on with who is left.
            body = completion(fleet.model, prompt_tokens=9, decode_tokens=3)
            seen = await stream(http, body)
            assert seen.ended_by_done
            assert seen.error is None
    victim.wait_dead()


async def test_a_killed_engine_costs_its_own_streams_and_is_used_again_when_it_is_back(
    fleet: Fleet,
) -> None:
    victim = fleet.process(0)
    queued = 12
    with running_router(fleet.urls, batch_limit=SLOTS, flags=FLAGS) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, fleet.urls)
            load = await put_load(http, fleet, SLOTS * len(fleet.urls) + queued)
            lost, waiting = load.on(victim.url), load.queued
            assert lost
            assert len(waiting) > 2 * SLOTS
            for pid in victim.engine_pids():
                os.kill(pid, signal.SIGKILL)
            await load.over(within_s=120.0)

            hit = [answered for answered in load.answers if not answered.complete]
            assert all(answered.seen.error is not None for answered in hit)
            assert {answered.worker for answered in hit} <= {worker_id(victim.url), ""}
            assert {id(answered) for answered in hit} >= {id(answered) for answered in lost}
            # Those that took the places of the dead before anybody could know; the rest waited on.
            assert sum(not answered.complete for answered in waiting) <= SLOTS

            assert await state_is(router, http, victim.url, "down")
            page = await router.page(http)
            assert page("bidgate_requests_ended_total", "failed") == len(hit)
            assert page("bidgate_accounting_imbalance") == 0

            victim.wait_dead()
            victim.options = replace(victim.options, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
            fleet.revive()
            await until_all_up(router, http, fleet.urls)
            again = await put_load(http, fleet, SLOTS * len(fleet.urls))
            await again.over(within_s=120.0)
            assert again.on(victim.url)
            assert all(answered.complete for answered in again.answers)


async def test_with_a_shutdown_timeout_every_stream_in_flight_is_completed(fleet: Fleet) -> None:
    victim = fleet.process(0)
    if not victim.options.shutdown_timeout_s:
        victim.stop()
        victim.options = replace(victim.options, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
        fleet.revive()
    alone = replace(fleet, urls=fleet.urls[:1])
    with running_router(alone.urls, batch_limit=SLOTS, flags=FLAGS) as router:
        async with client(router.url) as http:
            await until_all_up(router, http, alone.urls)
            load = await put_load(http, alone, SLOTS)
            victim.send(signal.SIGTERM)
            await load.over(within_s=120.0)
            assert all(answered.complete for answered in load.answers)
            victim.wait_dead(40.0)
            assert await state_is(router, http, victim.url, "down")
            page = await router.page(http)
            assert page("bidgate_requests_ended_total", "failed") == 0
            assert page("bidgate_requests_ended_total", "completed") == len(load.answers)
