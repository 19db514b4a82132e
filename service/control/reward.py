"""3 controller, reward: the operator's six weights as a number per (request, worker) start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.control.columns import FloatArray
from service.control.config import Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartTimes:
    """The periods that a reward depends on; every array broadcasts to the result's shape.

    Attributes:
        waited: k - t_j, iterations since arrival.
        decode_tokens: o^, predicted decode length.
        left: T - k + 1, iterations left in the horizon at the start.
        e2e_bound: t_1', iterations.
        ttft_bound: t_2', iterations.
    """

    waited: FloatArray
    decode_tokens: FloatArray
    left: FloatArray | float
    e2e_bound: FloatArray | float
    ttft_bound: FloatArray | float


def start_reward(weights: Weights, times: StartTimes) -> FloatArray:
    """Reward of starting a request now; never negative.

    r = alpha min(o^, T-k+1) + beta (T-(k+o^-1))_+ + gamma (T-k+1) + sigma
      + zeta_1 [k+o^-t_j < t_1'] + zeta_2 [k-t_j < t_2'].

    Source: [OLP] 3.1, the overall positive reward after eq. (3).
    """
    length, waited = times.decode_tokens, times.waited
    reward = np.zeros(np.broadcast_shapes(length.shape, waited.shape))
    # Weights of zero are common, and what they would weigh need not be worked out.
    if weights.throughput:
        reward += weights.throughput * np.minimum(length, times.left)
    if weights.e2e:
        reward += weights.e2e * np.maximum(times.left - length, 0.0)
    if weights.ttft:
        reward += weights.ttft * times.left
    if weights.queries:
        reward += weights.queries
    if weights.tail_e2e:
        reward += weights.tail_e2e * (waited + length < times.e2e_bound)
    if weights.tail_ttft:
        reward += weights.tail_ttft * (waited < times.ttft_bound)
    return reward


def largest_reward(weights: Weights, horizon_iterations: int) -> float:
    """A bound no reward exceeds: the normaliser that never saturates (B.2's min(r / norm, 1))."""
    per_iteration = max(weights.throughput, weights.e2e) + weights.ttft
    return max(
        per_iteration * horizon_iterations + weights.queries + weights.tail_e2e + weights.tail_ttft,
        1e-12,
    )
