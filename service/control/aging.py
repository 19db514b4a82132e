"""3 controller, ageing: how long a request may be overtaken before it goes first.

Ordering by reduced cost lets short requests overtake long ones, which is where the mean gains and
the tail pays. What the tail may pay is stated relative to first come first served: all policies
that keep the workers busy have the same work in the queue, so the time to drain it is what a
newcomer would have waited there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.config import ControlConfig
from service.control.first_come import FirstComeWait
from service.control.kernels.queue import extent, find_aged
from service.control.view import View
from service.control.wait_tally import WaitTally, within_s

BEYOND = 2.0
"""Requests that first come first served would let wait longer than the bound, for each that is
spared: who reaches its bound still waits for a slot, and for those who reached theirs before."""
LARGE_SHARE = 0.95
"""Requests with no more work than this share of the recent arrivals are never spared."""


@dataclass(frozen=True, slots=True, eq=False)
class Ageing:
    """What the rule asks of waiting requests.

    Attributes:
        tier: (n,) of value. levels: the tiers that occur, highest first.
        steps: (n,) decode iterations.
        prompt_steps: slot-iterations in which a prompt token holds up everything else; with these
            the steps are the work.
        large: only requests with more work than this may be spared.
    """

    tier: IntArray
    levels: list[int]
    steps: FloatArray
    prompt_steps: float
    large: float


@dataclass(slots=True)
class _Period:
    """What was seen in a stretch of time.

    Attributes:
        began_s: when it began.
        waits: what newcomers would have waited first come first served, by tier.
        arrivals: requests that came. spared: requests that were let wait beyond their bound.
    """

    began_s: float
    waits: dict[int, WaitTally] = field(default_factory=dict)
    arrivals: int = 0
    spared: int = 0


class AgeRule:
    """The wait after which a request goes first among its tier, oldest first.

    bound = age_factor x the first-come-first-served wait of the tier and those above it that all
    but BEYOND x (1 - age_share) of the recent arrivals would have stayed within, at least
    age_floor_s. What is recent lies between one and two times age_memory_s back. The longest wait
    would be more than the p99 that first come first served gives, and p99 would end up there: a
    queue of many starts at its bound.

    A start out of turn costs a slot for a whole life, so the requests with the most work cost most,
    and a p99 does not see one in a hundred. So of the recent arrivals a share of 1 - age_share may
    wait age_stretch times as long: of those that reach their bound, the ones with the most work.
    Nobody's bound exceeds age_bound_s.
    """

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._old, self._new = _Period(-math.inf), _Period(-math.inf)
        self._spared: IntArray = np.zeros(0, dtype=np.int64)
        # Room for rows, whose contents are of one tick.
        self._still = self._asking = self._spared
        self._last_order: int | None = None
        self._came = 0
        self._within_s: dict[int, float] = {}

    def aged(self, view: View, asked: Ageing) -> BoolArray:
        """(n,) which waiting requests have reached their bound at this tick."""
        config = self._config
        if config.age_bound_s == 0:
            return np.zeros(asked.tier.size, dtype=np.bool_)
        if config.age_factor == 0:
            return np.asarray(view.age_s() >= config.age_bound_s)
        self._turn(view)
        levels = asked.levels
        first_come = FirstComeWait(view, asked.steps, asked.tier)
        bounds_s = [self._bound_s(level, first_come.of(level)) for level in levels[:-1]]
        if levels:
            bounds_s.append(self._bound_s(levels[-1], first_come.of_all()))
        return self._late(view, asked, bounds_s)

    def _bound_s(self, level: int, wait_s: float) -> float:
        """The bound of a tier, where first come first served would make it wait so long now."""
        config, waits = self._config, self._new.waits.get(level)
        if waits is None:
            waits = self._new.waits[level] = WaitTally()
        if self._came and math.isfinite(wait_s):
            # Where no worker is there now, that says nothing of waits.
            waits.note(wait_s, self._came)
            self._within_s.pop(level, None)
        if level not in self._within_s:
            tallies = [waits, self._old.waits[level]] if level in self._old.waits else [waits]
            share = max(0.0, 1.0 - BEYOND * (1.0 - config.age_share))
            self._within_s[level] = within_s(share, tallies)
        return max(config.age_factor * self._within_s[level], config.age_floor_s)

    def _turn(self, view: View) -> None:
        """Begin a new period when the last one is full; count who came."""
        passed_s = view.now_s - self._new.began_s
        if passed_s >= self._config.age_memory_s:
            recent = passed_s < 2.0 * self._config.age_memory_s
            self._old = self._new if recent else _Period(-math.inf)
            self._new = _Period(view.now_s)
            self._within_s.clear()
        if view.now_s - self._old.began_s >= 2.0 * self._config.age_memory_s:
            if self._old.waits:
                self._within_s.clear()
            self._old = _Period(-math.inf)
        order = view.waiting.order
        self._came = 0
        if not order.size:
            return
        # A rule that begins in a running service has seen none of those who came before.
        before = int(order.min()) - 1 if self._last_order is None else self._last_order
        self._last_order = max(before, extent(order)[1])
        self._came = self._last_order - before
        self._new.arrivals += self._came

    def _late(self, view: View, asked: Ageing, bounds_s: list[float]) -> BoolArray:
        """(n,) who waited its tier's bound, or a longer one where it is spared, now as before."""
        waiting, config, n = view.waiting, self._config, asked.tier.size
        aged = np.empty(n, dtype=np.bool_)
        if n > self._still.size:
            self._still, self._asking = np.empty((2, 2 * n), dtype=np.int64)
        spared, asking = self._still, self._asking
        kept, many = find_aged(
            waiting.order,
            waiting.arrival_s,
            waiting.discount,
            waiting.shared,
            view.now_s,
            asked.tier,
            asked.steps,
            waiting.prompt_tokens,
            asked.prompt_steps,
            asked.large,
            np.array(asked.levels, dtype=np.int64),
            np.array(bounds_s, dtype=np.float64),
            config.age_stretch,
            config.age_bound_s,
            self._spared,
            aged,
            spared,
            asking,
        )
        chosen = self._chosen(view, asked, asking[:many]) if many else asking[:0]
        if chosen.size:
            own_s = np.array([bounds_s[asked.levels.index(t)] for t in asked.tier[chosen].tolist()])
            own_s = np.minimum(own_s * config.age_stretch, config.age_bound_s)
            aged[chosen] = view.age_s()[chosen] >= own_s
        if chosen.size or kept < self._spared.size:
            self._spared = np.sort(waiting.order[np.append(spared[:kept], chosen)])
        return aged

    def _chosen(self, view: View, asked: Ageing, asking: IntArray) -> IntArray:
        """Rows of those who ask and may wait longer: the ones with the most work."""
        share = 1.0 - self._config.age_share
        allowed = share * (self._old.arrivals + self._new.arrivals)
        left = int(allowed - self._old.spared - self._new.spared)
        if left <= 0:
            return asking[:0]
        work = asked.steps[asking] + asked.prompt_steps * view.waiting.prompt_tokens[asking]
        chosen = asking[np.argsort(-work, kind="stable")[:left]]
        self._new.spared += chosen.size
        return chosen
