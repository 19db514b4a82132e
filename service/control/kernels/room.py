"""3 controller, kernels of a residual: which columns fit what is free, and where and when.

Words and shapes are those of admission.py.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOL,
    BOOLS,
    BOOLS_2D,
    COLUMN,
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    INT,
    INTS,
    INTS_OUT,
    NOTHING,
    Column,
    kernel,
    part,
)

STARTED = types.Array(INT, 2, "C")
PLACE = types.UniTuple(INT, 2)  # type: ignore[no-untyped-call]
FITTING = types.Array(types.boolean, 2, "C")


@kernel(FITTING(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS_2D, FLOATS_2D, FLOAT))
def fitting(
    start: FloatArray,
    steps: FloatArray,
    footprint: FloatArray,
    sequences: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
) -> BoolArray:
    """(n, w) whether each of n columns is within (w, N) what is free, on all its buckets."""
    fits = np.empty((start.size, batch.shape[0]), dtype=np.bool_)
    for row in range(start.size):
        column = (start[row], steps[row], footprint[row], sequences[row])
        for g in range(batch.shape[0]):
            fits[row, g] = _fits(batch[g], kv[g], column, q)
    return fits


@kernel(STARTED(INTS, INTS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS_2D_OUT, FLOATS_2D_OUT, FLOAT))
def admit_in_order(
    rows: IntArray,
    workers: IntArray,
    start: FloatArray,
    steps: FloatArray,
    footprint: FloatArray,
    sequences: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
) -> IntArray:
    """Start (p,) pairs in turn, each if it still fits and its request is not started yet.

    Returns:
        (k, 2) request and worker of the starts, in order; they are taken out of what is free.
    """
    gone, count = np.zeros(start.size, dtype=np.bool_), 0
    started = np.empty((min(rows.size, start.size), 2), dtype=np.int64)
    for pair in range(rows.size):
        row, g = rows[pair], workers[pair]
        column = (start[row], steps[row], footprint[row], sequences[row])
        if not gone[row] and _fits(batch[g], kv[g], column, q):
            _take(batch, kv, g, column, 0, q)
            started[count, 0], started[count, 1] = row, g
            count += 1
            gone[row] = True
    return started[:count]


@kernel(NOTHING(FLOATS_2D_OUT, FLOATS_2D_OUT, INT, COLUMN, INT, FLOAT))
def take_out(
    batch: FloatArray,
    kv: FloatArray,
    worker: int,
    column: Column,
    shift: int,
    q: float,
) -> None:
    """Take a column (start, steps, footprint, sequences), `shift` buckets later, from a worker."""
    _take(batch, kv, worker, column, shift, q)


@kernel(BOOL(FLOATS_2D))
def is_full(batch: FloatArray) -> bool:
    """Whether no worker has a free batch slot on the first bucket."""
    return _is_full(batch)


@kernel(
    STARTED(
        *(INTS_OUT, INT, FLOATS, INTS, INTS, BOOLS_2D, INTS, FLOATS),
        *(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS_2D_OUT, FLOATS_2D),
        *(FLOATS_2D_OUT, FLOATS_2D_OUT, FLOAT, INT),
    )
)
def start_oldest(
    rows: IntArray,
    first: int,
    age_s: FloatArray,
    order: IntArray,
    kind: IntArray,
    reach: BoolArray,
    workers: IntArray,
    batch_limit: FloatArray,
    start: FloatArray,
    steps: FloatArray,
    footprint: FloatArray,
    sequences: FloatArray,
    liking: FloatArray,
    toll: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
    most: int,
) -> IntArray:
    """Start the oldest of some requests, one by one, until one fits nowhere or no slot is free.

    Args:
        rows: (m,) who asks; those from `first` on are moved about: those who start come first, in
            their order, then the one that fits nowhere.
        first: those before it are left alone.
        age_s: (n,) seconds waited; the largest goes first.
        order: (n,) rank by arrival; breaks ties.
        kind: (n,) row of `reach`.
        reach: (kinds, g) where a kind may go.
        workers: (w,) indices of the workers in what is free.
        batch_limit: (g,) B_g; of equally liked workers the one with the largest free share of it
            is taken, then the first.
        start: (n,) of the columns, in iterations.
        steps: (n,) theirs.
        footprint: (n,) theirs.
        sequences: (n,) theirs.
        liking: (n, w) the most liked worker is taken, or (0, w) where all are liked the same.
        toll: (n, w) what each start takes from everybody's liking of its worker; as `liking`.
        batch: (w, N) free batch slots; starts are taken out.
        kv: (w, N) free KV tokens; likewise.
        q: iterations per bucket.
        most: how many may start.

    Returns:
        (k, 3) the starts in order: request, place of its worker, and the place that it would have
        had if all were liked the same.
    """
    started = np.empty((max(min(rows.size - first, most), 0), 3), dtype=np.int64)
    count, alike = 0, np.zeros(workers.size)
    while count < started.shape[0] and not _is_full(batch):
        place = first + count
        _bring_oldest(rows, place, age_s, order)
        row = rows[place]
        may, column = reach[kind[row]], (start[row], steps[row], footprint[row], sequences[row])
        plain = best = _best_fit(alike, may, workers, batch_limit, column, batch, kv, q)
        if liking.shape[0]:
            own = liking[row]
            best = _best_fit(own, may, workers, batch_limit, column, batch, kv, q)
        if best < 0:
            break
        _take(batch, kv, best, column, 0, q)
        for other in range(liking.shape[0]):
            liking[other, best] -= toll[other, best]
        started[count, 0], started[count, 1], started[count, 2] = row, best, plain
        count += 1
    return started[:count]


@part
def _is_full(batch: FloatArray) -> bool:
    most = 0.0
    for g in range(batch.shape[0]):
        most = max(most, batch[g, 0])
    return most < 1


@part
def _bring_oldest(rows: IntArray, place: int, age_s: FloatArray, order: IntArray) -> None:
    """Swap the oldest of the rows from a place on to that place."""
    at = place
    for other in range(place + 1, rows.size):
        one, best = rows[other], rows[at]
        if age_s[one] > age_s[best] or (age_s[one] == age_s[best] and order[one] < order[best]):
            at = other
    rows[place], rows[at] = rows[at], rows[place]


@part
def _best_fit(
    liking: FloatArray,
    may: BoolArray,
    workers: IntArray,
    batch_limit: FloatArray,
    column: Column,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
) -> int:
    """The most liked worker that a column may go to and fits, then the emptiest; -1 for none."""
    found, best, emptiest = -1, -np.inf, -np.inf
    for g in range(workers.size):
        margin = liking[g] if may[workers[g]] else -np.inf
        share = batch[g, 0] / batch_limit[workers[g]]
        better = margin > best or (found >= 0 and margin == best and share > emptiest)
        if better and _fits(batch[g], kv[g], column, q):
            found, best, emptiest = g, margin, share
    return found


@kernel(PLACE(BOOLS, COLUMN, FLOATS_2D, FLOATS_2D, FLOAT))
def earliest_room(
    allowed: BoolArray,
    column: Column,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
) -> tuple[int, int]:
    """Fewest buckets >= 1 a column must move right to fit one of the (g,) allowed workers.

    Returns:
        The worker, the one with the most free slots there, and the buckets; (-1, 0) for no room.
    """
    found, soonest = -1, batch.shape[1]
    for g in range(batch.shape[0]):
        if allowed[g]:
            shift = _earliest_on(batch[g], kv[g], column, min(soonest + 1, batch.shape[1]), q)
            if 0 < shift < soonest or (shift == soonest and batch[g, shift] > batch[found, shift]):
                found, soonest = g, shift
    return found, soonest if found >= 0 else 0


@part
def _earliest_on(batch: FloatArray, kv: FloatArray, column: Column, stop: int, q: float) -> int:
    """Fewest buckets in [1, stop) that a column must move right to fit a worker; 0 for none."""
    last, level, peak = _asked(column, kv.size, q)
    several, shift = column[3], 1
    while shift < stop:
        later = shift
        for b in range(min(shift + last, kv.size - 1), shift - 1, -1):
            if batch[b] < several:
                later = b + 1
                break
        if later == shift and shift + last < kv.size and not kv[shift + last] >= peak:
            later = shift + 1
        if later == shift:
            # Moved right by s buckets, the line of KV use lies lower by s x q x sequences.
            lower = level - several * q * shift
            for b in range(min(shift + last, kv.size) - 1, shift - 1, -1):
                line = kv[b] - several * ((b + 1) * q)
                if not line >= lower:
                    enough = (level - line) / (several * q)
                    later = max(shift + 1, min(b + 1, math.floor(min(enough, kv.size))))
                    break
        if later == shift:
            return shift
        shift = later
    return 0


@part
def _fits(batch: FloatArray, kv: FloatArray, column: Column, q: float) -> bool:
    """Whether a column is within what is free on a worker, on all its buckets."""
    last, level, peak = _asked(column, kv.size, q)
    several = column[3]
    if not peak <= kv[last]:
        return False
    for b in range(last + 1):
        if not several <= batch[b]:
            return False
        if b < last and not level <= kv[b] - several * ((b + 1) * q):
            return False
    return True


@part
def _asked(column: Column, buckets: int, q: float) -> tuple[int, float, float]:
    """Last bucket of a column; its KV use there, and on an earlier one less what the edge adds."""
    start, steps, footprint, sequences = column
    end = min(start + steps, buckets * q)
    last = max(math.ceil(end / q) - 1, 0)
    level = sequences * (footprint - start)
    return last, level, level + sequences * end


@part
def _take(batch: FloatArray, kv: FloatArray, g: int, column: Column, shift: int, q: float) -> None:
    start, steps, footprint, sequences = column
    start += shift * q
    end = min(start + steps, kv.shape[1] * q)
    last = math.ceil(end / q)
    level = sequences * (footprint - start)
    for b in range(shift, last):
        batch[g, b] -= sequences
        kv[g, b] -= level + sequences * ((b + 1) * q)
    kv[g, last - 1] += sequences * (last * q - end)
