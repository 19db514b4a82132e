"""Prefill on one worker, decode on another: each leg may fail, the client gets one end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from service.control.config import ControlConfig, HandoffConfig, PolicyName
from service.control.events import Role
from service.control.stats import PrefillStats
from service.forward_config import ForwardConfig
from service.prefill_leg import decode_body, prefill_body
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import (
    DONE,
    Handler,
    HandlerTransport,
    Stage,
    answer,
    completion,
    event,
    stream,
)

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 8180,
}
HANDOFF = HandoffConfig(prefill_tokens_per_s=1000.0)


def prefilling(params: object = PARAMS, *, after_s: float = 0.1) -> Handler:
    """A prefill worker: one token, and how to fetch the memory; each time a request of its own."""
    count = iter(range(1000))

    async def handler(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(after_s)
        told = params
        if isinstance(params, dict) and params:
            told = params | {"remote_request_id": f"cmpl-{next(count)}"}
        choice = {"index": 0, "text": "a", "finish_reason": "length"}
        body = {"id": "cmpl-1", "choices": [choice], "kv_transfer_params": told}
        return httpx.Response(200, json=body)

    return handler


async def whole(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(0.2)
    return answer()


async def streaming(_: httpx.Request) -> httpx.Response:
    return stream((0.1, event("a")), (0.1, event("b")), (0.1, DONE))


async def refusing(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def saying(status: int) -> Handler:
    async def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"error": {"message": "no", "code": status}})

    return handler


async def dropping(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(0.1)
    raise httpx.ReadError("reset")


class Pair:
    """Prefill workers p..., decode workers d..., and what each was sent."""

    def __init__(self, stage: Stage, sent: dict[str, HandlerTransport]) -> None:
        self.stage = stage
        self._sent = sent

    def bodies(self, worker: str) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self._sent[worker].requests]

    def cancelled(self, worker: str) -> int:
        return self._sent[worker].cancelled

    @property
    def prefillers(self) -> tuple[PrefillStats, ...]:
        return self.stage.queue.stats().router.prefillers

    @property
    def orphaned(self) -> int:
        return sum(one.orphaned_kv_tokens for one in self.prefillers)

    @property
    def charged(self) -> int:
        return sum(one.kv_tokens for one in self.prefillers)


def on_a_pair(
    scenario: Callable[[Pair], Awaitable[None]],
    workers: dict[str, Handler],
    *,
    handoff: HandoffConfig = HANDOFF,
    batch_limit: int = 8,
    forward: ForwardConfig | None = None,
) -> Pair:
    """Play a scenario; in the end nothing is held, and no prefill is unanswered."""
    sent = {name: HandlerTransport(handler) for name, handler in workers.items()}
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    stage = Stage(
        dict(sent),
        batch_limit=batch_limit,
        roles={name: roles[name[0]] for name in workers},
        control=ControlConfig(policy=PolicyName.CENTRAL_FCFS, handoff=handoff),
        forward=forward or ForwardConfig(),
    )
    pair = Pair(stage, sent)

    async def run() -> None:
        async with stage.open():
            await scenario(pair)
            assert [one.legs for one in pair.prefillers] == [0] * len(pair.prefillers)

    run_virtual(run())
    return pair


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [False, True])
def test_the_client_gets_the_second_leg_and_nothing_of_the_first(path: str, streams: bool) -> None:
    asked = (chat if "chat" in path else completion)(max_tokens=4, stream=streams)

    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post(asked, path=path)
        assert exchange.status == 200
        expected = event("a") + event("b") + DONE if streams else answer().content
        assert exchange.body == expected
        assert exchange.header("x-bidgate-worker") == "d0"
        assert exchange.header("x-bidgate-prefill-worker") == "p0"
        assert pair.stage.ends() == {"completed": 1}
        assert (pair.charged, pair.orphaned) == (0, 0)
        assert pair.stage.forwarder.handoffs == {"done": 1, "failed": 0, "missing": 0}

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": streaming if streams else whole})
    (first,), (second,) = pair.bodies("p0"), pair.bodies("d0")
    assert (first["stream"], first["max_tokens"]) == (False, 1)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second.pop("kv_transfer_params") == PARAMS | {"remote_request_id": "cmpl-0"}
    assert second == asked


def test_the_first_leg_asks_for_one_token_that_nothing_can_end_early() -> None:
    asked = completion(
        max_tokens=50,
        min_tokens=20,
        stop=["a"],
        stop_token_ids=[5],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.5,
    )
    first = json.loads(prefill_body(json.dumps(asked).encode()))
    assert first.pop("kv_transfer_params")["do_remote_decode"] is True
    assert first == {
        "model": "m",
        "prompt": "hello",
        "temperature": 0.5,
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
    }
    assert json.loads(prefill_body(b'{"messages":[],"max_completion_tokens":9}')) == {
        "messages": [],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": False,
        "kv_transfer_params": json.loads(prefill_body(b"{}"))["kv_transfer_params"],
    }


@pytest.mark.parametrize("body", [b'{"prompt": "x", "seed": 1e400}', b'{"prompt": "\\ud800"}'])
def test_bodies_that_only_python_reads_are_prefilled_too(body: bytes) -> None:
    assert json.loads(prefill_body(body))["max_tokens"] == 1


@pytest.mark.parametrize("body", [b"{}", b' { "a" : 1 } \n', b'{"a":{"b":"}"}}', b'{"big":1e400}'])
def test_parameters_are_added_to_the_clients_own_bytes(body: bytes) -> None:
    sent = decode_body(body, {"x": [1]})
    assert json.loads(sent) == {**json.loads(body), "kv_transfer_params": {"x": [1]}}
    assert sent.startswith(body.rstrip()[:-1].rstrip())


def test_what_a_client_says_about_kv_transfer_reaches_no_worker() -> None:
    theirs = {"do_remote_prefill": True, "remote_host": "evil"}

    async def scenario(pair: Pair) -> None:
        await pair.stage.post(completion(kv_transfer_params=theirs))
        await pair.stage.post(completion(kv_transfer_params=theirs, echo=True))

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": whole})
    (first,), (second, alone) = pair.bodies("p0"), pair.bodies("d0")
    assert first["kv_transfer_params"]["remote_host"] is None
    assert second["kv_transfer_params"]["remote_host"] == "127.0.0.1"
    assert "kv_transfer_params" not in alone


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"prompt": ["a", "b"]}, {"best_of": 2}, {"echo": True}, {"prompt_logprobs": 1}],
)
def test_what_cannot_be_split_goes_in_one_piece(fields: dict[str, Any]) -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post(completion(**fields))
        assert exchange.header("x-bidgate-prefill-worker") is None
        assert pair.stage.queue.stats().router.whole_on_decode == 1

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": whole})
    assert pair.bodies("p0") == []
    assert pair.bodies("d0") == [completion(**fields)]


@pytest.mark.parametrize("told", [None, {}, "yes"])
def test_missing_parameters_are_an_error_and_counted_never_a_silent_prefill(told: object) -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post()
        assert (exchange.status, exchange.error["code"]) == (502, "handoff_missing")
        assert pair.stage.ends() == {"failed": 1}
        page = (await pair.stage.send("GET", "/metrics")).body.decode()
        assert 'bidgate_handoffs_total{result="missing"} 1.0' in page
        assert pair.charged == 0

    pair = on_a_pair(scenario, {"p0": prefilling(told), "d0": whole})
    assert pair.bodies("d0") == []


@pytest.mark.parametrize(
    ("failing", "orphans", "reason"),
    [
        (refusing, 0, "connect"),
        (saying(503), 0, "prefill"),
        (saying(500), 0, "prefill"),
        (dropping, 1, "prefill"),
    ],
)
def test_a_first_leg_that_fails_is_tried_on_another_worker(
    failing: Handler, orphans: int, reason: str
) -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post()
        assert exchange.status == 200
        assert exchange.header("x-bidgate-prefill-worker") == "p1"
        # Two tokens in one block of 16 are charged where the memory may be kept.
        assert pair.orphaned == 16 * orphans
        assert pair.stage.forwarder.retries[reason] == 1
        assert pair.stage.forwarder.handoffs == {"done": 1, "failed": 1, "missing": 0}
        assert pair.stage.ends() == {"completed": 1}

    pair = on_a_pair(scenario, {"p0": failing, "p1": prefilling(), "d0": whole})
    assert len(pair.bodies("d0")) == 1


@pytest.mark.parametrize(
    ("failing", "status", "code"),
    [
        (refusing, 502, "worker_unreachable"),
        (dropping, 502, "worker_broke"),
        (saying(503), 503, 503),
    ],
)
def test_first_legs_that_all_fail_are_one_error_to_the_client(
    failing: Handler, status: int, code: object
) -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post(completion(stream=True))
        assert (exchange.status, exchange.error["code"]) == (status, code)
        assert pair.stage.ends() == {"failed": 1}

    workers = {name: failing for name in ("p0", "p1", "p2", "p3")}
    pair = on_a_pair(scenario, {**workers, "d0": whole})
    assert sum(len(pair.bodies(name)) for name in workers) == 3
    assert pair.bodies("d0") == []


def test_a_request_the_prefill_worker_finds_wrong_is_answered_in_its_words_once() -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post()
        assert (exchange.status, exchange.error["message"]) == (400, "no")
        assert pair.charged == 0
        assert pair.stage.ends() == {"failed": 1}

    pair = on_a_pair(scenario, {"p0": saying(400), "p1": prefilling(), "d0": whole})
    assert (pair.bodies("p1"), pair.bodies("d0")) == ([], [])


def test_a_prefill_worker_whose_answers_break_is_suspected_not_the_decode_worker() -> None:
    async def scenario(pair: Pair) -> None:
        for _ in range(4):
            await pair.stage.post()
        assert "p0" in pair.stage.suspects
        assert "d0" not in pair.stage.suspects

    on_a_pair(scenario, {"p0": dropping, "p1": prefilling(), "d0": whole})


def test_a_prefill_that_never_ends_is_given_up() -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post()
        assert (exchange.status, exchange.error["code"]) == (504, "worker_late")
        assert "p0" in exchange.error["message"]

    pair = on_a_pair(scenario, {"p0": prefilling(after_s=1e6), "d0": whole})
    assert pair.cancelled("p0") == 1


@pytest.mark.parametrize("failing", [refusing, saying(503)])
def test_a_decode_worker_that_does_not_take_it_never_sees_the_same_parameters_twice(
    failing: Handler,
) -> None:
    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post()
        assert exchange.status == 200
        assert exchange.header("x-bidgate-worker") == "d1"
        assert pair.orphaned == 16

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": failing, "d1": whole})
    assert len(pair.bodies("p0")) == 2
    told = [
        body["kv_transfer_params"]["remote_request_id"]
        for name in ("d0", "d1")
        for body in pair.bodies(name)
    ]
    assert told == ["cmpl-0", "cmpl-1"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_second_leg_that_breaks_is_never_sent_again(streams: bool) -> None:
    async def breaking(_: httpx.Request) -> httpx.Response:
        if streams:
            return stream((0.1, event("a")), (0.1, httpx.ReadError("reset")))
        raise httpx.ReadError("reset")

    async def scenario(pair: Pair) -> None:
        exchange = await pair.stage.post(completion(stream=streams))
        assert exchange.body.count(b"worker_broke") == 1
        assert pair.stage.ends() == {"failed": 1}
        # A token was seen: the memory was fetched. Else it may be there until its lease ends.
        assert pair.orphaned == (0 if streams else 16)

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": breaking, "d1": breaking})
    assert len(pair.bodies("d0")) + len(pair.bodies("d1")) == 1


def test_a_client_that_leaves_during_the_first_leg_sends_no_second() -> None:
    async def scenario(pair: Pair) -> None:
        exchange = Exchange()
        asyncio.get_running_loop().call_later(0.05, exchange.leave)
        await pair.stage.post(exchange=exchange)
        assert pair.stage.ends() == {"cancelled": 1}
        assert pair.charged == 0
        await asyncio.sleep(1.0)

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": whole})
    assert (pair.cancelled("p0"), pair.bodies("d0")) == (1, [])


def test_a_client_that_leaves_during_the_second_leg_leaves_an_orphan_until_the_lease_ends() -> None:
    async def scenario(pair: Pair) -> None:
        exchange = Exchange()
        asyncio.get_running_loop().call_later(0.2, exchange.leave)
        await pair.stage.post(exchange=exchange)
        assert pair.stage.ends() == {"cancelled": 1}
        assert (pair.charged, pair.orphaned) == (16, 16)
        await asyncio.sleep(31.0)
        # Time alone frees nothing in the books; the next decision does.
        await pair.stage.post(completion(stream=True))
        assert (pair.charged, pair.orphaned) == (0, 0)

    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": streaming})
    assert pair.cancelled("d0") <= 1


def test_no_prefill_is_sent_while_no_decode_slot_will_be_free() -> None:
    async def scenario(pair: Pair) -> None:
        posts = [asyncio.ensure_future(pair.stage.post()) for _ in range(6)]
        for _ in range(20):
            await asyncio.sleep(0.1)
            sent, done = len(pair.bodies("p0")), pair.stage.ends().get("completed", 0)
            assert sent - done <= 2
        assert [(await post).status for post in posts] == [200] * 6

    handoff = replace(HANDOFF, lead_max_s=0.0)
    on_a_pair(scenario, {"p0": prefilling(), "d0": whole}, handoff=handoff, batch_limit=2)


def test_with_a_hold_prompts_are_prefilled_before_a_slot_is_free_and_held() -> None:
    async def scenario(pair: Pair) -> None:
        posts = [asyncio.ensure_future(pair.stage.post()) for _ in range(3)]
        # One decodes from 0.1 to 0.3; each prefill takes 0.1, one after the other.
        await asyncio.sleep(0.25)
        assert len(pair.bodies("p0")) == 3
        assert len(pair.bodies("d0")) == 1
        assert [(await post).status for post in posts] == [200] * 3
        assert pair.stage.ends() == {"completed": 3}

    handoff = replace(HANDOFF, hold_s=5.0)
    workers = {"p0": prefilling(), "d0": whole}
    pair = on_a_pair(scenario, workers, handoff=handoff, batch_limit=1)
    assert pair.stage.forwarder.handoffs["done"] == 3


def test_a_hold_that_is_passed_prefills_again_and_never_uses_old_parameters() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(10.0)
        return answer()

    async def scenario(pair: Pair) -> None:
        posts = [asyncio.ensure_future(pair.stage.post()) for _ in range(2)]
        assert [(await post).status for post in posts] == [200] * 2
        assert pair.stage.queue.stats().router.holds_passed == 1

    handoff = replace(HANDOFF, hold_s=5.0)
    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": slow}, handoff=handoff, batch_limit=1)
    assert len(pair.bodies("p0")) == 3
    told = [body["kv_transfer_params"]["remote_request_id"] for body in pair.bodies("d0")]
    assert told == ["cmpl-0", "cmpl-2"]


def test_a_client_that_leaves_while_held_is_answered_by_nobody() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.0)
        return answer()

    async def scenario(pair: Pair) -> None:
        first = asyncio.ensure_future(pair.stage.post())
        await asyncio.sleep(0.01)
        exchange = Exchange()
        asyncio.get_running_loop().call_later(2.0, exchange.leave)
        await pair.stage.post(exchange=exchange)
        assert pair.orphaned == 16
        assert (await first).status == 200
        assert pair.stage.ends() == {"completed": 1, "cancelled": 1}

    handoff = replace(HANDOFF, hold_s=5.0)
    pair = on_a_pair(scenario, {"p0": prefilling(), "d0": slow}, handoff=handoff, batch_limit=1)
    assert len(pair.bodies("d0")) == 1


def test_a_fleet_whose_prefill_workers_are_all_down_is_not_ready() -> None:
    async def scenario(pair: Pair) -> None:
        ready = await pair.stage.send("GET", "/ready")
        assert (ready.status, json.loads(ready.body)["why"]) == (503, "no prefill worker is up")

    on_a_pair(scenario, {"d0": whole})
