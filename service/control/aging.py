"""3 controller, ageing: how long a request may be overtaken before it goes first.

Ordering by reduced cost lets short requests overtake long ones, which is where the mean gains and
the tail pays. What the tail may pay is stated relative to first come first served: all policies
that keep the workers busy have the same work in the queue, so the time to drain it is what a
newcomer would have waited there.
"""

from __future__ import annotations

import math

import numpy as np

from service.control.config import ControlConfig
from service.control.view import View


def drain_s(view: View) -> float:
    """Time the fleet needs for the waiting decode work: the first-come-first-served wait, seconds.

    A worker decodes one token per busy slot and iteration; busy slots are bounded by the batch
    limit and by how many waiting requests, at their mean KV over their life, fit its KV cache.
    """
    waiting, fleet = view.waiting, view.fleet
    work = waiting.sequences * waiting.decode_tokens
    total = float(work.sum())
    if total <= 0 or not len(fleet):
        return 0.0
    mean_kv = float((work * (waiting.prompt_tokens + waiting.decode_tokens / 2)).sum()) / total
    slots = np.minimum(fleet.batch_limit, fleet.kv_capacity_tokens / max(mean_kv, 1.0))
    tokens_per_s = (slots / fleet.iteration_s)[waiting.reach.any(axis=0)].sum()
    return total / float(tokens_per_s) if tokens_per_s > 0 else math.inf


class AgeRule:
    """The wait after which a request goes first, oldest first.

    bound = age_factor x the longest recent first-come-first-served wait, between age_floor_s and
    age_bound_s. The longest recent wait fades by a factor e every age_memory_s.
    """

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._peak_s = 0.0
        self._seen_s = 0.0

    def bound_s(self, view: View) -> float:
        """The bound at this tick, seconds; infinity when ageing is switched off."""
        config = self._config
        if config.age_bound_s == 0:
            return math.inf
        if config.age_factor == 0:
            return config.age_bound_s
        passed_s = max(0.0, view.now_s - self._seen_s)
        self._peak_s = max(self._peak_s * math.exp(-passed_s / config.age_memory_s), drain_s(view))
        self._seen_s = view.now_s
        return min(max(config.age_factor * self._peak_s, config.age_floor_s), config.age_bound_s)
