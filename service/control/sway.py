"""3 controller, sway: what cached prompt tokens are worth, in the units of the reward.

Starting request n on worker g takes, in iterations of everybody's latency,

  cost[n, g] = v_g ((s_n - c_ng) (beta + gamma + (alpha + beta) a_g) + ahead_g (beta + gamma))
               + 2 kappa o^_n a_g / B_g * beta

It is what delay.py counts of every request, less the c tokens that the worker has cached, so that a
cached prefix weighs what it saves and prompts that wait there weigh as they do without it. And the
pace: o^ the forecast, B the worker's slots; an iteration of a full batch takes kappa longer than
one of an empty one, for it and for the others. Else the worker where a popular prompt is cached
would never be left.

v_g tells workers apart as delay.py does. How long a prompt takes on the mean of them
uncached_pace.py says: what the first tokens of whole prompts say is too little where caches hit.

The reward of a pair is what it saves against the cheapest worker without caches:

  sway[n, g] = value_n (min_h cost[n, h](c = 0) - cost[n, g]) / normalizer

or 0 everywhere where no worker holds anything of it, so that traffic without repeated prefixes is
decided as if affinity did not exist. The weight multiplies c, no further than to s. Shadow prices
are subtracted as from every other reward: a worker whose slots or memory are dear, or which is
merely crowded, loses its cache's advantage. Within a tick every start adds to a_g and ahead_g for
the next: the toll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from service.control.delay import Waits, held_up_and_before, iteration_weights

if TYPE_CHECKING:
    from service.control.affinity import Cached
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
    tokens, prompt = cached.tokens[:, workers], waiting.prompt_tokens[:, None]
    per_token = _iterations_per_token(view, cached, config, workers)
    held_up, before = held_up_and_before(view, config, workers)
    spared = np.minimum(config.affinity.weight * tokens, prompt)
    one_more = 2.0 * config.affinity.crowding * weights.e2e / fleet.batch_limit[workers]
    crowded = waiting.decode_tokens[:, None] * one_more
    cold = per_token * (prompt * held_up + before) + crowded * fleet.outstanding[workers]
    best = cold.min(axis=1, keepdims=True, where=waiting.allowed(workers), initial=np.inf)
    saved = np.where(np.isfinite(best), best, 0.0) - cold + per_token * spared * held_up
    toll = per_token * (prompt - tokens) * sum(iteration_weights(weights)) + crowded
    nothing = ~tokens.any(axis=1)
    saved[nothing], toll[nothing] = 0.0, 0.0
    scale = (waiting.value * waiting.discount / normalizer)[:, None]
    return Sway(scale * saved, scale * toll)


def _iterations_per_token(
    view: View, cached: Cached, config: ControlConfig, workers: IntArray
) -> FloatArray:
    """(w,) iterations that a worker takes for a prompt token that it has to compute."""
    told = 1.0 / (cached.tokens_per_s[workers] * float(view.fleet.step_s.mean()))
    waits = Waits.of(view, config, workers)
    if waits is None:
        return told
    pace = waits.lines[0]
    return np.asarray(pace * (told.mean() / pace.mean()))
