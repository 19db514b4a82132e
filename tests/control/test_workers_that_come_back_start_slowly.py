"""A worker that comes up beside others is cold and may fail again: it gets its slots bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.control import Router, WorkerChanged, WorkerGone, WorkerJoined
from tests.control.driving import (
    CENTRAL,
    DOWN,
    POLICIES,
    SMALL,
    UP,
    ask,
    refusals,
    router_with,
    spec,
    starts,
)

SLOW = replace(SMALL, slow_start_s=4.0, queue_max=100, max_wait_s=100.0)
SLOTS = 8


def busy_beside_a_newcomer(router: Router, now_s: float) -> None:
    """Fill w0, let w1 come back, and let more requests wait than there are slots."""
    router.handle(WorkerChanged("w1", DOWN), now_s)
    for number in range(3 * SLOTS):
        router.handle(ask(f"r{number}", now_s, prompt=1), now_s)
    assert {worker for _, worker in starts(router.tick(now_s))} == {"w0"}
    router.handle(WorkerChanged("w1", UP), now_s)


def started_on_w1(router: Router, now_s: float) -> int:
    return sum(worker == "w1" for _, worker in starts(router.tick(now_s)))


@pytest.mark.parametrize("policy", CENTRAL)
def test_its_slots_open_one_after_the_other_and_then_all_are_open(policy: str) -> None:
    config = replace(POLICIES[policy], slow_start_s=4.0, queue_max=100, max_wait_s=100.0)
    router = router_with(config, spec(batch_limit=SLOTS), spec("w1", batch_limit=SLOTS))
    busy_beside_a_newcomer(router, 1.0)
    assert started_on_w1(router, 1.0) == 1
    total = 1
    for now_s, most in ((2.0, 2), (3.0, 4), (4.0, 6)):
        total += started_on_w1(router, now_s)
        assert total <= most
    total += started_on_w1(router, 5.1)
    total += started_on_w1(router, 5.2)
    assert total == SLOTS


@pytest.mark.parametrize(("slow_start_s", "open_at_once"), [(0.0, 8), (1.0, 4), (50.0, 1)])
def test_another_time_holds_for_a_worker_that_is_starting_too(
    slow_start_s: float, open_at_once: int
) -> None:
    router = router_with(SLOW, spec(batch_limit=SLOTS), spec("w1", batch_limit=SLOTS))
    busy_beside_a_newcomer(router, 1.0)
    assert started_on_w1(router, 1.0) == 1
    policy = router.policy
    router.reconfigure(replace(SLOW, slow_start_s=slow_start_s))
    assert router.policy is policy
    assert 1 + started_on_w1(router, 1.5) == open_at_once


@pytest.mark.parametrize("policy", CENTRAL)
def test_a_worker_that_is_new_to_the_fleet_starts_slowly_too(policy: str) -> None:
    """As the fleet makes it known: down until it has been measured, then up."""
    config = replace(POLICIES[policy], slow_start_s=4.0, queue_max=100, max_wait_s=100.0)
    router = router_with(config, spec(batch_limit=SLOTS))
    for number in range(3 * SLOTS):
        router.handle(ask(f"r{number}", 1.0, prompt=1), 1.0)
    assert {worker for _, worker in starts(router.tick(1.0))} == {"w0"}
    router.handle(WorkerJoined(spec("w1", batch_limit=SLOTS), DOWN), 1.0)
    assert started_on_w1(router, 1.0) == 0
    router.handle(WorkerChanged("w1", UP), 2.0)
    total = started_on_w1(router, 2.0)
    assert total == 1
    for now_s, most in ((3.0, 2), (4.0, 4), (5.0, 6)):
        total += started_on_w1(router, now_s)
        assert total <= most
    total += started_on_w1(router, 6.1) + started_on_w1(router, 6.2)
    assert total == SLOTS


def test_a_tick_comes_by_itself_while_slots_open() -> None:
    router = router_with(SLOW, spec(batch_limit=SLOTS), spec("w1", batch_limit=SLOTS))
    busy_beside_a_newcomer(router, 1.0)
    router.tick(1.0)
    due_s = router.next_tick_s(1.0)
    assert due_s is not None
    assert due_s <= 1.1


def test_a_worker_that_comes_back_alone_takes_all_at_once() -> None:
    router = router_with(SLOW, spec(batch_limit=SLOTS))
    router.handle(WorkerChanged("w0", DOWN), 1.0)
    for number in range(SLOTS):
        router.handle(ask(f"r{number}", 1.0, prompt=1), 1.0)
    router.tick(1.0)
    router.handle(WorkerChanged("w0", UP), 2.0)
    assert len(starts(router.tick(2.0))) == SLOTS


def test_a_fleet_that_starts_is_not_slowed() -> None:
    router = Router(SLOW)
    for name in ("w0", "w1"):
        router.handle(WorkerJoined(spec(name, batch_limit=SLOTS)), 0.0)
    for number in range(2 * SLOTS):
        router.handle(ask(f"r{number}", prompt=1), 0.0)
    assert len(starts(router.tick(0.0))) == 2 * SLOTS


def test_a_worker_that_left_while_starting_leaves_the_others_as_they_are() -> None:
    router = router_with(SLOW, spec(batch_limit=SLOTS), spec("w1", batch_limit=SLOTS))
    busy_beside_a_newcomer(router, 1.0)
    router.handle(WorkerGone("w1"), 1.5)
    assert starts(router.tick(1.5)) == []


def test_a_burst_at_one_instant_is_counted_after_what_can_start_at_once() -> None:
    config = replace(SMALL, queue_max=2)
    router = router_with(config, spec(batch_limit=4))
    refused = [refusals(router.handle(ask(f"r{n}", prompt=1), 0.0)) for n in range(8)]
    assert refused == [[]] * 6 + [[(f"r{n}", "queue_full")] for n in (6, 7)]
    assert len(starts(router.tick(0.0))) == 4
    assert refusals(router.handle(ask("late", 0.1, prompt=1), 0.1)) == [("late", "queue_full")]
