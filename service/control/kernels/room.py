"""3 controller, kernels of a residual: which columns fit what is free, and where and when.

Words and shapes are those of admission.py.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOLS,
    COLUMN,
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    INT,
    INTS,
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


@kernel(INT(COLUMN, FLOATS, FLOATS, FLOATS_2D, FLOATS_2D, FLOAT))
def best_fit(
    column: Column,
    margin: FloatArray,
    batch_limit: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
) -> int:
    """The worker that a column fits with the largest (w,) margin above -inf; -1 for none.

    The largest share of batch slots that is free breaks ties, then the index.
    """
    found, best, emptiest = -1, -np.inf, -np.inf
    for g in range(batch.shape[0]):
        share = batch[g, 0] / batch_limit[g]
        better = margin[g] > best or (found >= 0 and margin[g] == best and share > emptiest)
        if better and _fits(batch[g], kv[g], column, q):
            found, best, emptiest = g, margin[g], share
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
