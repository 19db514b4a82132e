"""Algorithm 2 reaches the minimum of f_k(p), eq. (6), that HiGHS finds; a warm start is quicker.

Stationary instances: one history, one scarcity vector, many steps. Tolerances are shares of what
the zero prices leave to gain, f_k(0) - min f_k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from service.control.columns import Horizon, Usage
from service.control.config import Kernel
from service.control.prices import PriceProblem
from tests.control.instances import Placed, columns_of, naive_column, scaled, tensor_of
from tests.control.lp_oracle import saa_minimum
from tests.control.naive_olp import NaiveRequest, Recorded
from tests.control.vectorised_olp import saa_objective

SEEDS = range(3)
GAP_MAX = 0.01
STEP_SIZE = 0.4
SHRINKING = [1.6 / 2**stage for stage in range(8)]
"""eta_k, halved after every refresh of K = 60 steps, as convergence to the optimum itself needs."""


@dataclass(frozen=True)
class Stationary:
    """A problem whose optimum is known, and the best that could be gained on it."""

    problem: PriceProblem
    minimum: float
    at_zero: float

    def gap(self, prices: Usage) -> float:
        """How far f_k is from its minimum, as a share of what zero prices leave to gain."""
        return (saa_objective(self.problem, prices) - self.minimum) / (self.at_zero - self.minimum)

    def solve(self, **changes: object) -> Usage:
        """Run Algorithm 2 from the warm start."""
        return replace(self.problem, **changes).solve().prices


def stationary(seed: int, any_worker: bool = False, scarce: float = 0.3) -> Stationary:
    """A history of 40 requests that wants about three times what there is."""
    rng = np.random.default_rng(seed)
    n, workers, horizon = 40, 2, Horizon(6, 2)
    placed = [
        Placed(
            NaiveRequest(f"r{i}", 0, int(rng.integers(0, 40)), int(rng.integers(1, 12))),
            start=int(rng.integers(0, horizon.iterations)),
            worker=int(rng.integers(0, workers)),
        )
        for i in range(n)
    ]
    kv_scale = 1 / 50
    columns = [scaled(naive_column(Kernel.MIXED, p, horizon), kv_scale) for p in placed]
    wanted = np.mean([sum(batch for batch, _ in uses.values()) for uses in columns])
    each = scarce * wanted / (workers * horizon.buckets)
    shape = (workers, horizon.buckets)
    problem = PriceProblem(
        horizon=horizon,
        scarcity=Usage(
            batch=each * rng.uniform(0.5, 1.5, shape), kv=each * rng.uniform(0.3, 0.9, shape)
        ),
        columns=columns_of(Kernel.MIXED, placed),
        rewards=rng.uniform(0.1, 1.0, n),
        warm=Usage.zeros(workers, horizon),
        any_worker=any_worker,
        steps=60,
        batch=n,
        step_size=STEP_SIZE,
        averaged=False,
        seed=seed,
        origin=0,
        worker_ids=("a", "b"),
        normalizer=1.0,
        kv_scale=kv_scale,
    )
    return with_minimum(problem, placed)


def with_minimum(problem: PriceProblem, placed: list[Placed]) -> Stationary:
    """Ask HiGHS for min f_k(p)."""
    choices: list[list[Recorded]] = []
    for row, one in enumerate(placed):
        uses = scaled(naive_column(Kernel.MIXED, one, problem.horizon), problem.kv_scale)
        workers = range(len(problem.worker_ids)) if problem.any_worker else [one.worker]
        choices.append([(float(problem.rewards[row]), g, uses) for g in workers])
    minimum = saa_minimum(tensor_of(problem.scarcity), choices)
    free = Usage.zeros(len(problem.worker_ids), problem.horizon)
    return Stationary(problem, minimum, saa_objective(problem, free))


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("any_worker", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_refreshes_with_shrinking_steps_reach_the_optimum_averaged_or_not__eq_7(
    seed: int, any_worker: bool, averaged: bool
) -> None:
    case = stationary(seed, any_worker)
    assert case.minimum < 0.9 * case.at_zero  # there is something to learn
    prices = case.problem.warm
    for step_size in SHRINKING:
        prices = case.solve(warm=prices, step_size=step_size, averaged=averaged)
    assert -1e-9 <= case.gap(prices) <= GAP_MAX


@pytest.mark.parametrize("seed", SEEDS)
def test_averages_of_mini_batch_steps_of_constant_size_come_close__algorithm_2(seed: int) -> None:
    case = stationary(seed)
    assert case.gap(case.solve(batch=8, steps=800, averaged=True)) <= 5 * GAP_MAX


def steps_to_reach(case: Stationary, warm: Usage, gap_max: float) -> int:
    """Steps of constant size until f_k is that close to its minimum, counted five at a time."""
    prices, steps = warm, 0
    while case.gap(prices) > gap_max:
        prices = case.solve(warm=prices, steps=5)
        steps += 5
        assert steps <= 1000
    return steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warm_start_needs_fewer_steps_than_a_cold_one__algorithm_2_line_8(seed: int) -> None:
    yesterday, today = stationary(seed), stationary(seed, scarce=0.27)
    cold = steps_to_reach(today, Usage.zeros(2, today.problem.horizon), 5 * GAP_MAX)
    warm = steps_to_reach(today, yesterday.solve(steps=200), 5 * GAP_MAX)
    assert warm < cold / 2
