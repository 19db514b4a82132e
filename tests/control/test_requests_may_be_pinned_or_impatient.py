"""A request may belong to one worker, refuse to wait, and bring a least length and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.control import (
    Arrived,
    Left,
    Outcome,
    Request,
    Weights,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
)
from service.control.lengths import LengthPredictor
from tests.control.driving import (
    CENTRAL,
    DOWN,
    POLICIES,
    SMALL,
    accounted,
    refusals,
    router_with,
    spec,
    starts,
)


def ask(name: str, now_s: float = 0.0, **fields: object) -> Arrived:
    values: dict[str, object] = {"prompt_tokens": 4, "decode_tokens_limit": 4}
    return Arrived(Request(request_id=name, arrival_s=now_s, **values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_starts_on_its_worker_and_nowhere_else(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("w0"), spec("w1"), spec("w2"))
    for name in "abc":
        router.handle(ask(name, pinned_worker="w1"), 0.0)
    assert starts(router.tick(0.0)) == [("a", "w1"), ("b", "w1"), ("c", "w1")]
    assert accounted(router, 0.0)


@pytest.mark.parametrize("policy", CENTRAL)
def test_a_pinned_request_waits_for_its_worker_though_others_are_idle(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("w0", batch_limit=1), spec("w1"))
    router.handle(ask("a", pinned_worker="w0"), 0.0)
    assert starts(router.tick(0.0)) == [("a", "w0")]
    router.handle(ask("b", 0.1, pinned_worker="w0"), 0.1)
    assert starts(router.tick(0.1)) == []
    router.handle(Left("a", Outcome.COMPLETED, 4), 0.2)
    assert starts(router.tick(0.2)) == [("b", "w0")]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_request_whose_worker_is_down_or_gone_is_refused_after_the_hold(
    policy: str,
) -> None:
    for event in (WorkerChanged("w0", DOWN), WorkerGone("w0")):
        router = router_with(POLICIES[policy], spec("w0"), spec("w1"))
        router.handle(event, 0.0)
        router.handle(ask("a", pinned_worker="w0"), 0.0)
        assert router.tick(0.0) == []
        hold_s = SMALL.no_worker_hold_s
        assert refusals(router.tick(hold_s + 0.1)) == [("a", "no_worker")]
        assert accounted(router, hold_s + 0.1)


def test_a_pinned_request_is_cut_to_its_own_worker() -> None:
    router = router_with(SMALL, spec("small", kv=20), spec("large", kv=1000))
    commands = router.handle(ask("a", prompt_tokens=100, pinned_worker="small"), 0.0)
    assert refusals(commands) == [("a", "too_large")]
    assert router.handle(ask("b", prompt_tokens=100, pinned_worker="large"), 0.0) == []


@pytest.mark.parametrize("policy", CENTRAL)
def test_one_that_will_not_wait_starts_at_the_first_decision_or_is_refused_in_it(
    policy: str,
) -> None:
    router = router_with(POLICIES[policy], spec(batch_limit=1))
    router.handle(ask("a", max_wait_s=0.0), 0.0)
    assert starts(router.tick(0.0)) == [("a", "w0")]
    router.handle(ask("b", 0.1, max_wait_s=0.0), 0.1)
    assert refusals(router.tick(0.1)) == [("b", "would_wait")]
    assert accounted(router, 0.1)


def test_a_late_decision_still_starts_one_that_will_not_wait() -> None:
    router = router_with(SMALL, spec())
    router.handle(ask("a", 0.0, max_wait_s=0.0), 0.0)
    assert starts(router.tick(0.5)) == [("a", "w0")]


@pytest.mark.parametrize(
    ("floor", "limit", "forecast"), [(None, None, 9), (5, None, 9), (50, None, 50), (50, 20, 20)]
)
# The mean of an exponential around 8 on the predictor's grid is 9.
def test_the_least_length_lifts_a_forecast_and_the_most_still_caps_it(
    floor: int | None, limit: int | None, forecast: int
) -> None:
    request = Request(
        request_id="r",
        arrival_s=0.0,
        prompt_tokens=1,
        decode_tokens_floor=floor,
        decode_tokens_limit=limit,
    )
    assert LengthPredictor(8).forecast(request).decode_tokens == forecast


@pytest.mark.parametrize("policy", ["forward", "published, inline"])
def test_an_end_to_end_bound_of_its_own_decides_the_tails_reward(policy: str) -> None:
    """Of two equal requests the one that can still meet its bound goes first."""
    weights = Weights(e2e=0.0, ttft=0.0, tail_e2e=1.0, e2e_bound_s=0.001)
    config = replace(POLICIES[policy], weights=weights, age_bound_s=0.0)
    router = router_with(config, spec(batch_limit=1))
    router.handle(ask("hopeless"), 0.0)
    router.handle(ask("in time", e2e_bound_s=30.0), 0.0)
    assert starts(router.tick(0.0)) == [("in time", "w0")]


def test_prices_of_a_worker_that_is_not_there_are_nothing() -> None:
    router = router_with(SMALL, spec())
    assert router.prices_of("w0") == (0.0, 0.0)
    assert router.prices_of("gone") == (0.0, 0.0)
    router.handle(WorkerJoined(spec("w1")), 0.0)
    assert router.prices_of("w1") == (0.0, 0.0)
