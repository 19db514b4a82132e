"""3 controller, what both variants of the online LP work out alike from a view."""

from __future__ import annotations

import numpy as np

from service.control.columns import FloatArray
from service.control.config import ControlConfig, Weights
from service.control.prices import PriceSolution
from service.control.reward import StartTimes, largest_reward, start_reward
from service.control.view import View


def waiting_reward(
    view: View, weights: Weights, waited: FloatArray, left: float, pace_s: float
) -> FloatArray:
    """(n,) reward of starting each waiting request now, without values; not normalised.

    Args:
        view: the tick's input.
        weights: the operator's trade-off, with the bounds of requests that bring none.
        waited: (n,) k - t_j, iterations since arrival.
        left: T - k + 1, iterations.
        pace_s: seconds of an iteration; turns bounds into iterations.

    Source: [OLP] 3.1.
    """
    ttft_s, e2e_s = view.waiting.ttft_bound_s, view.waiting.e2e_bound_s
    times = StartTimes(
        waited=waited,
        decode_tokens=view.waiting.decode_tokens,
        left=left,
        e2e_bound=np.where(np.isnan(e2e_s), weights.e2e_bound_s, e2e_s) / pace_s,
        ttft_bound=np.where(np.isnan(ttft_s), weights.ttft_bound_s, ttft_s) / pace_s,
    )
    return start_reward(weights, times)


def normalizer(config: ControlConfig) -> float:
    """What rewards are divided by: the setting, or the largest reward that there can be."""
    chosen = config.prices.reward_normalizer
    return chosen or largest_reward(config.weights, config.horizon_iterations)


def expected_arrivals(view: View) -> float:
    """n^_remain: measured arrival rate x seconds left in the look-ahead, plus those waiting."""
    left_s = view.horizon.iterations * float(view.fleet.iteration_s.mean())
    return view.arrivals_per_s * left_s + len(view.waiting)


def mean_prices(
    solution: PriceSolution | None, worker_ids: tuple[str, ...], bucket_iterations: int
) -> tuple[FloatArray, FloatArray]:
    """(g,) price of one batch slot and of one KV token for one iteration, mean over buckets.

    Zero without a solution, or with one for other workers.
    """
    if solution is None or solution.worker_ids != worker_ids:
        return np.zeros(len(worker_ids)), np.zeros(len(worker_ids))
    natural = solution.natural()
    return (
        natural.batch.mean(axis=1) / bucket_iterations,
        natural.kv.mean(axis=1) / bucket_iterations,
    )
