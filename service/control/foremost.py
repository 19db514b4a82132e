"""3 controller, the few who matter: the same starts as `admit_balanced`, from a look at the best.

A tick starts as many requests as slots have become free, mostly one or two, however many wait.
Those with the largest margins are found by bounds that were worked out before (standing.py); their
order and what fits is then worked out one request at a time, until nothing more can start. Where
that does not tell what the whole pass would do, the answer is None: the whole pass must be made.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from service.control.assign import BLOCK

if TYPE_CHECKING:
    from service.control.assign import Candidates
    from service.control.columns import FloatArray, IntArray
    from service.control.residual import Residual

ROUNDING = 1e-9
"""More than sums of normalised prices are off."""


def foremost(bound: FloatArray) -> tuple[IntArray, float]:
    """Places of the bounds above the BLOCK-th largest, fewer than BLOCK; and that one.

    No other bound is above it. Those that equal it are left out: nobody whose margin is not above
    it can be admitted here, and a crowd of equals may be everybody.
    """
    at = bound.size - BLOCK
    least = float(np.partition(bound, at)[at])
    return (bound > least).nonzero()[0], least


class Foremost:
    """One pass over the foremost candidates.

    Args:
        candidates: the foremost.
        residual: as it is before the pass; stays as it is.
        preference: (g,) as for `admit_balanced`.
    """

    def __init__(self, candidates: Candidates, residual: Residual, preference: FloatArray) -> None:
        self._candidates = candidates
        self._before = residual
        self._margin: list[list[float]] = candidates.margin.tolist()
        self._toll = None if candidates.toll is None else candidates.toll.tolist()
        self._starts = [0] * preference.size
        self._preference: list[float] = preference.tolist()
        self.left = residual.copy()
        """What the starts leave."""

    def admit(self, others: float) -> list[tuple[int, int]] | None:
        """Starts in order, or None where candidates that are not here could have a say.

        They have none if the pass ends for want of slots, or at the most that may be admitted, and
        every margin admitted is above theirs: then they would have come later.

        Args:
            others: no margin of theirs is above this.
        """
        orders = self._candidates.arrival_order.tolist()
        best_first = (-self._candidates.margin.max(axis=1)).tolist()
        queue = list(zip(best_first, orders, range(len(orders)), strict=True))
        heapify(queue)
        admitted: list[tuple[int, int]] = []
        while queue:
            best, order, row = heappop(queue)
            if not -best > others + ROUNDING:
                return None
            fitting = self._fitting(row, range(len(self._preference)), self._before)
            if not fitting:
                continue
            # A row stands where its best worker that had room before the pass puts it.
            true = -max(self._margin[row][worker] for worker in fitting)
            if true > best:
                heappush(queue, (true, order, row))
                continue
            worker = self._choose(row, self._fitting(row, fitting, self.left))
            if worker is None:
                continue
            self.left.subtract(self._candidates.columns, row, worker)
            self._starts[worker] += 1
            admitted.append((row, worker))
            if len(admitted) >= self._candidates.most or self.left.is_full():
                return admitted
        return None

    def _fitting(self, row: int, workers: range | list[int], residual: Residual) -> list[int]:
        margins, floor = self._margin[row], self._candidates.floor
        wanted = [g for g in workers if margins[g] > floor]
        return residual.fits_one(self._candidates.columns, row, wanted)

    def _choose(self, row: int, workers: list[int]) -> int | None:
        """The worker with the largest margin; the most liked, then the lowest, breaks ties."""
        if not workers:
            return None
        margins = {g: self._tolled(row, g) for g in workers}
        top = max(margins.values())
        liking = {g: self._preference[g] * float(self.left.batch[g, 0]) for g in workers}
        return max((g for g in workers if margins[g] == top), key=liking.__getitem__)

    def _tolled(self, row: int, worker: int) -> float:
        """What the starts of this pass on a worker leave of a margin there."""
        margin = self._margin[row][worker]
        if self._toll is not None:
            for _ in range(self._starts[worker]):
                margin -= self._toll[row][worker]
        return margin
