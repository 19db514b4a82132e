"""State over a service's life: many requests, bursts, pauses, workers out and in.

T numbers are the rows that test_faults_of_other_routers_do_not_happen_here.py has, too.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import types
from collections import Counter, deque

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.control.config import ControlConfig, PolicyName
from service.control.events import WorkerChanged, WorkerGone, WorkerJoined, WorkerSpec, WorkerState
from service.control.kept_views import VIEWS_MAX, KeptViews
from service.forward_config import ForwardConfig
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import DONE, HandlerTransport, Stage, answer, completion, event, stream

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
GROWING = (dict, list, set, deque)
OUTSIDE = (type, types.ModuleType, types.FunctionType, asyncio.AbstractEventLoop, asyncio.Future)
CONNECT_S = 3.0
UP, DOWN = WorkerState.UP, WorkerState.DOWN
COUNTERS = ("_total", "_count", "_sum", "_bucket")


async def scrape(stage: Stage) -> Series:
    """The page, parsed by Prometheus's own parser."""
    exchange = await stage.send("GET", "/metrics")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exchange.body.decode())
        for sample in family.samples
    }


def kept(stage: Stage) -> Counter[str]:
    """How much every kind of container holds that the shell or the router can reach."""
    todo: list[object] = [
        stage.queue,
        stage.forwarder,
        stage.light_path,
        stage.inside,
        stage.door,
        stage.telemetry,
    ]
    seen: set[int] = {id(stage), id(stage.workers), *map(id, stage.workers.values())}
    sizes: Counter[str] = Counter()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, OUTSIDE):
            continue
        seen.add(id(one))
        if isinstance(one, KeptViews):
            assert len(one) <= VIEWS_MAX
            continue
        if not isinstance(one, (float, int)):
            sizes[type(one).__name__] += 1
        if isinstance(one, GROWING) and getattr(one, "maxlen", None) is None:
            sizes[f"in {type(one).__name__}"] += len(one)
        todo.extend(gc.get_referents(one))
    return sizes


async def every_fate(stage: Stage, round_: int) -> None:
    """Requests that are served, streamed, refused, broken, or left by their clients."""

    async def one(number: int) -> None:
        exchange = Exchange()
        headers = {"x-request-id": f"{round_}-{number}", "x-session-id": f"s{number}"}
        if number % 5 == 0:
            asyncio.get_running_loop().call_later(0.07 * (number % 7), exchange.leave)
        path = "/v1/embeddings" if number % 11 == 0 else "/v1/completions"
        prompt = f"{'fail' if number % 10 == 1 else 'well'} {number} " * 20
        body = completion(stream=number % 2 == 0, prompt=prompt, input=prompt)
        if number % 13 == 0:
            body["max_tokens"] = -1
        await stage.post(body, path=path, headers=headers, exchange=exchange)

    await asyncio.gather(*(one(number) for number in range(150)))


async def mixed(request: httpx.Request) -> httpx.Response:
    """A worker of which one answer in ten fails."""
    await asyncio.sleep(0.1)
    if b"fail" in request.content:
        return httpx.Response(500, json={"error": {"message": "no"}})
    if b'"stream": true' in request.content:
        return stream((0.1, event()), (0.1, event()), (0.0, DONE))
    return answer()


@pytest.mark.parametrize("policy", [PolicyName.CENTRAL_FCFS, PolicyName.ONLINE_LP])
def test_what_is_kept_does_not_grow_with_the_requests_that_came(policy: PolicyName) -> None:
    """T04: whatever became of them; every container in reach is counted, not those known to us."""

    async def scenario() -> None:
        workers = {name: HandlerTransport(mixed) for name in "ab"}
        stage = Stage(dict(workers), control=ControlConfig(policy=policy))
        sizes = []
        async with stage.open():
            for round_ in range(4):
                inside = asyncio.create_task(every_fate(stage, round_))
                await asyncio.sleep(0.25)
                most = kept(stage)
                await inside
                await asyncio.sleep(60.0)
                for worker in workers.values():
                    worker.requests.clear()
                sizes.append(kept(stage))
                assert most["in dict"] > sizes[-1]["in dict"] + 50
            assert set(stage.ends()) == {"completed", "failed", "cancelled"}
        assert sizes[2:] == sizes[1:-1]

    run_virtual(scenario())


@pytest.mark.parametrize("gone", [False, True], ids=["not ready", "removed"])
def test_no_gauge_falls_below_zero_when_a_worker_leaves_and_returns_with_requests_inside(
    gone: bool,
) -> None:
    """T11: five streams run through it all, and end after the worker is back."""

    async def slow(_: httpx.Request) -> httpx.Response:
        return stream(*((1.0, event()) for _ in range(6)), (0.0, DONE))

    async def scenario() -> None:
        pages = []
        async with Stage({"a": HandlerTransport(slow)}).open() as stage:
            inside = [asyncio.create_task(stage.post(completion(stream=True))) for _ in range(5)]
            await asyncio.sleep(1.5)
            pages.append(await scrape(stage))
            stage.queue.publish(WorkerGone("a") if gone else WorkerChanged("a", DOWN))
            await asyncio.sleep(1.0)
            pages.append(await scrape(stage))
            again = WorkerSpec(worker_id="a", batch_limit=8, kv_capacity_tokens=100_000)
            stage.queue.publish(WorkerJoined(again) if gone else WorkerChanged("a", UP))
            while not all(one.done() for one in inside):
                await asyncio.sleep(0.5)
                pages.append(await scrape(stage))
            assert [one.result().status for one in inside] == [200] * 5
            assert stage.ends() == {"completed": 5}
            pages.append(await scrape(stage))
        assert all(number >= 0 for page in pages for number in page.values())
        of_a = (("worker", "a"),)
        assert pages[0]["bidgate_worker_active", of_a] == 5
        assert [page["bidgate_queue_running", ()] for page in pages[:3]] == [5, 5, 5]
        for name in ("worker_active", "worker_kv_tokens", "worker_foreign"):
            assert pages[-1][f"bidgate_{name}", of_a] == 0
        assert pages[-1]["bidgate_queue_running", ()] == 0

    run_virtual(scenario())


def test_a_tier_that_was_idle_for_long_is_served_as_before() -> None:
    """T80: state of a priority or a tenant that nobody used is dropped without a loss."""

    async def quick(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.2)
        return answer()

    async def burst(stage: Stage) -> None:
        posts = [
            stage.post(headers={"x-bidgate-priority": f"{level}", "x-bidgate-tenant": f"t{level}"})
            for level in (-5, 0, 5)
            for _ in range(4)
        ]
        assert {one.status for one in await asyncio.gather(*posts)} == {200}

    async def scenario() -> None:
        control = ControlConfig(policy=PolicyName.ONLINE_LP)
        stage = Stage({"a": HandlerTransport(quick)}, batch_limit=2, control=control)
        async with stage.open():
            pages = []
            for _ in range(3):
                await burst(stage)
                pages.append(await scrape(stage))
                await asyncio.sleep(24 * 3600.0)
            assert stage.ends() == {"completed": 36}
        for before, after in itertools.pairwise(pages):
            assert before.keys() <= after.keys()
            counters = [key for key in before if key[0].endswith(COUNTERS)]
            assert counters
            assert all(after[key] >= before[key] for key in counters)

    run_virtual(scenario())


@pytest.mark.parametrize("streams", [False, True])
def test_a_worker_whose_connections_do_not_come_is_tried_no_more_often_than_it_has_slots(
    streams: bool,
) -> None:
    """T46: a black hole among the workers costs those who were sent there, and nobody else."""

    async def black_hole(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(CONNECT_S)
        raise httpx.ConnectTimeout("no answer", request=request)

    async def good(_: httpx.Request) -> httpx.Response:
        return stream((0.1, event()), (0.0, DONE)) if streams else answer()

    async def scenario() -> None:
        hole = HandlerTransport(black_hole)
        stage = Stage({"a": hole, "b": HandlerTransport(good)}, batch_limit=4, drops_suspects=True)
        async with stage.open():
            loop = asyncio.get_running_loop()

            async def one() -> tuple[float, Exchange]:
                exchange = await stage.post(completion(stream=streams))
                return loop.time(), exchange

            ended = await asyncio.gather(*(one() for _ in range(100)))
            ended += [await one() for _ in range(20)]
            assert {exchange.status for _, exchange in ended} == {200}
            assert all(exchange.complete for _, exchange in ended)
            assert len(hole.requests) <= 4
            assert set(stage.suspects) == {"a"}
            assert sum(at_s < CONNECT_S for at_s, _ in ended[:100]) >= 96
            assert stage.forwarder.retries["connect"] == len(hole.requests)

    run_virtual(scenario())


def test_when_no_connection_comes_anywhere_the_client_is_told_once() -> None:
    """T46: and neither is the time of every worker added up without end."""

    async def black_hole(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(CONNECT_S)
        raise httpx.ConnectTimeout("no answer", request=request)

    async def scenario() -> None:
        workers = {name: HandlerTransport(black_hole) for name in "abcd"}
        async with Stage(dict(workers), forward=ForwardConfig(retries_max=2)).open() as stage:
            exchange = await stage.post()
            assert (exchange.status, exchange.error["code"]) == (502, "worker_unreachable")
            assert sum(len(worker.requests) for worker in workers.values()) == 3
            assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


@pytest.mark.parametrize("queue_max", [10_000, 100])
def test_bursts_one_after_the_other_are_answered_to_the_last_request(queue_max: int) -> None:
    """T35: more at once than there are slots, then again; a full queue says 429, nothing else."""

    async def scenario() -> None:
        control = ControlConfig(policy=PolicyName.CENTRAL_FCFS, queue_max=queue_max)
        stage = Stage({"a": HandlerTransport(well)}, batch_limit=64, control=control)
        async with stage.open():
            for _ in range(3):
                burst = await asyncio.gather(*(stage.post() for _ in range(500)))
                statuses = Counter(exchange.status for exchange in burst)
                assert all(exchange.complete for exchange in burst)
                assert statuses[200] >= min(500, queue_max)
                assert statuses[200] + statuses[429] == 500
                assert (statuses[429] == 0) == (queue_max > 500)
                assert stage.queue.held == 0

    run_virtual(scenario())


async def well(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(0.1)
    return answer()
