"""The hindsight bound is one: no policy does better, whatever binds, and it is not idle either."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.experiments.cases import Case, run_case
from loadgen.experiments.fleets import PERIOD_S, a100_fleet, period_control, unit_fleet
from loadgen.experiments.hindsight_lp import hindsight_bounds
from loadgen.experiments.loads import SHORT_ANSWERS, Load, build_requests
from loadgen.experiments.measures import reward_until
from loadgen.experiments.offline import best_schedule
from loadgen.experiments.rules import RuleBook
from loadgen.simulation_config import SimulationConfig
from loadgen.simulator import simulate
from loadgen.trace_record import TraceRequest
from service.control.config import PolicyName

TOLERANCE = 1e-6
BOUND_S = 0.2
BOOK = RuleBook(period_control())
POLICIES = (
    BOOK.plain(PolicyName.LEAST_OUTSTANDING),
    BOOK.shortest_first(age_bound_s=0.0),
    BOOK.zero_prices(),
    BOOK.forward(),
)


@settings(max_examples=5, deadline=None)
@given(
    load=st.sampled_from((0.6, 1.0, 1.6)),
    kv_tokens=st.sampled_from((900, 1200, 4000)),
    trace=st.sampled_from(("lmsys-like", "fixed:30x40")),
    seed=st.integers(1, 10_000),
)
def test_no_policy_beats_hindsight(load: float, kv_tokens: int, trace: str, seed: int) -> None:
    sent = Load(trace=trace, load=load, requests=30, seed=seed)
    fleet = unit_fleet(2, 4, 2 * kv_tokens)
    bound = run_case(Case(load=sent, workers=fleet, rule=BOOK.hindsight(), ttft_bound_s=BOUND_S))
    reward = run_case(Case(load=sent, workers=fleet, rule=BOOK.reward_bound()))
    assert reward.values["ttft_mean_s"] == bound.values["ttft_mean_s"]
    for rule in POLICIES:
        case = Case(load=sent, workers=fleet, rule=rule, ttft_bound_s=BOUND_S)
        achieved = run_case(case).values
        assert achieved["share_refused"] == 0
        for key in ("ttft_mean_s", "e2e_mean_s"):
            assert bound.values[key] <= achieved[key] + TOLERANCE
        assert bound.values["share_within"] >= achieved["share_within"] - TOLERANCE
        assert reward.values["reward_s"] >= achieved["reward_s"] - TOLERANCE


def bound_s(load: float, slots: int, kv_tokens: int = 100_000) -> float:
    fleet = unit_fleet(1, slots, kv_tokens)
    requests = build_requests(Load(load=load, requests=100, seed=5), fleet)
    return hindsight_bounds(requests, fleet, BOUND_S)["ttft_mean_s"]


def test_an_idle_fleet_has_the_first_token_after_one_iteration() -> None:
    assert bound_s(0.05, 8) == pytest.approx(PERIOD_S)


def test_the_bound_knows_that_slots_and_memory_are_scarce() -> None:
    light, heavy = bound_s(0.5, 8), bound_s(1.5, 8)
    assert heavy > 10 * light
    assert bound_s(0.5, 8, kv_tokens=1000) > 10 * light


def test_the_bound_comes_close_to_shortest_first_under_overload() -> None:
    fleet = unit_fleet(2, 8, 40_000)
    sent = Load(load=1.3, requests=200, seed=2)
    bound = hindsight_bounds(build_requests(sent, fleet), fleet, BOUND_S)["ttft_mean_s"]
    rule = BOOK.shortest_first(age_bound_s=0.0)
    achieved = run_case(Case(load=sent, workers=fleet, rule=rule)).values["ttft_mean_s"]
    assert 0.5 * achieved < bound <= achieved


def test_fleets_that_the_relaxation_does_not_fit_are_refused() -> None:
    requests = build_requests(Load(load=1.0, requests=10), unit_fleet(2, 4, 4000))
    fast, slow = unit_fleet(2, 4, 4000)
    for fleet, says in (
        (a100_fleet(2, 4), "constant pace"),
        ((fast, replace(slow, iteration_factor=2.0)), "one pace"),
    ):
        with pytest.raises(ValueError, match=says):
            hindsight_bounds(requests, fleet, BOUND_S)


SMALL = Case(
    load=Load(trace=SHORT_ANSWERS, load=1.2, requests=20, grid_s=PERIOD_S, seed=3),
    workers=unit_fleet(1, 3, 40_000),
    rule=BOOK.offline(),
)


def waits_s(case: Case) -> float:
    return run_case(case).values["ttft_mean_s"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_best_schedule_lies_between_the_bound_and_every_policy(seed: int) -> None:
    case = replace(SMALL, load=replace(SMALL.load, seed=seed))
    best = run_case(case).values
    assert best["ttft_mean_proven_s"] == pytest.approx(best["ttft_mean_s"], rel=2e-3)
    assert waits_s(replace(case, rule=BOOK.reward_bound(1))) <= best["ttft_mean_s"] + TOLERANCE
    for rule in POLICIES:
        achieved_s = waits_s(replace(case, rule=rule))
        assert best["ttft_mean_proven_s"] <= achieved_s + TOLERANCE


def test_the_best_schedule_is_that_of_all_orders() -> None:
    requests = [TraceRequest(0.0, 10, tokens) for tokens in (5, 3, 4, 2, 6)]
    fleet = unit_fleet(1, 1, 40_000)
    found = best_schedule(requests, fleet)["ttft_mean_s"]
    waits = [
        sum(itertools.accumulate(r.decode_tokens for r in order[:-1])) + len(order)
        for order in itertools.permutations(requests)
    ]
    assert found == pytest.approx(min(waits) / len(requests) * PERIOD_S)


@pytest.mark.parametrize(
    ("requests", "kv_tokens", "says"),
    [
        ([TraceRequest(0.004, 10, 5)], 40_000, "whole iterations"),
        ([TraceRequest(0.0, 10, 5)], 64, "KV memory"),
        ([TraceRequest(0.0, 10, 5)] * 201, 40_000, "at most 200"),
    ],
)
def test_instances_that_the_integer_program_does_not_fit_are_refused(
    requests: list[TraceRequest], kv_tokens: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        best_schedule(requests, unit_fleet(1, 8, kv_tokens))


def test_the_reward_is_the_time_left_at_the_first_token_and_at_the_end() -> None:
    requests = build_requests(Load(load=0.05, requests=40, seed=2), unit_fleet(1, 8, 40_000))
    config = SimulationConfig(workers=unit_fleet(1, 8, 40_000), control=BOOK.base)
    result = simulate(requests, config)
    last_s = requests[-1].arrival_s
    expected = sum(
        max(0.0, last_s - r.arrival_s - PERIOD_S)
        + max(0.0, last_s - r.arrival_s - r.decode_tokens * PERIOD_S)
        for r in requests
    )
    assert reward_until(result.requests, last_s) == pytest.approx(expected / 40, rel=1e-3)
