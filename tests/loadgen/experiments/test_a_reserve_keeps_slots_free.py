"""Strict priority with a static reserve: what the first tier gains, and what the other loses."""

from __future__ import annotations

import pytest

from loadgen.experiments.cases import Case, run_case
from loadgen.experiments.fleets import period_control, unit_fleet
from loadgen.experiments.loads import Load, Tier
from loadgen.experiments.reserve import FIRST_TIER, PriorityReserve
from loadgen.experiments.rules import RuleBook
from service.control.events import (
    Arrived,
    Left,
    Outcome,
    Request,
    Returned,
    Start,
    WorkerJoined,
    WorkerSpec,
)
from service.control.router import Router

BOOK = RuleBook(period_control())


def arrived(name: str, tenant: str = "batch") -> Arrived:
    return Arrived(
        Request(
            request_id=name, arrival_s=0.0, prompt_tokens=8, decode_tokens_hint=50, tenant=tenant
        )
    )


def started(controller: PriorityReserve, now_s: float) -> list[str]:
    commands = controller.tick(now_s)
    return [command.request_id for command in commands if isinstance(command, Start)]


@pytest.fixture
def controller() -> PriorityReserve:
    """Two workers of two slots, one of the four kept free."""
    found = PriorityReserve(Router(BOOK.reserve(1).control), 1)
    for name in ("w0", "w1"):
        found.handle(WorkerJoined(WorkerSpec(worker_id=name, batch_limit=2)), 0.0)
    return found


def test_batch_never_takes_the_reserve_and_the_first_tier_does(
    controller: PriorityReserve,
) -> None:
    for number in range(5):
        controller.handle(arrived(f"b{number}"), 0.0)
    assert started(controller, 0.0) == ["b0", "b1", "b2"]
    controller.handle(arrived("i0", FIRST_TIER), 0.0)
    assert started(controller, 0.0) == ["i0"]
    controller.handle(Left("b0", Outcome.COMPLETED, 50), 1.0)
    assert started(controller, 1.0) == []
    controller.handle(Left("i0", Outcome.COMPLETED, 50), 1.0)
    assert started(controller, 1.0) == ["b3"]


def test_batch_waits_while_one_of_the_first_tier_does(controller: PriorityReserve) -> None:
    for number in range(5):
        controller.handle(arrived(f"i{number}", FIRST_TIER), 0.0)
    controller.handle(arrived("b0"), 0.0)
    assert started(controller, 0.0) == ["i0", "i1", "i2", "i3"]
    for number in range(3):
        controller.handle(Left(f"i{number}", Outcome.COMPLETED, 50), 1.0)
    assert started(controller, 1.0) == ["i4", "b0"]


def test_a_held_request_may_leave_and_a_returned_one_waits_again(
    controller: PriorityReserve,
) -> None:
    for number in range(5):
        controller.handle(arrived(f"b{number}"), 0.0)
    started(controller, 0.0)
    controller.handle(Left("b3", Outcome.CANCELLED), 0.5)
    controller.handle(Returned("b0"), 0.5)
    assert started(controller, 0.5) == ["b0"]
    controller.handle(Left("b1", Outcome.COMPLETED, 50), 1.0)
    assert started(controller, 1.0) == ["b4"]


def test_a_larger_reserve_shortens_the_wait_of_the_first_tier_and_costs_batch_tokens() -> None:
    tiers = (
        Tier(name=FIRST_TIER, trace="lmsys-like", load=0.4),
        Tier(name="batch", trace="long-answers", load=0.9),
    )
    load = Load(tiers=tiers, duration_s=20.0, seed=2)
    found = [
        run_case(
            Case(load=load, workers=unit_fleet(2, 16, 40_000), rule=BOOK.reserve(slots))
        ).values
        for slots in (0, 12)
    ]
    p99 = [values[f"{FIRST_TIER}.ttft_p99_s"] for values in found]
    tokens = [values["batch.tokens_per_s"] for values in found]
    assert p99[1] < p99[0]
    assert tokens[1] < tokens[0]
