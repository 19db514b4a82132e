"""Equations (6) and (8) of [OLP] in whole arrays, for problems of any size.

Slower than the compiled descent and independent of it; naive_olp.py has the same in loops.
"""

from __future__ import annotations

import numpy as np

from service.control.columns import FloatArray, IntArray, Usage
from service.control.prices import PriceProblem
from service.control.spans import PrefixPrices, Spans


def placed(problem: PriceProblem, prices: Usage, spans: Spans) -> tuple[IntArray, FloatArray]:
    """Put each column where it is priced (its own worker, or the cheapest) and give its cost."""
    per_token = Usage(batch=prices.batch, kv=prices.kv * problem.kv_scale)
    sums = PrefixPrices.of(per_token, problem.horizon)
    costs = sums.cost_on_every_worker(spans)
    worker = costs.argmin(axis=1) if problem.any_worker else spans.worker
    return worker, costs[np.arange(worker.size), worker]


def subgradient(problem: PriceProblem, prices: Usage, sample: IntArray) -> Usage:
    """d_k minus the mean use of the sampled columns whose reward exceeds their cost.

    Source: [OLP] eq. (8) and B.3 lines 11-17.
    """
    spans = Spans.of(problem.columns.take(sample), problem.horizon)
    worker, cost = placed(problem, prices, spans)
    accepted = problem.rewards[sample] - cost > 0
    use = spans.take(accepted).usage(worker[accepted], len(problem.worker_ids))
    return Usage(
        batch=problem.scarcity.batch - use[:, 0] / sample.size,
        kv=problem.scarcity.kv - use[:, 1] * (problem.kv_scale / sample.size),
    )


def saa_objective(problem: PriceProblem, prices: Usage) -> float:
    """f_k(p) = d_k^T p + mean over the history of (r - a^T p)_+.

    Source: [OLP] eq. (6).
    """
    spans = Spans.of(problem.columns, problem.horizon)
    _, cost = placed(problem, prices, spans)
    hinge = np.maximum(problem.rewards - cost, 0.0)
    linear = np.sum(problem.scarcity.batch * prices.batch) + np.sum(problem.scarcity.kv * prices.kv)
    return float(linear + hinge.sum() / max(1, hinge.size))
