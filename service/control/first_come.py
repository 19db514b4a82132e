"""3 controller, what a newcomer would wait if requests were served first come first served.

All policies that keep the workers busy have the same work before them, waiting and running. One
that lets short requests go first runs short ones, so more of that work waits here than would there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from service.control.config import Kernel

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray
    from service.control.view import View

HEAD_UNUSED = 0.5
"""Part of what the head of the queue needs that is free but too little, while KV memory binds."""


class FirstComeWait:
    """The first-come-first-served wait of those who wait now, and of some of them.

    A worker does one slot-iteration of work per busy slot in the time that its iterations were seen
    to take; busy slots are bounded by the batch limit and by how many waiting requests, at their
    mean KV over their life, fit its KV cache. There the head of a first-come-first-served queue
    leaves memory unused while it waits for what it lacks: half of its need, on average. Prompts are
    computed one after the other, and hold up everything else on their worker.
    """

    def __init__(self, view: View, steps: FloatArray) -> None:
        """Take a tick.

        Args:
            view: the tick.
            steps: (n,) decode iterations of each waiting request.
        """
        self._view = view
        self._work = view.waiting.sequences * steps
        self._wanted: BoolArray = view.waiting.wanted
        self._total = float(self._work.sum())
        # The part of the waiting work that would wait there as well.
        self._waits = 1.0
        if self._total > 0:
            self._slots_of_all = self._slots(slice(None), self._total)
            self._waits = max(0.0, 1.0 - self._owed() / self._total)

    def of_all(self) -> float:
        """Seconds until all waiting requests have started; infinity where no worker is there."""
        if self._total <= 0 or not len(self._view.fleet):
            return 0.0
        return self._wait_s(slice(None), self._total, self._slots_of_all)

    def of(self, rows: BoolArray) -> float:
        """Seconds until some waiting requests have started; infinity where no worker is there."""
        work = float(self._work[rows].sum())
        if work <= 0 or not len(self._view.fleet):
            return 0.0
        return self._wait_s(rows, work, self._slots(rows, work))

    def _wait_s(self, rows: BoolArray | slice, work: float, slots: FloatArray) -> float:
        steps_per_s = float((slots / self._view.fleet.step_s)[self._wanted].sum())
        if steps_per_s <= 0:
            return math.inf
        return self._waits * work / steps_per_s + self._prompts_s(rows)

    def _prompts_s(self, rows: BoolArray | slice) -> float:
        """Seconds in which the prompts are computed, the workers side by side."""
        view = self._view
        if view.kernel is Kernel.DECODE_ONLY:
            return 0.0
        token_s = float(view.fleet.prompt_s[self._wanted].mean())
        prompts = float(view.waiting.prompt_tokens[rows].sum())
        return prompts * token_s / np.count_nonzero(self._wanted)

    def _slots(self, rows: BoolArray | slice, total: float) -> FloatArray:
        """(g,) slots that can be busy with some waiting requests, of some work in all."""
        waiting, fleet = self._view.waiting, self._view.fleet
        work = self._work[rows]
        prompt, decode = waiting.prompt_tokens[rows], waiting.decode_tokens[rows]
        mean_kv = float((work * (prompt + decode / 2.0)).sum()) / total
        needed = mean_kv + float((work * decode).sum()) / total / 2.0
        usable = np.maximum(fleet.kv_capacity_tokens - HEAD_UNUSED * needed, 1.0)
        return np.minimum(fleet.batch_limit, usable / max(mean_kv, 1.0))

    def _owed(self) -> float:
        """Slot-iterations that would run under first come first served, and wait here."""
        view, wanted = self._view, self._wanted
        if not view.usual_left_steps or not np.count_nonzero(wanted):
            return 0.0
        running = view.usual_left_steps * float(self._slots_of_all[wanted].sum())
        return max(0.0, running - view.left_steps(wanted))
