"""SSE comments while a stream waits in the queue: on request of the operator, for streams only."""

from __future__ import annotations

import asyncio
import json

import httpx

from service.control.config import ControlConfig, PolicyName
from service.edge_config import EdgeConfig
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import DONE, HandlerTransport, Stage, answer, completion, event, stream

COMMENT = b": waiting\n\n"
EDGE = EdgeConfig(queue_comment_s=2.0)


def stage_with(handler: object, **knobs: object) -> Stage:
    control = ControlConfig(policy=PolicyName.CENTRAL_FCFS, **knobs)  # type: ignore[arg-type]
    worker = HandlerTransport(handler)  # type: ignore[arg-type]
    return Stage({"a": worker}, batch_limit=1, edge=EDGE, control=control)


async def seven_seconds(_: httpx.Request) -> httpx.Response:
    return stream((7.0, event("a")), (0.0, DONE))


async def one_after_the_other(stage: Stage) -> tuple[Exchange, Exchange]:
    """Two streams; the second waits for the slot of the first."""
    first = asyncio.create_task(stage.post(completion(stream=True)))
    await asyncio.sleep(0)
    second = await stage.post(completion(stream=True))
    return await first, second


def test_a_stream_that_waits_gets_comments_and_then_its_own_bytes() -> None:
    async def scenario() -> None:
        async with stage_with(seven_seconds).open() as stage:
            first, second = await one_after_the_other(stage)
        assert first.body == event("a") + DONE
        assert second.status == 200
        assert second.header("content-type") == "text/event-stream; charset=utf-8"
        assert second.header("x-request-id")
        assert [round(at_s) for at_s, chunk in second.chunks if chunk == COMMENT] == [2, 4, 6]
        assert second.body == 3 * COMMENT + event("a") + DONE
        assert stage.ends() == {"completed": 2}

    run_virtual(scenario())


def test_others_wait_in_silence() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(7.0)
        return answer()

    async def scenario() -> None:
        async with stage_with(slow).open() as stage:
            both = await asyncio.gather(stage.post(), stage.post())
        assert [json.loads(one.body)["id"] for one in both] == ["cmpl-1"] * 2

    run_virtual(scenario())


def last_event(exchange: Exchange) -> dict[str, object]:
    *_, last, end = exchange.body.split(b"\n\n")
    assert end == b""
    message: dict[str, object] = json.loads(last.removeprefix(b"data: "))
    return message


def test_a_refusal_after_comments_is_an_error_event() -> None:
    async def scenario() -> None:
        async with stage_with(seven_seconds, max_wait_s=5.0).open() as stage:
            _, second = await one_after_the_other(stage)
        assert second.body.startswith(2 * COMMENT)
        error = last_event(second)["error"]
        assert isinstance(error, dict)
        assert error["code"] == "waited_too_long"
        assert second.complete
        assert b"[DONE]" not in second.body

    run_virtual(scenario())


def test_a_workers_own_refusal_after_comments_is_an_event_too() -> None:
    answers = iter((stream((7.0, event("a")), (0.0, DONE)), httpx.Response(400, json={"error": 1})))

    async def handler(_: httpx.Request) -> httpx.Response:
        return next(answers)

    async def scenario() -> None:
        async with stage_with(handler).open() as stage:
            _, second = await one_after_the_other(stage)
        assert last_event(second) == {"error": 1}
        assert second.complete
        assert stage.ends() == {"completed": 1, "failed": 1}

    run_virtual(scenario())


def test_a_worker_that_breaks_after_comments_ends_the_stream_with_an_error_event() -> None:
    calls = 0

    async def handler(_: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            return stream((7.0, event("a")), (0.0, DONE))
        raise httpx.ReadError("reset")

    async def scenario() -> None:
        async with stage_with(handler).open() as stage:
            _, second = await one_after_the_other(stage)
        error = last_event(second)["error"]
        assert isinstance(error, dict)
        assert error["code"] == "worker_broke"
        assert second.complete

    run_virtual(scenario())


def test_a_client_that_leaves_while_it_gets_comments_never_reaches_a_worker() -> None:
    async def scenario() -> None:
        stage = stage_with(seven_seconds)
        async with stage.open():
            first = asyncio.create_task(stage.post(completion(stream=True)))
            await asyncio.sleep(0)
            exchange = Exchange()
            asyncio.get_running_loop().call_later(5.0, exchange.leave)
            await stage.post(completion(stream=True), exchange=exchange)
            await first
            assert exchange.body == 2 * COMMENT
            assert stage.ends() == {"completed": 1, "cancelled": 1}
            worker = stage.workers["a"]
            assert isinstance(worker, HandlerTransport)
            assert len(worker.requests) == 1

    run_virtual(scenario())
