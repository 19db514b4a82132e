"""Second tries are for requests that no worker took, within a budget that a fleet can bear."""

from __future__ import annotations

import asyncio

import httpx
from hypothesis import given
from hypothesis import strategies as st

from service.forward_config import ForwardConfig
from service.retry_budget import RetryBudget
from tests.clock import run_virtual
from tests.service.stage import HandlerTransport, Stage, answer


async def busy(_: httpx.Request) -> httpx.Response:
    return httpx.Response(503, json={"error": {"message": "full"}})


def test_when_every_worker_is_busy_the_tries_stay_near_one_a_request() -> None:
    async def scenario() -> None:
        workers = {name: HandlerTransport(busy) for name in "abcd"}
        forward = ForwardConfig(retry_share=0.1, retry_burst=5.0)
        async with Stage(dict(workers), forward=forward).open() as stage:
            for _ in range(200):
                exchange = await stage.post()
                assert (exchange.status, exchange.error) == (503, {"message": "full"})
            tries = sum(len(worker.requests) for worker in workers.values())
            assert 200 + 20 <= tries <= 200 + 5 + 20
            assert stage.forwarder.retries["busy"] == tries - 200
            assert stage.forwarder.retries["over_budget"] >= 175

    run_virtual(scenario())


def test_a_refused_connection_needs_no_budget() -> None:
    async def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async def fine(_: httpx.Request) -> httpx.Response:
        return answer()

    async def scenario() -> None:
        workers = {"a": HandlerTransport(refuse), "b": HandlerTransport(fine)}
        forward = ForwardConfig(retry_share=0.0, retry_burst=0.0)
        async with Stage(dict(workers), forward=forward).open() as stage:
            answers = await asyncio.gather(*(stage.post() for _ in range(6)))
        assert [exchange.status for exchange in answers] == [200] * 6
        assert stage.forwarder.retries["connect"] > 0

    run_virtual(scenario())


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 20.0),
    st.lists(st.booleans(), max_size=300),
)
def test_over_any_time_second_tries_are_within_the_burst_and_the_share(
    share: float, burst: float, steps: list[bool]
) -> None:
    budget = RetryBudget(share=share, burst=burst)
    requests = tries = 0
    for is_request in steps:
        if is_request:
            budget.earn()
            requests += 1
        else:
            tries += budget.spend()
        assert tries <= burst + share * requests + 1e-6
