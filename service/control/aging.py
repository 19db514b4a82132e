"""3 controller, ageing: how long a request may be overtaken before it goes first.

Ordering by reduced cost lets short requests overtake long ones, which is where the mean gains and
the tail pays. What the tail may pay is stated relative to first come first served: all policies
that keep the workers busy have the same work in the queue, so the time to drain it is what a
newcomer would have waited there.
"""

from __future__ import annotations

import math

import numpy as np

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.config import ControlConfig
from service.control.view import View

FORGOTTEN_S = 1e-3
"""A recent longest wait below this is no longer kept."""


def drain_s(view: View, rows: BoolArray) -> float:
    """Time the fleet needs for some waiting decode work: the first-come-first-served wait, seconds.

    A worker decodes one token per busy slot in the time that slots were seen to take; busy slots
    are bounded by the batch limit and by how many waiting requests, at their mean KV over their
    life, fit its KV cache.
    """
    waiting, fleet = view.waiting, view.fleet
    work = (waiting.sequences * waiting.decode_tokens)[rows]
    total = float(work.sum())
    if total <= 0 or not len(fleet):
        return 0.0
    kv_tokens = waiting.prompt_tokens[rows] + waiting.decode_tokens[rows] / 2
    mean_kv = float((work * kv_tokens).sum()) / total
    slots = np.minimum(fleet.batch_limit, fleet.kv_capacity_tokens / max(mean_kv, 1.0))
    tokens_per_s = (slots / fleet.token_s)[waiting.reach.any(axis=0)].sum()
    return total / float(tokens_per_s) if tokens_per_s > 0 else math.inf


class AgeRule:
    """The wait after which a request goes first among its tier, oldest first.

    bound = age_factor x the longest recent first-come-first-served wait of the tier and those
    above it, at least age_floor_s. The longest recent wait fades by a factor e every age_memory_s.
    Requests with a longer forecast than age_share of all wait age_stretch times as long: a start
    out of turn costs a slot for a whole life, so those few cost most, and p99 does not see them.
    Nobody's bound exceeds age_bound_s.
    """

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._peak_s: dict[int, float] = {}
        self._seen_s = 0.0

    def bound_s(self, view: View, tier: IntArray, long: BoolArray) -> FloatArray:
        """(n,) the bound of each waiting request at this tick; infinity when switched off.

        Args:
            view: the tick.
            tier: (n,) of value.
            long: (n,) whether a forecast is among the longest, which age_share leaves out.
        """
        config = self._config
        if config.age_bound_s == 0:
            return np.full(tier.size, math.inf)
        if config.age_factor == 0:
            return np.full(tier.size, config.age_bound_s)
        passed_s = max(0.0, view.now_s - self._seen_s)
        self._seen_s = view.now_s
        fade = math.exp(-passed_s / config.age_memory_s)
        faded = {level: peak_s * fade for level, peak_s in self._peak_s.items()}
        self._peak_s = {level: peak_s for level, peak_s in faded.items() if peak_s > FORGOTTEN_S}
        bounds = np.empty(tier.size)
        for level in np.unique(tier).tolist():
            peak_s = max(self._peak_s.get(level, 0.0), drain_s(view, tier >= level))
            self._peak_s[level] = peak_s
            bounds[tier == level] = max(config.age_factor * peak_s, config.age_floor_s)
        bounds[long] *= config.age_stretch
        return np.minimum(bounds, config.age_bound_s)
