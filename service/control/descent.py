"""3 controller, descent: projected subgradient steps where most prices are zero and stay so.

Of most workers only what they hold now is scarce: they have prices on the first few buckets alone.
A step looks at all buckets of the others and of those it puts columns on, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from service.control.columns import Usage
from service.control.spans import PrefixPrices, Spans

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray, IntArray
    from service.control.prices import PriceProblem

NEAR: Final = 2
"""Buckets on which alone most workers have prices."""


@dataclass(frozen=True, slots=True, eq=False)
class Iterate:
    """Some prices on their way.

    Attributes:
        prices: (g, 2, N) normalised, of batch slots and of KV.
        far: (g,) which workers may have some beyond the NEAR buckets.
    """

    prices: FloatArray
    far: BoolArray

    @staticmethod
    def of(prices: Usage) -> Iterate:
        """Copy prices, and look who has some there."""
        both = np.stack([prices.batch, prices.kv], axis=1)
        beyond = both[:, 0, NEAR:] + both[:, 1, NEAR:]
        return Iterate(both, np.asarray(beyond.any(axis=1)))

    def sums(self, problem: PriceProblem, workers: IntArray | slice, buckets: int) -> PrefixPrices:
        """Of some workers' prices per batch slot and per KV token, on the first buckets."""
        per_token = self.prices[workers, :, :buckets] * ((1.0,), (problem.kv_scale,))
        return PrefixPrices.stacked(per_token, problem.horizon)


def placed(problem: PriceProblem, iterate: Iterate, spans: Spans) -> tuple[IntArray, FloatArray]:
    """Put each column where it is priced (its own worker, or the cheapest) and give its cost."""
    workers, _, buckets = iterate.prices.shape
    if not problem.any_worker:
        return spans.worker, iterate.sums(problem, slice(None), buckets).cost(spans)
    # A column that begins later touches nothing that has a price on the first buckets.
    early = (spans.first < NEAR).nonzero()[0]
    far = iterate.far.nonzero()[0]
    costs = np.zeros((workers, spans.size))
    if early.size:
        sums = iterate.sums(problem, slice(None), NEAR)
        costs[:, early] = sums.cost_on_every_worker(spans.take(early)).T
    costs[far] = iterate.sums(problem, far, buckets).cost_on_every_worker(spans).T
    worker = costs.argmin(axis=0)
    return worker, costs[worker, np.arange(worker.size)]


def mean_use(
    problem: PriceProblem, iterate: Iterate, spans: Spans, rewards: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Mean use of sampled columns whose reward exceeds their cost.

    Args:
        problem: whose columns these are.
        iterate: the prices.
        spans: of n sampled columns.
        rewards: (n,) of theirs, normalised.

    Returns:
        (w,) the workers that are used, and (w, 2, N) the use there, of batch slots and of KV;
        normalised.
    """
    worker, cost = placed(problem, iterate, spans)
    accepted = rewards - cost > 0
    if not accepted.all():
        worker, spans = worker[accepted], spans.take(accepted)
    used = np.zeros(iterate.far.size, dtype=np.bool_)
    used[worker] = True
    touched = used.nonzero()[0]
    use = spans.usage(touched.searchsorted(worker), touched.size)
    use[:, 0] /= rewards.size
    use[:, 1] *= problem.kv_scale / rewards.size
    return touched, use


class Descent:
    """Algorithm 2's iterate, moved in place from the warm start.

    Attributes:
        prices: (g, N) as they are now.
    """

    def __init__(self, problem: PriceProblem) -> None:
        self._problem = problem
        self._now = Iterate.of(problem.warm)
        self._scarce = np.stack([problem.scarcity.batch, problem.scarcity.kv], axis=1)
        self._near_fall = self._scarce[:, :, :NEAR] * -problem.step_size
        self.prices = Usage(batch=self._now.prices[:, 0], kv=self._now.prices[:, 1])

    def step(self, spans: Spans, rewards: FloatArray) -> None:
        """One projected step by the subgradient of a mini-batch, p = (p - eta g)+.

        What is not looked at has no price, nobody uses it, and its d_k is not negative: it would
        stay zero.

        Source: [OLP] Algorithm 2, lines 11-18.
        """
        touched, use = mean_use(self._problem, self._now, spans, rewards)
        prices, far = self._now.prices, self._now.far
        far[touched] = True
        rows = far.nonzero()[0]
        moved = self._scarce[rows]
        moved[rows.searchsorted(touched)] -= use
        moved *= -self._problem.step_size
        moved += prices[rows]
        near = prices[:, :, :NEAR]
        near += self._near_fall
        np.maximum(near, 0.0, out=near)
        prices[rows] = np.maximum(moved, 0.0, out=moved)
