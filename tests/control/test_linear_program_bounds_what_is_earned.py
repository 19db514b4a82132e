"""Weak duality, [OLP] 3.1-3.2: earned by greedy admission <= LP (4)-(5) <= dual bound at any price.

True for every price >= 0, so nothing here needs tuning.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.assign import Candidates, Residual, admit, admit_balanced
from service.control.columns import Usage
from service.control.prices import dual_bound
from service.control.spans import PrefixPrices, Spans
from tests.control import naive_olp
from tests.control.instances import StartInstance, start_instances, tensor_of, usages
from tests.control.lp_oracle import TOLERANCE, StartProblem, dual_optimum, lp_optimum


@st.composite
def priced_starts(draw: st.DrawFn) -> tuple[StartInstance, Usage, np.ndarray]:
    """An admission problem with finite capacity >= 0, prices for it, and rewards per pair."""
    instance = draw(start_instances())
    free = Usage(
        batch=np.maximum(instance.free.batch, 0.0),
        kv=np.where(np.isinf(instance.free.kv), 1e4, np.maximum(instance.free.kv, 0.0)),
    )
    instance = StartInstance(
        instance.horizon, instance.kernel, instance.placed, instance.margin, instance.order, free
    )
    prices = draw(usages(instance.workers, instance.horizon))
    cheap = draw(st.sampled_from((0.0, 1 / 1024, 1 / 64, 1.0)))
    prices = Usage(batch=prices.batch * cheap, kv=prices.kv * cheap)
    # The drawn margins serve as rewards, which are never negative.
    return instance, prices, np.where(np.isneginf(instance.margin), -np.inf, instance.margin + 1)


def problem_of(instance: StartInstance, rewards: np.ndarray) -> StartProblem:
    return StartProblem(instance.naive_columns(), rewards, tensor_of(instance.free))


def margins_at(instance: StartInstance, prices: Usage, rewards: np.ndarray) -> np.ndarray:
    spans = Spans.of(instance.columns(), instance.horizon)
    cost = PrefixPrices.of(prices, instance.horizon).cost_on_every_worker(spans)
    return np.asarray(rewards - cost)


@given(priced_starts())
def test_any_prices_bound_the_lp_and_the_lp_bounds_what_we_earn__weak_duality(
    case: tuple[StartInstance, Usage, np.ndarray],
) -> None:
    instance, prices, rewards = case
    margin = margins_at(instance, prices, rewards)
    optimum = lp_optimum(problem_of(instance, rewards))
    slack = TOLERANCE * (1 + optimum)
    for floor in (0.0, -np.inf):
        candidates = Candidates(instance.columns(), margin, instance.order, floor)
        for rule in (admit, lambda c, r: admit_balanced(c, r, np.ones(instance.workers))):
            pairs = rule(candidates, Residual(instance.free.copy(), instance.horizon))
            assert sum(rewards[pair] for pair in pairs) <= optimum + slack
    assert optimum <= dual_bound(margin, instance.free, prices) + slack


@given(priced_starts())
def test_the_dual_program_has_the_same_optimum_so_the_oracle_is_sound__strong_duality(
    case: tuple[StartInstance, Usage, np.ndarray],
) -> None:
    instance, _, rewards = case
    problem = problem_of(instance, rewards)
    optimum = lp_optimum(problem)
    assert dual_optimum(problem) == pytest.approx(optimum, rel=TOLERANCE, abs=TOLERANCE)


@given(priced_starts())
def test_margins_by_prefix_sums_equal_the_sums_over_slots__eq_10(
    case: tuple[StartInstance, Usage, np.ndarray],
) -> None:
    instance, prices, rewards = case
    tensor = tensor_of(prices)
    naive = [
        [rewards[row, g] - naive_olp.cost(uses, g, tensor) for g in range(instance.workers)]
        for row, uses in enumerate(instance.naive_columns())
    ]
    np.testing.assert_allclose(
        margins_at(instance, prices, rewards),
        np.array(naive).reshape(rewards.shape),
        rtol=1e-12,
        atol=1e-9,
    )


def test_the_dual_bound_is_capacity_at_its_price_plus_the_best_margins__reduced_dual() -> None:
    margins = np.array([[1.0, 3.0], [-2.0, -1.0], [-np.inf, 0.5]])
    capacity = Usage(batch=np.array([[2.0], [4.0]]), kv=np.array([[10.0], [20.0]]))
    prices = Usage(batch=np.array([[0.5], [0.0]]), kv=np.array([[0.0], [0.25]]))
    # 2 x 0.5 + 20 x 0.25, and 3 + 0 + 0.5 of the margins.
    assert dual_bound(margins, capacity, prices) == 9.5
    assert dual_bound(np.zeros((0, 2)), capacity, prices) == 6.0


def test_unlimited_capacity_that_costs_nothing_adds_nothing_to_the_bound__reduced_dual() -> None:
    capacity = Usage(batch=np.array([[2.0]]), kv=np.array([[np.inf]]))
    prices = Usage(batch=np.array([[1.0]]), kv=np.array([[0.0]]))
    assert dual_bound(np.array([[4.0]]), capacity, prices) == 6.0
