"""3 controller, what a newcomer would wait if requests were served first come first served.

All policies that keep the workers busy have the same work before them, waiting and running. One
that lets short requests go first runs short ones, so more of that work waits here than would there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from service.control.config import Kernel
from service.control.kernels.fleet import work_and_pace
from service.control.tiers import LOWEST_TIER

if TYPE_CHECKING:
    from service.control.columns import FloatArray, IntArray
    from service.control.view import View

HEAD_UNUSED: Final = 0.5
"""Part of what the head of the queue needs that is free but too little, while KV memory binds."""


class _Work(NamedTuple):
    """Some of what waits, and the workers that it may go to.

    Attributes:
        steps: slot-iterations. workers: how many it may go to.
        slots: of theirs that can be busy with it. steps_per_s: slot-iterations that these do.
        prompts_s: seconds in which the prompts are computed; workers do that side by side.
    """

    steps: float
    workers: float
    slots: float
    steps_per_s: float
    prompts_s: float


class FirstComeWait:
    """The first-come-first-served wait of those who wait now, and of some of them.

    A worker does one slot-iteration of work per busy slot in the time that its iterations were seen
    to take; busy slots are bounded by the batch limit and by how many waiting requests, at their
    mean KV over their life, fit its KV cache. There the head of a first-come-first-served queue
    leaves memory unused while it waits for what it lacks: half of its need, on average. Prompts are
    computed one after the other, and hold up everything else on their worker.
    """

    def __init__(self, view: View, steps: FloatArray, tier: IntArray) -> None:
        """Take a tick.

        Args:
            view: the tick.
            steps: (n,) decode iterations of each waiting request.
            tier: (n,) of value.
        """
        self._view, self._steps, self._tier = view, steps, tier
        self._all = self._work_from(LOWEST_TIER)
        # The part of the waiting work that would wait there as well.
        self._waits = 1.0
        if self._all.steps > 0:
            self._waits = max(0.0, 1.0 - self._owed() / self._all.steps)

    def of_all(self) -> float:
        """Seconds until all waiting requests have started; infinity where no worker is there."""
        return self._wait_s(self._all)

    def of(self, tier: int) -> float:
        """The same for those of a tier and of higher ones alone."""
        return self._wait_s(self._work_from(tier))

    def _work_from(self, tier: int) -> _Work:
        view, waiting, fleet = self._view, self._view.waiting, self._view.fleet
        return _Work(
            *work_and_pace(
                waiting.sequences,
                self._steps,
                waiting.prompt_tokens,
                waiting.decode_tokens,
                self._tier,
                tier,
                view.kernel is Kernel.MIXED,
                HEAD_UNUSED,
                fleet.batch_limit,
                fleet.kv_capacity_tokens,
                fleet.step_s,
                fleet.prompt_s,
                waiting.wanted,
            )
        )

    def _wait_s(self, work: _Work) -> float:
        if work.steps <= 0 or not len(self._view.fleet):
            return 0.0
        if work.steps_per_s <= 0:
            return math.inf
        return self._waits * work.steps / work.steps_per_s + work.prompts_s

    def _owed(self) -> float:
        """Slot-iterations that would run under first come first served, and wait here."""
        view = self._view
        if not view.usual_left_steps or not self._all.workers:
            return 0.0
        running = view.usual_left_steps * self._all.slots
        return max(0.0, running - view.left_steps(view.waiting.wanted))
