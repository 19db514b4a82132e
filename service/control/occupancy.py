"""3 controller, occupancy: what started requests hold on the look-ahead, kept worker by worker.

Between two ticks few workers change. A row is made again only when something happened on its
worker, or when the look-ahead itself moved. The ledger says what happened; read ledger.py for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from service.control.columns import BoolArray, FloatArray, Horizon, IntArray, Usage
from service.control.config import Kernel
from service.control.kernels.calendar import with_others
from service.control.kernels.fleet import free_beside

if TYPE_CHECKING:
    from service.control.started import Started


PerWorker: TypeAlias = tuple[FloatArray, FloatArray]
"""(g,) batch slots, and KV tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """What every row depends on; other rows are of no use under another frame.

    Attributes:
        horizon: N buckets of q iterations. offset: iterations from the left edge to now.
        block_tokens: (g,) KV block sizes, an array that is never changed in place.
        lead: (g,) iterations from now to when what starts now begins to decode; whole buckets.
        kernel: of every column.
    """

    horizon: Horizon
    offset: float
    block_tokens: FloatArray
    lead: FloatArray
    kernel: Kernel

    def same_as(self, other: Frame) -> bool:
        """Whether rows made under one frame hold under the other."""
        return (
            (self.horizon is other.horizon or self.horizon == other.horizon)
            and self.offset == other.offset
            and self.kernel is other.kernel
            and _same(self.block_tokens, other.block_tokens)
            and _same(self.lead, other.lead)
        )


def _same(some: FloatArray, other: FloatArray) -> bool:
    return some is other or np.array_equal(some, other)


class Occupancy:
    """(g, N) batch slots and KV tokens of started requests, and which rows are out of date."""

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._usage = Usage(batch=np.zeros((0, 0)), kv=np.zeros((0, 0)))
        self._stale: BoolArray = np.zeros(0, dtype=np.bool_)
        self._late: BoolArray = np.zeros(0, dtype=np.bool_)

    def copy(self, frame: Frame) -> Occupancy:
        """The rows under a frame, to be kept while these move on; few are sooner made again."""
        other = Occupancy()
        other._see(frame)
        if 2 * np.count_nonzero(self._stale) < self._stale.size:
            other._usage = self._usage.copy()
            other._stale, other._late = self._stale.copy(), self._late.copy()
        return other

    def enter(self, frame: Frame) -> None:
        """Look through a frame from now on; a new one makes every row stale."""
        if self._frame is not None and self._frame.same_as(frame):
            return
        self._see(frame)
        self._make_room(frame.horizon)

    def touch(self, worker: int) -> None:
        """Something happened on a worker."""
        if worker < self._stale.size:
            self._stale[worker] = True

    def touch_all(self, workers: IntArray) -> None:
        """Something happened on some workers."""
        self._stale[workers[workers < self._stale.size]] = True

    def touch_late(self) -> None:
        """The length distributions changed, on which outlived forecasts depend."""
        self._stale |= self._late

    def forget(self) -> None:
        """The workers are others than before."""
        self._frame = None

    def are_stale(self, workers: IntArray) -> bool:
        """Whether some workers' rows, or one of them, must be made."""
        return bool(np.count_nonzero(self._stale[workers]))

    def make(self, workers: IntArray, started: Started) -> None:
        """Make the stale ones of some workers' rows."""
        self._make_room(started.frame.horizon)
        started.hold(workers, self._usage, self._stale, self._late)

    def all_plus(self, batch: FloatArray, kv: FloatArray) -> Usage:
        """(g, N) all rows, which are fresh, with (g,) amounts added; where none are, no copy."""
        if not (batch.any() or kv.any()):
            return self._usage
        return self.plus(np.arange(batch.size), batch, kv)

    def plus(self, workers: IntArray, batch: FloatArray, kv: FloatArray) -> Usage:
        """(w, N) rows that are fresh, with (g,) the same amounts added on every bucket."""
        shape = (workers.size, self._usage.batch.shape[1])
        total = Usage(batch=np.empty(shape), kv=np.empty(shape))
        held = self._usage.batch, self._usage.kv
        with_others(workers, *held, batch, kv, total.batch, total.kv)
        return total

    def free(self, workers: IntArray, others: PerWorker, limits: PerWorker) -> Usage:
        """(w, N) what fresh rows leave of limits where others hold the same on every bucket."""
        shape = (workers.size, self._usage.batch.shape[1])
        free = Usage(batch=np.empty(shape), kv=np.empty(shape))
        held = self._usage.batch, self._usage.kv
        free_beside(workers, *held, *others, *limits, free.batch, free.kv)
        return free

    def _see(self, frame: Frame) -> None:
        """Look through a frame; nothing is known under it."""
        workers = frame.block_tokens.size
        self._frame = frame
        self._stale = np.ones(workers, dtype=np.bool_)
        self._late = np.zeros(workers, dtype=np.bool_)

    def _make_room(self, horizon: Horizon) -> None:
        """Have rows of the right shape; where it is another, all are stale."""
        shape = (self._stale.size, horizon.buckets)
        if self._usage.batch.shape != shape:
            # What is stale is made before anybody looks.
            self._usage = Usage(batch=np.empty(shape), kv=np.empty(shape))
