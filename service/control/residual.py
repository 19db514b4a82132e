"""3 controller, residual: what is free on every future bucket, and which columns fit into it.

A column that starts now fits a worker when three numbers do: its sequences against the fewest free
slots up to its last bucket, its KV line against the tightest earlier bucket, its largest KV use
against its last bucket. Running minima answer the first two for every length at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from service.control.columns import BoolArray, Columns, FloatArray, Horizon, IntArray, Usage

FIRST_SHIFTS = 32
"""Buckets in which room for a reservation is looked for first; mostly there is some."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What n columns that start in the first bucket ask of a worker; all arrays are (n,).

    Attributes:
        sequences: batch slots on every bucket up to `last`.
        last: index of the last bucket.
        level: KV use on an earlier bucket is level + sequences x the bucket's right edge.
        peak: KV tokens on the last bucket.
    """

    sequences: FloatArray
    last: IntArray
    level: FloatArray
    peak: FloatArray

    def take(self, rows: IntArray) -> Demand:
        """The demand of some rows."""
        return Demand(self.sequences[rows], self.last[rows], self.level[rows], self.peak[rows])

    def by_sequences(self) -> list[tuple[float, IntArray | slice]]:
        """Rows with equal numbers of sequences; mostly all have one."""
        count = self.sequences
        if count.size and count.min() == count.max():
            return [(float(count[0]), slice(None))]
        return [
            (several, np.flatnonzero(count == several)) for several in np.unique(count).tolist()
        ]


class Residual:
    """Working residual b^(k) of a tick: capacity minus use, and what still fits into it.

    Mutable on purpose: the greedy pass subtracts as it admits. Capacities may be infinite.

    Attributes:
        batch: (g, N) free batch slots. kv: (g, N) free KV tokens.
    """

    def __init__(self, capacity: Usage, used: Usage, horizon: Horizon) -> None:
        self._horizon = horizon
        self._edges = horizon.right_edges
        self.batch = capacity.batch - used.batch
        self.kv = capacity.kv - used.kv
        self._batch_low = np.minimum.accumulate(self.batch, axis=1)
        self._kv_low: dict[float, FloatArray] = {}

    def copy(self) -> Residual:
        """One that can be tried on: what is subtracted there stays here."""
        other = Residual.__new__(Residual)
        other._horizon, other._edges = self._horizon, self._edges
        other.batch, other.kv = self.batch.copy(), self.kv.copy()
        other._batch_low = self._batch_low.copy()
        other._kv_low = {several: low.copy() for several, low in self._kv_low.items()}
        return other

    def is_full(self) -> bool:
        """Whether no worker has a free batch slot now."""
        return not np.count_nonzero(self.batch[:, 0] >= 1)

    def fits_one(self, columns: Columns, row: int, workers: Iterable[int]) -> list[int]:
        """`fits` for one column that starts in the first bucket: those of some workers it fits."""
        start, sequences = float(columns.start[row]), float(columns.sequences[row])
        end = min(start + float(columns.steps[row]), float(self._horizon.iterations))
        last = max(math.ceil(end / self._horizon.bucket_iterations) - 1, 0)
        level = sequences * (float(columns.footprint[row]) - start)
        peak, low = level + sequences * end, self._low(sequences)
        return [
            g
            for g in workers
            if sequences <= self._batch_low[g, last]
            and peak <= self.kv[g, last]
            and level <= low[g, last]
        ]

    def demand(self, columns: Columns) -> Demand:
        """What columns that start in the first bucket ask for."""
        end = np.minimum(columns.start + columns.steps, self._horizon.iterations)
        last = np.ceil(end / self._horizon.bucket_iterations).astype(np.int64) - 1
        level = columns.sequences * (columns.footprint - columns.start)
        return Demand(
            columns.sequences, np.maximum(last, 0), level, level + columns.sequences * end
        )

    def fits(self, columns: Columns) -> BoolArray:
        """Whether each of n columns that start in the first bucket fits each of g workers.

        Returns:
            (n, g) True where the column's use is within the residual on all its future slots.

        Source: [OLP] Algorithm 1, line 13.
        """
        return self.room(self.demand(columns))

    def room(self, demand: Demand) -> BoolArray:
        """(n, g) whether each demand is met by each worker."""
        met = demand.sequences <= self._batch_low.take(demand.last, axis=1)
        met &= demand.peak <= self.kv.take(demand.last, axis=1)
        for sequences, rows in demand.by_sequences():
            low = self._low(sequences).take(demand.last[rows], axis=1)
            met[:, rows] &= demand.level[rows] <= low
        return met.T

    def has_room(self, demand: Demand, worker: IntArray) -> BoolArray:
        """(n,) whether each demand is met by one worker of its own."""
        met = demand.sequences <= self._batch_low[worker, demand.last]
        met &= demand.peak <= self.kv[worker, demand.last]
        for sequences, rows in demand.by_sequences():
            low = self._low(sequences)[worker[rows], demand.last[rows]]
            met[rows] &= demand.level[rows] <= low
        return np.asarray(met)

    def has_slot(self) -> BoolArray:
        """(g,) whether a worker has a free batch slot now."""
        return np.asarray(self.batch[:, 0] >= 1)

    def subtract(self, columns: Columns, row: int, worker: int, shift: int = 0) -> None:
        """Take a column out of one worker's residual, moved right by some buckets."""
        q = self._horizon.bucket_iterations
        sequences = columns.sequences[row]
        start = columns.start[row] + shift * q
        end = min(start + columns.steps[row], self._horizon.iterations)
        last = int(np.ceil(end / q))
        level = sequences * (columns.footprint[row] - start)
        self.batch[worker, shift:last] -= sequences
        self.kv[worker, shift:last] -= level + sequences * self._edges[shift:last]
        self.kv[worker, last - 1] += sequences * (last * q - end)
        self._batch_low[worker] = np.minimum.accumulate(self.batch[worker])
        for several, low in self._kv_low.items():
            np.minimum.accumulate(self.kv[worker] - several * self._edges, out=low[worker, 1:])

    def reserve(self, columns: Columns, row: int, allowed: BoolArray) -> bool:
        """Set aside the earliest room for a column that fits nowhere now.

        It is subtracted where `earliest` finds room, so that whoever starts later must end before
        it or fit beside it.

        Returns:
            Whether there was room inside the look-ahead.
        """
        found = self.earliest(columns, row, allowed)
        if found is not None:
            self.subtract(columns, row, *found)
        return found is not None

    def earliest(self, columns: Columns, row: int, allowed: BoolArray) -> tuple[int, int] | None:
        """Find the fewest buckets a column must move right until it fits some allowed worker.

        Returns:
            The worker, the one with the most free slots there, and the shift in buckets >= 1; None
            when there is no room inside the look-ahead.
        """
        buckets = self._horizon.buckets
        demand = self.demand(columns.take(np.array([row])))
        for begin, stop in ((1, 1 + FIRST_SHIFTS), (1 + FIRST_SHIFTS, buckets)):
            fits = self._fits_later(demand, begin, min(stop, buckets)) & allowed[:, None]
            at = np.flatnonzero(fits.any(axis=0))
            if at.size:
                shift = begin + int(at[0])
                free = np.where(fits[:, at[0]], self.batch[:, shift], -np.inf)
                return int(np.argmax(free)), shift
        return None

    def _fits_later(self, demand: Demand, begin: int, stop: int) -> BoolArray:
        """(g, stop - begin) whether one column fits when it is moved right by so many buckets."""
        sequences, level = float(demand.sequences[0]), float(demand.level[0])
        last = int(demand.last[0])
        shifts = np.arange(begin, max(begin, stop))
        reach = slice(begin, stop + last)
        line = self.kv[:, reach] - sequences * self._edges[reach]
        # Moved right by s buckets, the line of KV use lies lower by s x q x sequences.
        lower = level - sequences * self._horizon.bucket_iterations * shifts
        fits = _lowest(self.batch[:, reach], last + 1)[:, : shifts.size] >= sequences
        if last > 0:
            fits &= _lowest(line, last)[:, : shifts.size] >= lower
        # Beyond the look-ahead nothing is asked.
        inside = shifts[shifts + last < self._horizon.buckets]
        fits[:, : inside.size] &= self.kv[:, inside + last] >= demand.peak[0]
        return np.asarray(fits)

    def _low(self, sequences: float) -> FloatArray:
        """(g, N + 1) minimum over earlier buckets of free KV less what so many sequences add."""
        low = self._kv_low.get(sequences)
        if low is None:
            low = np.full((self.kv.shape[0], self._horizon.buckets + 1), np.inf)
            line = self.kv - sequences * self._edges
            np.minimum.accumulate(line, axis=1, out=low[:, 1:])
            self._kv_low[sequences] = low
        return low


def _lowest(values: FloatArray, width: int) -> FloatArray:
    """(g, N) minimum over `width` entries to the right, itself included, fewer at the end."""
    low, done = values, 1
    while done < width:
        step = min(done, width - done)
        low = (
            np.concatenate([np.minimum(low[:, :-step], low[:, step:]), low[:, -step:]], axis=1)
            if step < low.shape[1]
            else np.minimum.accumulate(low[:, ::-1], axis=1)[:, ::-1]
        )
        done += step
    return low
