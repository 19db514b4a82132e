"""3 controller, descent: projected subgradient steps where most prices are zero and stay so.

Of most workers only what they hold now is scarce: they have prices on the first few buckets alone.
A step looks at all buckets of the others and of those it puts columns on, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from service.control.columns import Usage
from service.control.spans import FIRST, PrefixPrices, Spans

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray, IntArray
    from service.control.prices import PriceProblem

NEAR: Final = 8
"""Buckets on which alone most workers have prices."""


@dataclass(frozen=True, slots=True, eq=False)
class Iterate:
    """(g, N) normalised prices, and (g,) which workers may have some beyond the NEAR buckets."""

    prices: Usage
    far: BoolArray

    @staticmethod
    def of(prices: Usage) -> Iterate:
        """Look which those are."""
        beyond = prices.batch[:, NEAR:] + prices.kv[:, NEAR:] != 0
        return Iterate(prices, beyond.any(axis=1))

    def sums(self, problem: PriceProblem, workers: IntArray | slice, buckets: int) -> PrefixPrices:
        """Of some workers' prices per batch slot and per KV token, on the first buckets."""
        batch, kv = self.prices.batch[workers, :buckets], self.prices.kv[workers, :buckets]
        return PrefixPrices.of(Usage(batch=batch, kv=kv * problem.kv_scale), problem.horizon)


def placed(problem: PriceProblem, iterate: Iterate, spans: Spans) -> tuple[IntArray, FloatArray]:
    """Put each column where it is priced (its own worker, or the cheapest) and give its cost."""
    workers, buckets = iterate.prices.batch.shape
    if not problem.any_worker:
        sums = iterate.sums(problem, slice(None), buckets)
        return spans.worker, sums.cost(spans)
    # A column that begins later touches nothing that has a price on the first buckets.
    early = (spans.at[FIRST.start] < NEAR).nonzero()[0]
    far = iterate.far.nonzero()[0]
    costs = np.zeros((workers, spans.end.size))
    if early.size:
        sums = iterate.sums(problem, slice(None), NEAR)
        costs[:, early] = sums.cost_on_every_worker(spans.take(early)).T
    costs[far] = iterate.sums(problem, far, buckets).cost_on_every_worker(spans).T
    worker = costs.argmin(axis=0)
    return worker, costs[worker, np.arange(worker.size)]


def mean_use(
    problem: PriceProblem, iterate: Iterate, spans: Spans, rewards: FloatArray
) -> tuple[IntArray, Usage]:
    """Mean use of sampled columns whose reward exceeds their cost.

    Args:
        problem: whose columns these are.
        iterate: the prices.
        spans: of n sampled columns.
        rewards: (n,) of theirs, normalised.

    Returns:
        (w,) the workers that are used, and (w, N) the use there; KV in normalised units.
    """
    worker, cost = placed(problem, iterate, spans)
    accepted = (rewards - cost > 0).nonzero()[0]
    worker, size = worker[accepted], rewards.size
    used = np.zeros(iterate.far.size, dtype=np.bool_)
    used[worker] = True
    touched = used.nonzero()[0]
    use = spans.take(accepted).usage((used.cumsum() - 1)[worker], touched.size)
    return touched, Usage(batch=use.batch / size, kv=use.kv * (problem.kv_scale / size))


class Descent:
    """Algorithm 2's iterate, moved in place from the warm start."""

    def __init__(self, problem: PriceProblem) -> None:
        warm = problem.warm
        self.prices = Usage(batch=warm.batch.copy(), kv=warm.kv.copy())
        self._problem = problem
        self._far = Iterate.of(warm).far

    def step(self, spans: Spans, rewards: FloatArray) -> None:
        """One projected step by the subgradient of a mini-batch, p = (p - eta g)+.

        What is not looked at has no price, nobody uses it, and its d_k is not negative: it would
        stay zero.

        Source: [OLP] Algorithm 2, lines 11-18.
        """
        problem = self._problem
        touched, use = mean_use(problem, Iterate(self.prices, self._far), spans, rewards)
        self._far[touched] = True
        rows = self._far.nonzero()[0]
        place = rows.searchsorted(touched)
        scarce, prices = problem.scarcity, self.prices
        for price, slope, used in (
            (prices.batch, scarce.batch, use.batch),
            (prices.kv, scarce.kv, use.kv),
        ):
            far = slope[rows]
            far[place] -= used
            moved = _moved(price[rows], far, problem.step_size)
            price[:, :NEAR] = _moved(price[:, :NEAR], slope[:, :NEAR], problem.step_size)
            price[rows] = moved


def _moved(price: FloatArray, slope: FloatArray, step_size: float) -> FloatArray:
    return np.maximum(slope * -step_size + price, 0.0)
