"""Workers that refuse, break, stall or lie: each client gets one clear end, nothing runs twice."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from service.control.config import ControlConfig, PolicyName
from service.forward_config import ForwardConfig
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import (
    DONE,
    Handler,
    HandlerTransport,
    Stage,
    TimedStream,
    answer,
    completion,
    event,
    stream,
)


def refusing() -> HandlerTransport:
    async def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    return HandlerTransport(handler)


def answering(handler: Handler) -> HandlerTransport:
    return HandlerTransport(handler)


async def plain(_: httpx.Request) -> httpx.Response:
    return answer()


def error_frames(exchange: Exchange) -> list[dict[str, object]]:
    """The error events of a stream."""
    events = exchange.body.split(b"\n\n")
    return [json.loads(part[6:])["error"] for part in events if part.startswith(b'data: {"error"')]


def test_an_unreachable_worker_is_replaced_by_another_and_suspected() -> None:
    async def scenario() -> None:
        good = answering(plain)
        async with Stage({"a": refusing(), "b": good}).open() as stage:
            exchanges = [await stage.post() for _ in range(4)]
        assert [exchange.status for exchange in exchanges] == [200] * 4
        assert {exchange.header("x-bidgate-worker") for exchange in exchanges} == {"b"}
        assert len(good.requests) == 4
        assert stage.forwarder.retries["connect"] == len(stage.suspects) >= 1
        assert stage.ends() == {"completed": 4}

    run_virtual(scenario())


def test_when_no_worker_can_be_reached_the_answer_is_502_after_bounded_tries() -> None:
    async def scenario() -> None:
        workers = {name: refusing() for name in "abcd"}
        stage = Stage(dict(workers), forward=ForwardConfig(retries_max=2))
        async with stage.open():
            exchange = await stage.post()
        assert exchange.status == 502
        assert exchange.error["code"] == "worker_unreachable"
        assert sum(len(worker.requests) for worker in workers.values()) == 3
        assert max(len(worker.requests) for worker in workers.values()) == 1
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


@pytest.mark.parametrize("status", [429, 503])
def test_a_worker_too_busy_to_begin_is_replaced_by_another(status: int) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"error": {"message": "full", "code": status}})

    async def scenario() -> None:
        async with Stage({"a": answering(handler), "b": answering(plain)}).open() as stage:
            exchanges = [await stage.post() for _ in range(3)]
        assert [exchange.status for exchange in exchanges] == [200] * 3
        assert stage.forwarder.retries["busy"] >= 1

    run_virtual(scenario())


def test_busy_everywhere_passes_the_last_workers_own_answer() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json={"error": {"message": "full"}})

    async def scenario() -> None:
        async with Stage({name: answering(handler) for name in "abc"}).open() as stage:
            exchange = await stage.post()
        assert (exchange.status, exchange.error) == (503, {"message": "full"})

    run_virtual(scenario())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "error", [httpx.ReadError("reset"), httpx.RemoteProtocolError("garbage"), OSError("gone")]
)
def test_a_request_that_may_have_begun_is_never_sent_again(error: Exception, streams: bool) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3.0)
        raise error

    async def scenario() -> None:
        workers = {name: answering(handler) for name in "ab"}
        async with Stage(dict(workers)).open() as stage:
            exchange = await stage.post(completion(stream=streams))
        assert (exchange.status, exchange.error["code"]) == (502, "worker_broke")
        assert sum(len(worker.requests) for worker in workers.values()) == 1
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("last", "gap"), [(event("b"), b""), (event("b")[:20], b"\n\n")], ids=["whole", "cut"]
)
def test_a_stream_that_dies_ends_with_an_error_event_and_no_done(last: bytes, gap: bytes) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return stream((0.1, event("a")), (0.1, last), (0.1, httpx.ReadError("reset")))

    async def scenario() -> None:
        other = answering(plain)
        stage = Stage({"a": answering(handler), "b": other})
        stage.control = ControlConfig(policy=PolicyName.ROUND_ROBIN)
        async with stage.open():
            exchange = await stage.post(completion(stream=True))
        assert exchange.body.startswith(event("a") + last + gap + b'data: {"error":')
        assert [error["code"] for error in error_frames(exchange)] == ["worker_broke"]
        assert b"[DONE]" not in exchange.body
        assert exchange.complete
        assert other.requests == []
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_a_compressed_stream_that_dies_is_cut_and_nothing_is_written_into_it() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        response = stream((0.1, b"\x1f\x8b-not-really"), (0.1, httpx.ReadError("reset")))
        response.headers["content-encoding"] = "gzip"
        return response

    async def scenario() -> None:
        async with Stage({"a": answering(handler)}).open() as stage:
            exchange = await stage.post(completion(stream=True))
        assert exchange.body == b"\x1f\x8b-not-really"
        assert not exchange.complete
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_a_stream_that_just_ends_is_not_passed_off_as_complete() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return stream((0.1, event("a")))

    async def scenario() -> None:
        async with Stage({"a": answering(handler)}).open() as stage:
            exchange = await stage.post(completion(stream=True))
        assert [error["code"] for error in error_frames(exchange)] == ["worker_broke"]
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_an_error_event_of_the_engine_counts_as_failed_though_done_follows() -> None:
    death = b'data: {"error":{"message":"EngineCore died","code":500}}\n\n' + DONE

    async def handler(_: httpx.Request) -> httpx.Response:
        return stream((0.1, event("a")), (0.1, death))

    async def scenario() -> None:
        async with Stage({"a": answering(handler)}).open() as stage:
            exchange = await stage.post(completion(stream=True))
        assert exchange.body == event("a") + death
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


ENGINE_DEAD = b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n'
ENGINE_FULL = b'data: {"error":{"message":"too many requests queued","code":503}}\n\n'


@pytest.mark.parametrize(
    ("body", "suspects"), [(ENGINE_DEAD, ["a"]), (ENGINE_FULL, []), (event("x"), [])]
)
def test_two_streams_in_a_row_that_break_cast_suspicion_and_a_full_engine_does_not(
    body: bytes, suspects: list[str]
) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return stream((0.1, body), (0.0, DONE))

    async def scenario() -> None:
        async with Stage({"a": answering(handler)}).open() as stage:
            await stage.post(completion(stream=True))
            assert stage.suspects == []
            await stage.post(completion(stream=True))
        assert stage.suspects == suspects

    run_virtual(scenario())


@pytest.mark.parametrize(("status", "suspects"), [(500, ["a"]), (400, []), (503, [])])
def test_plain_answers_of_a_broken_engine_cast_suspicion_and_refusals_do_not(
    status: int, suspects: list[str]
) -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"error": {"code": status}})

    async def scenario() -> None:
        stage = Stage({"a": answering(handler)}, forward=ForwardConfig(retries_max=0))
        async with stage.open():
            for _ in range(2):
                await stage.post()
        assert stage.suspects == suspects

    run_virtual(scenario())


def test_a_good_answer_between_two_broken_ones_clears_the_suspicion() -> None:
    statuses = iter([500, 200, 500])

    async def handler(_: httpx.Request) -> httpx.Response:
        status = next(statuses)
        return answer() if status == 200 else httpx.Response(status, json={"error": {}})

    async def scenario() -> None:
        async with Stage({"a": answering(handler)}).open() as stage:
            for _ in range(3):
                await stage.post()
        assert stage.suspects == []

    run_virtual(scenario())


def test_a_plain_answer_that_breaks_off_is_cut_not_completed() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        parts = TimedStream([(0.1, b'{"id":'), (0.1, httpx.ReadError("reset"))])
        return httpx.Response(200, headers={"content-length": "100"}, stream=parts)

    async def scenario() -> None:
        async with Stage({"a": answering(handler)}).open() as stage:
            exchange = await stage.post()
        assert (exchange.status, exchange.complete) == (200, False)
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_a_worker_that_never_answers_is_given_up_with_504() -> None:
    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def scenario() -> None:
        worker = answering(handler)
        stage = Stage({"a": worker}, forward=ForwardConfig(first_byte_timeout_s=30.0))
        async with stage.open():
            exchange = await stage.post()
            assert asyncio.get_running_loop().time() == 30.0
        assert (exchange.status, exchange.error["code"]) == (504, "worker_late")
        assert worker.cancelled == 1
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_a_stream_that_stalls_ends_with_an_error_event() -> None:
    response = stream((0.5, event("a")), (59.0, event("b")), (1000.0, event("c")))

    async def handler(_: httpx.Request) -> httpx.Response:
        return response

    async def scenario() -> None:
        stage = Stage({"a": answering(handler)}, forward=ForwardConfig(stall_timeout_s=60.0))
        async with stage.open():
            exchange = await stage.post(completion(stream=True))
            assert asyncio.get_running_loop().time() == 119.5
        assert [error["code"] for error in error_frames(exchange)] == ["worker_late"]
        assert exchange.complete
        assert isinstance(response.stream, TimedStream)
        assert response.stream.closed
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_a_hung_worker_does_not_hold_up_the_others() -> None:
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(100.0)
        return answer()

    async def scenario() -> None:
        stage = Stage({"a": answering(hang), "b": answering(plain)}, batch_limit=1)
        async with stage.open():
            slow = asyncio.create_task(stage.post())
            await asyncio.sleep(1.0)
            quick = [await stage.post() for _ in range(5)]
            assert asyncio.get_running_loop().time() == 1.0
            assert {exchange.header("x-bidgate-worker") for exchange in quick} == {"b"}
            await slow

    run_virtual(scenario())
