"""3 controller, what both variants of the online LP work out alike from a view."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import numpy as np

from service.control.columns import FloatArray
from service.control.config import ControlConfig, Weights
from service.control.prices import PriceSolution
from service.control.reward import StartTimes, largest_reward, start_reward
from service.control.view import View

if TYPE_CHECKING:
    from collections.abc import Callable


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


class Kept:
    """A number that follows from an array which nobody changes in place: worked out once for each.

    Args:
        number: what follows from (g,) numbers.
    """

    def __init__(self, number: Callable[[FloatArray], float]) -> None:
        self._number = number
        # Not kept alive: once nobody else has it, no other array can be taken for it.
        self._array: ReferenceType[FloatArray] | None = None
        self._value = 0.0

    def of(self, array: FloatArray) -> float:
        """The number of this array."""
        if self._array is None or self._array() is not array:
            self._array, self._value = ref(array), self._number(array)
        return self._value


def mean(values: FloatArray) -> float:
    """Mean of some numbers."""
    return float(values.mean())


def expected_arrivals(view: View, iteration_s: float) -> float:
    """n^_remain: measured arrival rate x seconds left in the look-ahead, plus those waiting.

    `iteration_s` is of a mean worker.
    """
    left_s = view.horizon.iterations * iteration_s
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
