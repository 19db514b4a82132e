"""3 controller, room: what is free on the workers where something can start now, and elsewhere.

Most decisions need the look-ahead of the few workers with a free batch slot. Only a reservation
needs all of them, so the rest is worked out when the first one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from service.control.assign import Offer
from service.control.kernels.room import start_oldest
from service.control.residual import Residual

if TYPE_CHECKING:
    from service.control.columns import BoolArray, Columns, FloatArray, IntArray
    from service.control.delay import Waits
    from service.control.sway import Sway
    from service.control.view import View


def working_residual(view: View, workers: IntArray | None = None, offset: float = 0.0) -> Residual:
    """Capacity minus what started requests hold, on the look-ahead of some workers or of all."""
    return Residual(view.free(view.horizon, offset, workers), view.horizon)


class Room:
    """A tick's working residual on the open workers, in step with that of the whole fleet.

    Attributes:
        workers: (w,) the open workers.
        residual: theirs; its row w is worker workers[w].
        sway: (n, w) reward for what they have cached of each waiting prompt, or None for nothing.
    """

    def __init__(self, view: View, workers: IntArray) -> None:
        self.workers = workers
        self.residual = working_residual(view, workers)
        self.sway: Sway | None = None
        self._view = view
        self._nothing = np.zeros((0, workers.size))
        self._started: list[tuple[int, int]] = []
        self._fleet: Residual | None = None

    def offer(
        self, prices: FloatArray | None = None, waits: Waits | None = None, *, swayed: bool = False
    ) -> Offer:
        """What the open workers offer; nothing costs anything unless said otherwise.

        Args:
            prices: (g, 2, L) of a batch slot and of a KV token.
            waits: for prompts.
            swayed: whether what they have cached counts.
        """
        fleet, nothing = self._view.fleet, self._nothing
        cached = self.sway if swayed else None
        return Offer(
            reach=self._view.waiting.reach,
            liking=1.0 / fleet.batch_limit[self.workers],
            prices=np.zeros((len(fleet), 2, 0)) if prices is None else prices,
            workers=self.workers,
            extra=nothing if cached is None else cached.reward,
            toll=nothing if cached is None else cached.toll,
            waits=waits,
        )

    def start_oldest(
        self, columns: Columns, rows: IntArray, first: int, most: int
    ) -> list[tuple[int, int]]:
        """Start the oldest of (m,) waiting requests where they fit best, one by one.

        Each takes the open worker with the most cached of it, then the emptiest. The first one that
        fits nowhere is the end, or the last free slot.

        Args:
            columns: of the waiting requests.
            rows: who asks; from `first` on they are moved about: who started, then who did not fit.
            first: those before it are left alone.
            most: how many may start.

        Returns:
            (row, worker) in the order of the starts; they are taken out of the open workers.
        """
        view, residual, none = self._view, self.residual, self._nothing
        waiting, swayed = view.waiting, self.sway is not None
        started = start_oldest(
            rows,
            first,
            view.age_s(),
            waiting.order,
            waiting.kind,
            waiting.reach,
            self.workers,
            view.fleet.batch_limit,
            columns.start,
            columns.steps,
            columns.footprint,
            columns.sequences,
            none if self.sway is None else self.sway.reward,
            none if self.sway is None else self.sway.toll,
            residual.batch,
            residual.kv,
            residual.bucket_iterations,
            most,
        )
        pairs = []
        for row, place, unswayed in started.tolist():
            worker = int(self.workers[place])
            pairs.append((row, worker))
            if swayed and view.cached is not None:
                view.cached.unswayed[row] = int(self.workers[unswayed])
            if self._fleet is not None:
                self._fleet.subtract(columns, row, worker)
        self._started += pairs
        return pairs

    def reserve(
        self, columns: Columns, row: int, allowed: BoolArray, promised: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Set aside the earliest room for a column on any of the (g,) allowed workers.

        Args:
            columns: of the waiting requests.
            row: which of them.
            allowed: (g,) workers it may go to.
            promised: the worker and the shift in buckets that the request was given before. It is
                never given a later one, or small requests that end just in time for each new one
                could put it off for ever.

        Returns:
            The worker and the shift; None when there is no room inside the look-ahead.
        """
        if self._fleet is None:
            self._fleet = working_residual(self._view)
            for started in self._started:
                self._fleet.subtract(columns, *started)
        found = self._fleet.earliest(columns, row, allowed)
        if promised is not None and (found is None or promised[1] <= found[1]):
            found = promised
        if found is None:
            return None
        worker, shift = found
        self._fleet.subtract(columns, row, worker, shift)
        for place in np.flatnonzero(self.workers == worker).tolist():
            self.residual.subtract(columns, row, place, shift)
        return found
