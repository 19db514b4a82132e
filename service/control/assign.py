"""3 controller, primal side: greedy admission that never overdraws a future slot (Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.control.columns import (
    BoolArray,
    Columns,
    FloatArray,
    Horizon,
    IntArray,
    Usage,
    total_usage,
)


class Residual:
    """Working residual b^(k) of a tick: capacity minus use, and what still fits into it.

    Mutable on purpose: the greedy pass subtracts as it admits. Capacities may be infinite.
    """

    def __init__(self, capacity: Usage, used: Usage, horizon: Horizon) -> None:
        self._horizon = horizon
        self.batch = capacity.batch - used.batch
        self.kv = capacity.kv - used.kv
        self._edges = horizon.right_edges
        self._batch_low = np.minimum.accumulate(self.batch, axis=1)
        self._kv_low = np.minimum.accumulate(self.kv - self._edges, axis=1)

    def _buckets(self, columns: Columns) -> tuple[IntArray, FloatArray]:
        end = np.minimum(columns.start + columns.steps, self._horizon.iterations)
        last = np.maximum(np.ceil(end / self._horizon.bucket_iterations).astype(np.int64), 1)
        return last - 1, end

    def fits(self, columns: Columns) -> BoolArray:
        """Whether each of n columns that start at the left edge's bucket fits each of g workers.

        Returns:
            (n, g) True where the column's use is within the residual on all its future slots. With
            several sequences KV is checked as sequences x the use of one.

        Source: [OLP] Algorithm 1, line 13.
        """
        last, end = self._buckets(columns)
        before = np.maximum(last - 1, 0)
        level = columns.footprint - columns.start
        seqs = columns.sequences[:, None]
        batch_ok = seqs <= self._batch_low[:, last].T
        # One sequence: level + edge <= kv on all buckets but the last, level + end on the last.
        inner = (level[:, None] <= self._kv_low[:, before].T) | (last == 0)[:, None]
        outer = (level + end)[:, None] <= self.kv[:, last].T
        several = columns.sequences > 1
        result = np.asarray(batch_ok & inner & outer)
        if several.any():
            for row in np.flatnonzero(several):
                result[row] &= self._fits_slowly(columns, int(row))
        return result

    def _fits_slowly(self, columns: Columns, row: int) -> BoolArray:
        one = columns.take(np.array([row])).on_worker(np.zeros(1, dtype=np.int64))
        use = total_usage(one, self._horizon, 1)
        touched = use.batch[0] > 0
        fits_kv = (self.kv >= use.kv[0]) | ~touched
        fits_batch = (self.batch >= use.batch[0]) | ~touched
        return np.asarray((fits_kv & fits_batch).all(axis=1))

    def fits_one(self, columns: Columns, row: int, worker: int) -> bool:
        """Whether one column still fits one worker."""
        if columns.sequences[row] > 1:
            return bool(self._fits_slowly(columns, row)[worker])
        end = min(columns.start[row] + columns.steps[row], self._horizon.iterations)
        last = max(int(np.ceil(end / self._horizon.bucket_iterations)) - 1, 0)
        level = columns.footprint[row] - columns.start[row]
        if self._batch_low[worker, last] < 1 or level + end > self.kv[worker, last]:
            return False
        return last == 0 or bool(level <= self._kv_low[worker, last - 1])

    def subtract(self, columns: Columns, row: int, worker: int) -> None:
        """Take an admitted (or reserved) column out of one worker's residual."""
        one = columns.take(np.array([row])).on_worker(np.zeros(1, dtype=np.int64))
        use = total_usage(one, self._horizon, 1)
        self.batch[worker] -= use.batch[0]
        self.kv[worker] -= use.kv[0]
        self._batch_low[worker] = np.minimum.accumulate(self.batch[worker])
        self._kv_low[worker] = np.minimum.accumulate(self.kv[worker] - self._edges)

    def reserve(self, columns: Columns, row: int, allowed: BoolArray) -> bool:
        """Set aside the earliest room for a column that fits nowhere now.

        The column is moved right, bucket by bucket, until it fits one of the allowed workers; there
        it is subtracted, so that whoever starts later must end before it or fit beside it.

        Returns:
            Whether there was room inside the look-ahead.
        """
        buckets = self._horizon.buckets
        for shift in range(1, buckets):
            moved = Columns(
                worker=columns.worker[row : row + 1],
                start=columns.start[row : row + 1] + shift * self._horizon.bucket_iterations,
                steps=columns.steps[row : row + 1],
                footprint=columns.footprint[row : row + 1],
                sequences=columns.sequences[row : row + 1],
            )
            fits = self._fits_slowly(moved, 0) & allowed
            if fits.any():
                worker = int(np.argmax(np.where(fits, self.batch[:, shift], -np.inf)))
                self.subtract(moved, 0, worker)
                return True
        return False

    def has_slot(self) -> BoolArray:
        """(g,) whether a worker has a free batch slot now."""
        return np.asarray(self.batch[:, 0] >= 1)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Pairs that may be admitted.

    Attributes:
        columns: the n waiting requests' columns (their worker array is not used).
        margin: (n, g) reduced costs; -inf where a pair is not allowed.
        arrival_order: (n,) rank by arrival; breaks ties between equal margins.
        floor: only margins strictly above it are admitted; Algorithm 1 has 0.
    """

    columns: Columns
    margin: FloatArray
    arrival_order: IntArray
    floor: float = 0.0


def admit(candidates: Candidates, residual: Residual) -> list[tuple[int, int]]:
    """Admit greedily by decreasing margin; every admitted column fits on all its future slots.

    Order is total: margin, then earlier arrival, then worker index. Pairs that do not fit at the
    outset can never fit later in the pass, so they are dropped before sorting; this changes no
    decision.

    Returns:
        (request row, worker) in the order of admission; `residual` has them subtracted.

    Source: [OLP] Algorithm 1, lines 10-16, and constraint (5).
    """
    allowed = (candidates.margin > candidates.floor) & residual.fits(candidates.columns)
    rows, workers = np.nonzero(allowed)
    if rows.size == 0:
        return []
    margins = candidates.margin[rows, workers]
    order = np.lexsort((workers, candidates.arrival_order[rows], -margins))
    admitted: list[tuple[int, int]] = []
    taken: set[int] = set()
    full: set[int] = set()
    open_workers = len(set(workers.tolist()))
    for row, worker in zip(rows[order].tolist(), workers[order].tolist(), strict=True):
        if row in taken or worker in full:
            continue
        if residual.fits_one(candidates.columns, row, worker):
            residual.subtract(candidates.columns, row, worker)
            admitted.append((row, worker))
            taken.add(row)
            if residual.batch[worker, 0] < 1:
                full.add(worker)
                if len(full) == open_workers:
                    break
    return admitted


def admit_balanced(
    candidates: Candidates, residual: Residual, preference: FloatArray
) -> list[tuple[int, int]]:
    """Admit by decreasing best margin; among a request's equally good workers take the preferred.

    Args:
        candidates: as for `admit`.
        residual: updated in place.
        preference: (g,) larger is better at equal margin, per free batch slot of the worker: the
            comparison is preference x free slots now, so starts of one tick spread out.

    Differs: Algorithm 1 leaves ties between workers open; the lowest index would pile equal
    requests onto one worker, whose iterations then get longer.
    """
    allowed = (candidates.margin > candidates.floor) & residual.fits(candidates.columns)
    rows = np.flatnonzero(allowed.any(axis=1))
    if rows.size == 0:
        return []
    margin = np.where(allowed[rows], candidates.margin[rows], -np.inf)
    order = np.lexsort((candidates.arrival_order[rows], -margin.max(axis=1)))
    admitted: list[tuple[int, int]] = []
    usable = allowed[rows].any(axis=0)
    for index in order.tolist():
        row = int(rows[index])
        worker = _best_worker(candidates, residual, row, margin[index], preference)
        if worker is None:
            continue
        residual.subtract(candidates.columns, row, worker)
        admitted.append((row, worker))
        if not (residual.has_slot() & usable).any():
            break
    return admitted


def _best_worker(
    candidates: Candidates,
    residual: Residual,
    row: int,
    margin: FloatArray,
    preference: FloatArray,
) -> int | None:
    """The worker with the largest margin that the request still fits; free slots break ties."""
    liking = preference * residual.batch[:, 0]
    for worker in np.lexsort((-liking, -margin)).tolist():
        if margin[worker] == -np.inf:
            return None
        if residual.fits_one(candidates.columns, row, worker):
            return int(worker)
    return None
