"""3 controller, sway: what cached prompt tokens are worth, in the units of the reward.

Starting request n on worker g takes, in iterations of everybody's latency,

  cost[n, g] = (s_n - c_ng) / v * (beta + gamma + (alpha + beta) a_g)
               + pending_g / v * (beta + gamma)
               + 2 kappa o^_n a_g / B_g * beta

s prompt tokens, c of them cached, v prompt tokens that the worker computes in one iteration's time
(uncached_pace.py learns it), a sequences on the worker, B its slots, o^ the forecast. First its
own prompt, which its client waits for and which holds up the a running ones; then those before it;
last the pace: an iteration of a full batch takes kappa longer than one of an empty one, for it and
for the others.

The reward of a pair is what it saves against the cheapest worker without caches:

  sway[n, g] = weight value_n (min_h cost[n, h](c = 0) - cost[n, g]) / normalizer

or 0 everywhere where no worker holds anything of it, so that traffic without repeated prefixes is
decided as if affinity did not exist. Shadow prices are subtracted as from every other reward: a
worker whose slots or memory are dear, or which is merely crowded, loses its cache's advantage.
Within a tick every start adds to a_g and pending_g for the next: the toll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from service.control.columns import FloatArray, IntArray
    from service.control.config import ControlConfig
    from service.control.view import View


@dataclass(frozen=True, slots=True, eq=False)
class Sway:
    """Rewards for cached tokens on some workers, and what a start there takes from them.

    Attributes:
        reward: (n, w) of starting each waiting request now.
        toll: (n, w) what the next one's reward is less after a start on that worker.
    """

    reward: FloatArray
    toll: FloatArray

    def started(self, place: int) -> None:
        """One more sequence is on a worker."""
        self.reward[:, place] -= self.toll[:, place]


def sway(view: View, config: ControlConfig, workers: IntArray, normalizer: float) -> Sway | None:
    """Reward cached tokens of every waiting request on some workers; None where there are none."""
    cached = view.cached
    if cached is None or config.affinity.weight == 0 or not cached.tokens[:, workers].any():
        return None
    fleet, waiting, weights = view.fleet, view.waiting, config.weights
    tokens = cached.tokens[:, workers]
    active = fleet.outstanding[workers]
    pace_s = float(fleet.iteration_s.mean())
    per_token = 1.0 / (cached.tokens_per_s[workers] * pace_s)
    own = weights.e2e + weights.ttft
    others = weights.throughput + weights.e2e
    held_up = own + others * active
    one_more = 2.0 * config.affinity.crowding * weights.e2e / fleet.batch_limit[workers]
    cold = per_token * waiting.prompt_tokens[:, None] * held_up
    cold += per_token * cached.pending[workers] * own
    cold += waiting.decode_tokens[:, None] * one_more * active
    allowed = waiting.allowed(workers)
    best = np.where(allowed, cold, np.inf).min(axis=1, keepdims=True)
    saved = np.where(np.isfinite(best), best, 0.0) - cold + per_token * tokens * held_up
    toll = per_token * (waiting.prompt_tokens[:, None] - tokens) * (own + others)
    toll += waiting.decode_tokens[:, None] * one_more
    nothing = ~tokens.any(axis=1)
    saved[nothing], toll[nothing] = 0.0, 0.0
    scale = (config.affinity.weight * waiting.value * waiting.discount / normalizer)[:, None]
    return Sway(scale * saved, scale * toll)
