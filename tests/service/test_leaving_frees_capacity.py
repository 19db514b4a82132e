"""A client may leave at any moment: what it held is free at once and the worker is told."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from service.forward_config import ForwardConfig
from tests.asgi import Exchange, http_scope
from tests.clock import run_virtual
from tests.service.stage import (
    DONE,
    HandlerTransport,
    Stage,
    TimedStream,
    answer,
    completion,
    event,
    stream,
)


async def _leave_at(stage: Stage, leave_s: float, streams: bool) -> Exchange:
    exchange = Exchange()
    asyncio.get_running_loop().call_later(leave_s, exchange.leave)
    return await stage.post(completion(stream=streams), exchange=exchange)


@pytest.mark.parametrize("streams", [False, True])
def test_before_the_first_byte_the_worker_is_told_at_once(streams: bool) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(10.0)
        return answer()

    async def scenario() -> None:
        worker = HandlerTransport(handler)
        async with Stage({"a": worker}).open() as stage:
            exchange = await _leave_at(stage, 0.3, streams)
            assert asyncio.get_running_loop().time() == 0.3
            assert worker.cancelled == 1
            assert (exchange.status, stage.ends()) == (0, {"cancelled": 1})

    run_virtual(scenario())


def test_in_the_middle_of_a_stream_the_worker_is_told_at_once() -> None:
    response = stream((0.1, event("a")), (10.0, event("b")), (0.0, DONE))

    async def handler(_: httpx.Request) -> httpx.Response:
        return response

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            await _leave_at(stage, 2.0, streams=True)
            assert asyncio.get_running_loop().time() == 2.0
            assert isinstance(response.stream, TimedStream)
            assert response.stream.closed
            assert stage.ends() == {"cancelled": 1}

    run_virtual(scenario())


def test_in_the_middle_of_a_plain_body_the_worker_is_told_at_once() -> None:
    parts = TimedStream([(0.1, b"{"), (10.0, b"}")])

    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "application/json"}, stream=parts)

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            await _leave_at(stage, 2.0, streams=False)
            assert asyncio.get_running_loop().time() == 2.0
            assert parts.closed
            assert stage.ends() == {"cancelled": 1}

    run_virtual(scenario())


def test_in_the_queue_it_never_reaches_a_worker() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(5.0)
        return answer()

    async def scenario() -> None:
        worker = HandlerTransport(handler)
        async with Stage({"a": worker}, batch_limit=1).open() as stage:
            first = asyncio.create_task(stage.post())
            await asyncio.sleep(0.5)
            await _leave_at(stage, 1.0, streams=True)
            third = await stage.post()
            await first
            assert third.status == 200
            assert len(worker.requests) == 2
            assert stage.ends() == {"completed": 2, "cancelled": 1}

    run_virtual(scenario())


def test_leaving_after_the_end_changes_nothing() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return stream((0.1, event("a") + DONE))

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            exchange = Exchange()
            await stage.post(completion(stream=True), exchange=exchange)
            exchange.leave()
            await asyncio.sleep(1.0)
            assert stage.ends() == {"completed": 1}

    run_virtual(scenario())


def test_a_client_that_stops_reading_is_dropped_after_its_bound() -> None:
    response = stream(*((0.01, event("a" * 1000)) for _ in range(100)))

    async def handler(_: httpx.Request) -> httpx.Response:
        return response

    async def scenario() -> None:
        worker = HandlerTransport(handler)
        stage = Stage({"a": worker}, forward=ForwardConfig(client_stall_timeout_s=20.0))
        written = 0

        async def unread(scope: Scope, receive: Receive, send: Send) -> None:
            async def stuck(message: Message) -> None:
                nonlocal written
                written += len(message.get("body", b""))
                if written > 5000:
                    await asyncio.Event().wait()
                await send(message)

            await stage.app(scope, receive, stuck)

        async with stage.open():
            body = b'{"model":"m","prompt":"x","stream":true}'
            await Exchange().play(unread, http_scope("POST", "/v1/completions"), [body])
            assert 20.0 < asyncio.get_running_loop().time() < 20.2
            assert stage.ends() == {"cancelled": 1}
            assert isinstance(response.stream, TimedStream)
            assert response.stream.closed

    run_virtual(scenario())


def test_many_clients_leaving_at_all_moments_leave_nothing_behind() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.2)
        return stream(*((0.05, event()) for _ in range(10)), (0.0, DONE))

    async def scenario() -> None:
        stage = Stage({name: HandlerTransport(handler) for name in "ab"}, batch_limit=6)
        async with stage.open():

            async def come_and_go(number: int) -> None:
                await asyncio.sleep(0.05 * number)
                await _leave_at(stage, 0.037 * (number % 40), streams=True)

            await asyncio.gather(*(come_and_go(number) for number in range(200)))
            ends = stage.ends()
            assert sum(ends.values()) == 200
            assert ends["cancelled"] > 50
            assert ends["completed"] > 20
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.sleep(0)
            assert len([task for task in tasks if not task.done()]) <= 1  # the queue's own

    run_virtual(scenario())
