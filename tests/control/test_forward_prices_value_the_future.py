"""The shipped variant: hypothetical arrivals over the look-ahead, prices that rise and fade."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from service.control import (
    Left,
    Outcome,
    Request,
    Returned,
    Router,
    Weights,
    WorkerJoined,
)
from service.control.forward import ForwardLp
from service.control.prices import PriceProblem
from service.control.router import IDLE_REFRESH_S
from service.control.view import Pair, View
from tests.control import naive_olp
from tests.control.driving import (
    POLICIES,
    SMALL,
    PlainFleet,
    ask,
    router_with,
    spec,
    starts,
    with_prices,
)
from tests.control.instances import tensor_of
from tests.control.naive_olp import NaiveRequest, bucketed, clipped, column

WIDE = replace(SMALL, queue_max=1000)


def problem(router: Router, now_s: float) -> PriceProblem:
    """The next refresh; one request waits for good, so that it is due at once."""
    found = router.price_problem(now_s)
    assert found is not None
    return found.problem()


def crowded(config_history: int = 1000) -> Router:
    """One worker with a single slot, and one request that holds it."""
    config = with_prices(WIDE, history_max=config_history)
    router = router_with(config, spec(batch_limit=1))
    router.handle(ask("running", decode_tokens_hint=60), 0.0)
    router.tick(0.0)
    return router


def test_every_request_is_remembered_once_even_if_two_come_at_one_time() -> None:
    router = crowded()
    for i in range(5):
        # All stamped 1.0, but seen by different decisions.
        router.handle(ask(f"r{i}", 1.0, decode_tokens_hint=5 + i), 1.0)
        router.tick(1.0)
    for now_s in (1.1, 1.2):
        router.tick(now_s)
    lengths = problem(router, 1.2).columns.steps - 1  # one step more for the prefill
    assert sorted(lengths) == [5, 6, 7, 8, 9, 60]


def test_a_returned_request_is_not_remembered_again() -> None:
    router = crowded()
    router.handle(Returned("running"), 1.0)
    router.handle(WorkerJoined(spec("w1", 1)), 1.0)
    assert starts(router.tick(1.0)) == [("running", "w1")]
    router.handle(ask("next", 1.0, prompt=999), 1.0)
    assert problem(router, 1.0).rewards.size == 1


def test_the_oldest_are_forgotten_first() -> None:
    router = crowded(config_history=4)
    for i in range(9):
        router.handle(ask(f"r{i}", 1.0 + i, decode_tokens_hint=10 + i), 1.0 + i)
        router.tick(1.0 + i)
    assert sorted(problem(router, 10.0).columns.steps - 1) == [15, 16, 17, 18]


def test_remembered_requests_are_retimed_as_arrivals_over_the_whole_look_ahead() -> None:
    router = crowded()
    for i in range(200):
        router.handle(ask(f"r{i}", 1.0), 1.0)
    router.tick(1.0)
    first, second = problem(router, 1.0), problem(router, 1.1)
    for one in (first, second):
        start = one.columns.start
        assert one.any_worker
        assert (start == start.round()).all()
        assert (start >= 0).all()
        assert (start <= one.horizon.iterations).all()
        counts, _ = np.histogram(start, bins=4, range=(0, one.horizon.iterations))
        assert counts.min() > 20
    assert first.columns.start.tolist() != second.columns.start.tolist()


def test_rewards_do_not_saturate_so_every_length_has_its_own__b_2() -> None:
    router = crowded()
    for i in range(60):
        router.handle(ask(f"r{i}", 0.0, decode_tokens_hint=1 + i), 0.0)
    router.tick(0.0)
    seen = problem(router, 0.0)
    by_length = dict(zip(seen.columns.steps, seen.rewards, strict=True))
    lengths = sorted(by_length)
    rewards = [by_length[length] for length in lengths]
    assert all(a > b for a, b in pairwise(rewards))
    assert 0 < min(rewards) < max(rewards) <= 1


def test_scarcity_shares_what_is_free_among_waiting_and_expected_requests__eq_11() -> None:
    # Four slots, one taken for 21 iterations of 0.02 s; the look-ahead is 64 iterations.
    router = router_with(SMALL, spec(batch_limit=4, kv=1000))
    router.handle(ask("running", 0.0, prompt=100, decode_tokens_hint=20), 0.0)
    router.tick(0.0)
    for i in range(3):
        router.handle(ask(f"r{i}", 2.0, prompt=990), 2.0)
    d = problem(router, 2.0).scarcity
    # Four arrivals in 2 s, so 2 per second, for 1.28 s; and three that wait.
    n_remain = 2.0 * 64 * 0.02 + 3
    assert d.batch[0, 0] == pytest.approx(3 / n_remain)
    assert d.batch[0, -1] == pytest.approx(4 / n_remain)
    # In the first bucket of four it has grown to 104 of 1,000 tokens.
    assert d.kv[0, 0] == pytest.approx(0.896 / n_remain)
    assert d.kv[0, -1] == pytest.approx(1.0 / n_remain)


def price(router: Router, now_s: float) -> float:
    (worker,) = router.stats(now_s).workers
    return worker.price_batch + worker.price_kv


def test_prices_rise_under_overload_and_fade_when_nobody_comes() -> None:
    config = replace(WIDE, prices=replace(WIDE.prices, history_max=256, batch=64))
    fleet = PlainFleet(router_with(config, spec(batch_limit=4)), iteration_s=0.02)
    assert price(fleet.router, 0.0) == 0.0
    rng = np.random.default_rng(0)
    for step in range(150):
        length = int(rng.integers(5, 40))
        request = Request(
            request_id=f"r{step}",
            arrival_s=fleet.now_s,
            prompt_tokens=10,
            decode_tokens_hint=length,
        )
        fleet.arrive(request, length)
        fleet.tick()
        fleet.iterate()
    risen = price(fleet.router, fleet.now_s)
    assert risen > 0
    for name in list(fleet.lengths):
        if name not in fleet.started_s:
            fleet.send(Left(name, Outcome.CANCELLED))
    while fleet.decoding:
        fleet.tick()
        fleet.iterate()
    for _ in range(400):
        fleet.now_s += IDLE_REFRESH_S
        fleet.tick()
    assert price(fleet.router, fleet.now_s) < risen / 20


def test_prices_for_another_fleet_are_dropped_and_counted() -> None:
    router = crowded()
    router.handle(ask("r", 1.0), 1.0)
    late = problem(router, 1.0).solve()
    router.handle(WorkerJoined(spec("w1")), 1.1)
    router.adopt(late, 1.2)
    stats = router.stats(1.2)
    assert (stats.prices_dropped, stats.price_refreshes) == (1, 0)
    router.adopt(problem(router, 1.3).solve(), 1.3)
    assert router.stats(1.4).price_refreshes == 1
    assert router.stats(1.4).price_age_s == pytest.approx(0.1)


def test_zero_prices_need_no_refresh() -> None:
    router = router_with(POLICIES["forward, zero prices"], spec())
    router.handle(ask("r"), 0.0)
    assert router.price_problem(0.0) is None


def test_value_decides_who_gets_the_only_slot() -> None:
    router = crowded()
    for name, value in (("cheap", 1.0), ("dear", 5.0), ("cheaper", 0.5)):
        router.handle(ask(name, 0.5, decode_tokens_hint=10, value=value), 0.5)
    order = []
    for now_s in (1.0, 1.1, 1.2):
        router.handle(Left("running" if not order else order[-1], Outcome.COMPLETED, 10), now_s)
        order += [name for name, _ in starts(router.tick(now_s))]
    assert order == ["dear", "cheap", "cheaper"]


def test_a_requests_own_bound_on_its_first_token_replaces_the_fleets__reward_3_1() -> None:
    weights = Weights(e2e=0.0, ttft=0.0, tail_ttft=1.0, ttft_bound_s=0.1)
    router = router_with(replace(WIDE, weights=weights), spec(batch_limit=1))
    router.handle(ask("running"), 0.0)
    router.tick(0.0)
    router.handle(ask("hopeless", 0.0), 0.0)
    router.handle(ask("in time", 0.0, ttft_bound_s=1.0), 0.0)
    router.handle(Left("running", Outcome.COMPLETED, 1), 0.5)
    assert starts(router.tick(0.5)) == [("in time", "w0")]


class Checked(ForwardLp):
    """The policy itself beside a decision in loops over every worker, slot and request."""

    decisions = 0
    started = 0

    def decide(self, view: View) -> list[Pair]:
        expected = decided_by_loops(view)
        pairs = super().decide(view)
        assert pairs == expected
        Checked.decisions += 1
        Checked.started += len(pairs)
        return pairs


def decided_by_loops(view: View) -> list[Pair]:
    """Shortest first (rewards fall with length, prices are zero), fitted on every future slot.

    Blocks are single tokens here, every worker is up, and nobody has aged.
    """
    waiting, fleet, horizon = view.waiting, view.fleet, view.horizon
    capacity, used = view.capacity(), view.occupancy(horizon, 0.0, None)
    free = tensor_of(type(used)(batch=capacity.batch - used.batch, kv=capacity.kv - used.kv))
    pairs: list[Pair] = []
    for row in sorted(
        range(len(waiting)), key=lambda r: (waiting.decode_tokens[r], waiting.order[r])
    ):
        request = NaiveRequest(
            "r",
            0,
            int(waiting.prompt_tokens[row]),
            int(waiting.decode_tokens[row]),
            int(waiting.sequences[row]),
        )
        uses = clipped(column(True, request, 0), range(horizon.iterations))
        uses = bucketed(uses, horizon.bucket_iterations)
        fitting = [g for g in range(len(fleet)) if naive_olp.fits(uses, g, free)]
        if fitting:
            best = max(fitting, key=lambda g: (free[g, 0][0] / fleet.batch_limit[g], -g))
            naive_olp.subtract(uses, best, free)
            pairs.append((row, best))
    return pairs


@pytest.mark.parametrize("seed", range(3))
def test_looking_only_where_something_can_start_changes_no_decision(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(POLICIES["forward, zero prices"], queue_max=1000, age_bound_s=0.0)
    Checked.decisions = Checked.started = 0
    monkeypatch.setattr("service.control.router.make_policy", Checked)
    specs = [spec("w0", 4, 150), spec("w1", 6, 300), spec("w2", 2, 90)]
    fleet = PlainFleet(router_with(config, *specs), iteration_s=0.02)
    rng = np.random.default_rng(seed)
    for step in range(60):
        for i in range(rng.poisson(0.8)):
            length = int(rng.integers(1, 30))
            request = Request(
                request_id=f"r{step}.{i}",
                arrival_s=fleet.now_s,
                prompt_tokens=int(rng.integers(0, 30)),
                decode_tokens_hint=length,
                sequences=int(rng.choice([1, 1, 2])),
            )
            fleet.arrive(request, length)
        fleet.tick()
        fleet.iterate()
    stats = fleet.router.stats(fleet.now_s)
    assert stats.fallback_ticks == 0, stats.last_fault
    assert Checked.decisions > 30
    assert Checked.started > 20
