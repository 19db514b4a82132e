"""A full queue refuses the newest of its lowest tier for a newcomer of a higher one; no other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control import (
    Arrived,
    Command,
    ControlConfig,
    HandoffConfig,
    Left,
    Outcome,
    PolicyName,
    Prefilled,
    Refusal,
    Request,
    Role,
    Router,
    TenantConfig,
    WorkerSpec,
)
from service.control.displacement import DISPLACED_MAX, Bid, lower, newest_of_the_lowest
from service.control.tiers import LOWEST_VALUE, tiers
from service.control.waiting import WaitingRoom
from tests.control.driving import POLICIES, SMALL, accounted, ask, refusals, router_with, spec

FULL = range(SMALL.queue_max)
SHARED = replace(SMALL, tenants=TenantConfig(weights="*=1"))


def full_of(value: float = 1.0, config: ControlConfig = SMALL, **fields: object) -> Router:
    """A router whose queue is full of requests of one value; its worker has no free slot."""
    router = router_with(config, spec(batch_limit=1))
    router.handle(ask("running", decode_tokens_hint=50), 0.0)
    router.tick(0.0)
    for i in FULL:
        assert router.handle(ask(f"r{i}", value=value, **fields), 0.0) == []
    router.tick(0.0)
    return router


def come(router: Router, request_id: str, value: float, **fields: object) -> list[tuple[str, str]]:
    """A request arrives; who is refused, and why."""
    gone = refusals(router.handle(ask(request_id, value=value, **fields), 0.0))
    assert accounted(router, 0.0)
    return gone


def test_the_newest_of_the_lowest_tier_goes_and_never_an_equal() -> None:
    router = full_of()
    assert come(router, "equal", 1.0) == [("equal", "queue_full")]
    assert come(router, "the same tier", 1.9) == [("the same tier", "queue_full")]
    assert come(router, "less", 0.5) == [("less", "queue_full")]
    assert come(router, "more", 2.0) == [("r5", "displaced")]
    assert come(router, "even more", 8.0) == [("r4", "displaced")]
    assert router.stats(0.0).waiting == SMALL.queue_max
    refused = router.stats(0.0).refused
    assert (refused[Refusal.QUEUE_FULL], refused[Refusal.DISPLACED]) == (3, 2)


def test_those_that_displaced_others_do_not_go_before_them() -> None:
    router = full_of()
    gone = [come(router, f"high{i}", 4.0)[0] for i in range(SMALL.queue_max + 1)]
    assert [one for one, _ in gone] == ["r5", "r4", "r3", "r2", "r1", "r0", "high6"]
    assert gone[-1] == ("high6", "queue_full")


def test_who_was_displaced_is_nowhere_any_more() -> None:
    router = full_of()
    come(router, "more", 2.0)
    with pytest.raises(KeyError):
        router.handle(Left("r5", Outcome.CANCELLED), 0.0)
    assert come(router, "r5", 2.0) == [("r4", "displaced")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "unknown"}, "queue_full"),
        ({"prompt": 100_000}, "queue_full"),
        ({"max_wait_s": 0.0}, "queue_full"),
    ],
    ids=["an unknown model", "too large", "does not wait"],
)
def test_nobody_goes_for_a_newcomer_that_would_be_refused_all_the_same(
    fields: dict[str, object], reason: str
) -> None:
    router = router_with(SMALL, spec(batch_limit=1, models=frozenset({"m"})))
    router.handle(ask("running", decode_tokens_hint=50, model="m"), 0.0)
    router.tick(0.0)
    for i in FULL:
        router.handle(ask(f"r{i}", model="m"), 0.0)
    assert come(router, "high", 64.0, **{"model": "m", **fields}) == [("high", reason)]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "forward"])
def test_only_policies_that_know_values_look_at_them(name: str) -> None:
    router = router_with(POLICIES[name])
    for i in FULL:
        router.handle(ask(f"r{i}", value=0.5), 0.0)
    knows = POLICIES[name].policy is PolicyName.ONLINE_LP
    assert come(router, "high", 8.0) == [("r5", "displaced") if knows else ("high", "queue_full")]


def test_it_can_be_switched_off_and_on_while_the_router_lives() -> None:
    router = full_of()
    router.reconfigure(replace(SMALL, displace=False))
    assert come(router, "high", 8.0) == [("high", "queue_full")]
    router.reconfigure(SMALL)
    assert come(router, "high", 8.0) == [("r5", "displaced")]


def test_a_shorter_queue_displaces_one_for_one_until_it_is_short_enough() -> None:
    router = full_of()
    router.reconfigure(replace(SMALL, queue_max=2))
    assert come(router, "high", 8.0) == [("r5", "displaced")]
    assert come(router, "equal", 1.0) == [("equal", "queue_full")]
    assert router.stats(0.0).waiting == SMALL.queue_max


def test_a_tenant_over_its_share_makes_room_for_one_below_it() -> None:
    router = router_with(SHARED, spec(batch_limit=1))
    router.handle(ask("running", decode_tokens_hint=50, tenant="greedy"), 0.0)
    router.tick(0.0)
    for i in FULL:
        router.handle(ask(f"r{i}", tenant="greedy"), 0.0)
    assert come(router, "own", 1.0, tenant="greedy") == [("own", "queue_full")]
    assert come(router, "modest", 1.0, tenant="modest") == [("r5", "displaced")]
    # Whatever it says that its requests are worth, it had its share.
    assert come(router, "costly", 2.0, tenant="greedy") == [("r4", "displaced")]
    assert come(router, "modest too", 1.0, tenant="modest") == [("r3", "displaced")]


def test_without_weights_tenants_make_no_difference() -> None:
    router = full_of(tenant="greedy")
    assert come(router, "modest", 1.0, tenant="modest") == [("modest", "queue_full")]


def worker(worker_id: str, role: Role) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id, batch_limit=2, kv_capacity_tokens=1000, block_tokens=1, role=role
    )


def test_who_was_prefilled_ahead_stays_and_nothing_is_left_on_its_prefill_worker() -> None:
    handoff = HandoffConfig(prefill_tokens_max=1000, hold_s=10.0, lease_s=30.0)
    config = replace(SMALL, handoff=handoff, queue_max=1)
    router = router_with(config, worker("p0", Role.PREFILL), worker("d0", Role.DECODE))
    for request_id in "abc":
        router.handle(ask(request_id, decode_tokens_hint=20, value=0.25), 0.0)
        router.tick(0.0)
        router.handle(Prefilled(request_id), 0.1)
        router.tick(0.1)
    assert router.stats(0.1).waiting == 1, "c has its prompt computed and waits for a slot"
    assert refusals(router.handle(ask("d", value=64.0), 0.1)) == [("d", "queue_full")]
    router.handle(Left("c", Outcome.CANCELLED), 0.2)
    assert router.handle(ask("low", value=0.25), 0.2) == []
    assert refusals(router.handle(ask("e", value=64.0), 0.2)) == [("low", "displaced")]
    assert accounted(router, 0.2)


def random_steps(rng: np.random.Generator, count: int) -> Iterator[Request]:
    for i in range(count):
        yield Request(
            request_id=f"q{i}",
            arrival_s=0.01 * i,
            prompt_tokens=int(rng.integers(1, 30)),
            decode_tokens_hint=int(rng.integers(1, 30)),
            value=float(2.0 ** rng.integers(-3, 4)),
            tenant=f"t{rng.integers(0, 3)}",
        )


@pytest.mark.parametrize("config", [SMALL, SHARED], ids=["values", "tenants"])
def test_a_queue_that_is_not_full_is_decided_alike_with_it_and_without(
    config: ControlConfig,
) -> None:
    told: list[list[Command]] = []
    for displace in (True, False):
        router = router_with(replace(config, queue_max=10_000, displace=displace), spec())
        commands: list[Command] = []
        running: list[str] = []
        for step, request in enumerate(random_steps(np.random.default_rng(3), 200)):
            commands += router.handle(Arrived(request), request.arrival_s)
            begun = router.tick(request.arrival_s)
            commands += begun
            running += [one.request_id for one in begun]
            if step % 3 == 0 and running:
                router.handle(Left(running.pop(0), Outcome.COMPLETED, 5), request.arrival_s)
        told.append(commands)
    assert told[0] == told[1]
    assert len(told[0]) > 50


WORTHS = st.lists(
    st.sampled_from([2.0**-100, 2.0**-64, 0.1, 0.5, 0.75, 1.0, 1.5, 64.0]), max_size=12
)


@given(
    worths=WORTHS, own=st.sampled_from([2.0**-100, 0.5, 1.0, 1.9, 64.0]), seed=st.integers(0, 99)
)
def test_the_choice_is_that_of_a_plain_search(worths: list[float], own: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    worth = np.array(worths, dtype=np.float64)
    order = rng.permutation(worth.size).astype(np.float64)
    able = lower(worth, own)
    tier = [math.floor(math.log2(max(one, LOWEST_VALUE))) for one in worths]
    assert tier == tiers(worth).tolist()
    own_tier = math.floor(math.log2(max(own, LOWEST_VALUE)))
    assert able.tolist() == [one < own_tier for one in tier]
    expected = min(
        (row for row in range(worth.size) if able[row]),
        key=lambda row: (tier[row], -order[row]),
        default=None,
    )
    assert newest_of_the_lowest(worth, order, able) == expected


def test_an_arrival_at_a_full_queue_looks_at_no_request_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand wait: an arrival costs a few array operations, not a step for each of them."""
    router = router_with(replace(SMALL, queue_max=10_000))
    for i in range(10_000):
        router.handle(ask(f"r{i}", value=0.5 if i % 2 else 1.0), 0.0)
    looks = 0

    class Counting(dict[str, object]):
        def __getitem__(self, key: str) -> object:
            nonlocal looks
            looks += 1
            return super().__getitem__(key)

        def __iter__(self) -> Iterator[str]:
            raise AssertionError("the queue is walked through")

        def values(self) -> object:  # type: ignore[override]
            raise AssertionError("the queue is walked through")

        items = values  # type: ignore[assignment]

    room: WaitingRoom = router._waiting
    monkeypatch.setattr(room, "entries", Counting(room.entries))
    assert come(router, "equal", 0.5) == [("equal", "queue_full")]
    assert come(router, "high", 1.0) == [("r9999", "displaced")]
    assert looks <= 4


def test_bytes_are_given_up_by_the_newest_of_the_lowest_tiers_and_only_if_that_is_enough() -> None:
    router = router_with(replace(SMALL, queue_max=100), spec(batch_limit=1))
    for i in range(4):
        router.handle(ask(f"low{i}", value=0.25, body_bytes=100), 0.0)
        router.handle(ask(f"mid{i}", value=1.0, body_bytes=100), 0.0)
        router.handle(ask(f"nothing{i}", value=0.25), 0.0)

    def room(value: float, size: int) -> list[str]:
        gone = refusals(router.make_room(Bid(value=value, tenant=""), size, 0.0))
        assert {reason for _, reason in gone} <= {"displaced"}
        assert accounted(router, 0.0)
        return [request_id for request_id, _ in gone]

    assert room(0.25, 1) == []
    assert room(1.0, 401) == [], "not enough even if all went"
    assert room(1.0, 150) == ["low3", "low2"]
    assert room(4.0, 250) == ["low1", "low0", "mid3"]
    assert room(4.0, 301) == []


def test_no_more_than_a_few_make_room_for_one() -> None:
    router = router_with(replace(SMALL, queue_max=1000), spec(batch_limit=1))
    for i in range(2 * DISPLACED_MAX):
        router.handle(ask(f"r{i}", body_bytes=1), 0.0)
    assert router.make_room(Bid(value=2.0, tenant=""), DISPLACED_MAX + 1, 0.0) == []
    assert len(router.make_room(Bid(value=2.0, tenant=""), DISPLACED_MAX, 0.0)) == DISPLACED_MAX
