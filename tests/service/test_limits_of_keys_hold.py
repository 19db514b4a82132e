"""What a key may have inside and send in a minute: requests, whatever their route and fate."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.auth import Bucket, Limit
from service.auth_settings import AuthConfig
from service.errors import RateLimitedError
from tests.asgi import Exchange
from tests.service.doors import a_door, a_key, bearer, knock, run_stage
from tests.service.stage import DONE, HandlerTransport, Stage, completion, event, stream


def test_a_key_has_at_most_its_requests_inside_and_gets_each_place_back() -> None:
    limited = a_key("one", tenant="t", requests_max=2)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        async with asyncio.TaskGroup() as group:
            long = [
                group.create_task(stage.post(completion(stream=True), headers=bearer("one")))
                for _ in range(2)
            ]
            await asyncio.sleep(1.0)
            third = await stage.post(completion(), headers=bearer("one"))
            assert (third.status, third.error["code"]) == (429, "rate_limit_exceeded")
            assert int(third.header("retry-after") or 0) >= 1
            assert stage.door.running() == {"t": 2, "": 0}
            other = await stage.post(completion(stream=True), headers=bearer("two"))
            assert other.status == 200
        assert [task.result().status for task in long] == [200, 200]
        assert stage.door.running() == {"t": 0, "": 0}
        assert (await stage.post(completion(stream=True), headers=bearer("one"))).status == 200

    run_stage(
        (limited, a_key("two")),
        scenario,
        lambda: stream((3.0, event()), (0.1, DONE)),
    )


def test_requests_that_fail_or_are_left_give_their_places_back() -> None:
    limited = a_key("one", requests_max=1)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert (await stage.post(b"{", headers=bearer("one"))).status == 400
        exchange = Exchange()
        task = asyncio.get_running_loop().create_task(
            stage.post(completion(stream=True), headers=bearer("one"), exchange=exchange)
        )
        await asyncio.sleep(1.0)
        exchange.leave()
        await task
        assert stage.door.running() == {"": 0}
        assert (await stage.post(completion(stream=True), headers=bearer("one"))).status == 200

    run_stage((limited,), scenario, lambda: stream((3.0, event()), (0.1, DONE)))


def test_a_rate_of_requests_is_kept_and_retry_after_is_true() -> None:
    limited = a_key("one", tenant="t", requests_per_minute=6)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        async def status() -> int:
            return (await stage.post(completion(), headers=bearer("one"))).status

        assert [await status() for _ in range(7)] == [*[200] * 6, 429]
        refused = await stage.post(completion(), headers=bearer("one"))
        wait_s = int(refused.header("retry-after") or 0)
        assert 1 <= wait_s <= 10
        await asyncio.sleep(wait_s)
        assert [await status(), await status()] == [200, 429]
        assert stage.door.counts.limited[("t", Limit.REQUESTS_PER_MINUTE)] == 3
        models = await stage.send("GET", "/v1/models", headers=bearer("one"))
        assert models.status == 200

    run_stage((limited,), scenario)


WORK = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    *((method, "/v1/things/7") for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")),
]


@pytest.mark.parametrize(("method", "path"), WORK)
def test_limits_hold_for_whatever_goes_to_a_worker(method: str, path: str) -> None:
    body = json.dumps(completion()).encode() if method == "POST" else b""

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        sent = [await stage.send(method, path, body, headers=bearer("one")) for _ in range(5)]
        assert [exchange.status for exchange in sent] == [200, 200, 200, 429, 429]
        assert len(worker.requests) == 3
        assert stage.door.counts.limited == {("t", Limit.REQUESTS_PER_MINUTE): 2}

    run_stage((a_key("one", tenant="t", requests_per_minute=3),), scenario)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_requests_inside_count_whatever_their_method(method: str) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        sends = [stage.send(method, "/v1/things/7", headers=bearer("one")) for _ in range(3)]
        done = await asyncio.gather(*sends)
        assert sorted(exchange.status for exchange in done) == [200, 429, 429]
        assert stage.door.running() == {"": 0}

    run_stage((a_key("one", requests_max=1),), scenario, lambda: stream((1.0, b"x")))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/load_lora_adapter", 403),
        ("GET", "/no/such/route", 404),
    ],
)
def test_what_no_worker_sees_counts_against_no_limit(method: str, path: str, status: int) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        sent = [await stage.send(method, path, headers=bearer("one")) for _ in range(4)]
        assert {exchange.status for exchange in sent} == {status}
        assert (await stage.post(completion(), headers=bearer("one"))).status == 200

    run_stage((a_key("one", requests_per_minute=1),), scenario)


@given(
    st.floats(1.0, 1e4),
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1e4)), max_size=30),
)
def test_a_bucket_never_lets_more_through_than_its_rate(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    bucket = Bucket(per_minute, 0.0)
    now_s = spent = 0.0
    for pause_s, amount in steps:
        now_s += pause_s
        if bucket.wait_s(1.0, now_s) == 0.0:
            # What was let in before this one is within the rate, a minute's worth ahead.
            assert spent <= per_minute * (1.0 + now_s / 60.0) * (1.0 + 1e-9) + 1e-6
            bucket.spend(amount, now_s)
            spent += amount


@given(st.floats(1.0, 1e4), st.floats(0.0, 1e5), st.floats(0.0, 1e3))
def test_the_wait_a_bucket_names_is_long_enough(
    per_minute: float, spent: float, at_s: float
) -> None:
    bucket = Bucket(per_minute, 0.0)
    bucket.spend(spent, at_s)
    wait_s = bucket.wait_s(1.0, at_s)
    assert bucket.wait_s(1.0, at_s + wait_s + 1e-3) == 0.0


def test_new_limits_do_not_forgive_what_was_used() -> None:
    key = a_key("one", requests_per_minute=2)
    door = a_door(key)
    assert [knock(door, "/v1/completions", "one") for _ in range(3)] == [200, 200, 429]
    more = a_key("one", requests_per_minute=100)
    door.configure(AuthConfig(), (more,), 0.0)
    assert knock(door, "/v1/completions", "one") == 429
    door.configure(AuthConfig(), (a_key("two"),), 0.0)
    assert knock(door, "/v1/completions", "one") == 401


def test_limits_are_refusals_not_errors() -> None:
    assert RateLimitedError("x").status == 429
    assert RateLimitedError("x").reply.retry
