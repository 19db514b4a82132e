"""3 controller, kernels of the calendar: what each started request holds on the look-ahead.

started.py and lengths.py say what these numbers mean. All arithmetic is on whole numbers but for
requests that outlived their forecast, and in the order of the requests.
"""

from __future__ import annotations

from math import log2
from typing import Final

import numpy as np

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOL,
    BOOLS,
    BOOLS_OUT,
    FLOATS,
    FLOATS_2D_OUT,
    FLOATS_3D,
    FLOATS_OUT,
    INTS,
    INTS_2D,
    NOTHING,
    dense,
    kernel,
    part,
)

SURVIVAL: Final = (dense(FLOATS_3D), dense(INTS_2D), *[dense(FLOATS)] * 3)
"""`LengthPredictor.survival`: (2, pools, cells + 1) sums; (pools, levels) pools above; (cells,)
grid and width; (3,) unit of ratios, weight of the pool above, quantile or 0."""
ROWS: Final = (*[dense(BOOLS_OUT)] * 2, *[dense(FLOATS_2D_OUT)] * 2)
"""Stale, late; batch slots and KV tokens."""
STARTED: Final = (*[dense(INTS)] * 2, *[dense(FLOATS)] * 6)
TIMES: Final = (BOOL, dense(BOOLS), *[dense(FLOATS)] * 2)
FRAME: Final = (dense(FLOATS),) * 4
OCTAVE_BITS: Final = 3
OCTAVE_CELLS: Final = 2**OCTAVE_BITS
"""Cells of lengths from one power of 2 to the next."""
LINE_SHIFT: Final = 52 - OCTAVE_BITS
LINE_OF_1: Final = 1023 * OCTAVE_CELLS
"""A float of 64 bits has 52 of them behind the point, and powers of 2 counted from -1023."""
LENGTHS_KEPT: Final = 1024
"""Expected lengths that are kept while a calendar is made; a power of 2."""


@part
def _survivors(
    pool: int, cell: int, sums: FloatArray, above: IntArray, prior_weight: float
) -> tuple[float, float]:
    """Requests of a pool from a cell on, and their tokens; shrunk to the pools above it."""
    top = 1 if pool == 1 else 0
    alive, work, total = sums[0, top, cell], sums[1, top, cell], sums[0, top, 0]
    for level in range(above.shape[1]):
        at = above[pool, level]
        if at < 0:
            break
        weight = prior_weight / total
        alive = sums[0, at, cell] + weight * alive
        work = sums[1, at, cell] + weight * work
        total = sums[0, at, 0] + prior_weight
    return alive, work


@part
def _begin(bits: int, cells: int) -> int:
    """The cell of a length of at least 1, or the one before it, from its bits as a whole number.

    Read so, a float is a line from one power of 2 to the next: it lies below the logarithm, by less
    than a cell.
    """
    return min((bits >> LINE_SHIFT) - LINE_OF_1, cells - 2)


@part
def _seen_cell(cell: int, reached: float, edge: float, cells: int) -> int:
    """The cell of a length that lies before the next cell's edge, or at the edge but for rounding.

    What is on the grid must not fall below its own cell by rounding.
    """
    if reached >= edge * (1.0 - 1e-9):
        return min(int(log2(reached) * OCTAVE_CELLS + 1e-9), cells - 1)
    return cell


@part
def _length(
    pool: int, first: int, sums: FloatArray, above: IntArray, grid: FloatArray, shape: FloatArray
) -> float:
    """Length, in a pool's unit, of what ends in a cell or a later one; -1 where nothing does."""
    prior_weight, quantile = shape[1], shape[2]
    alive, work = _survivors(pool, first, sums, above, prior_weight)
    if quantile > 0:
        most = (1.0 - quantile) * alive
        at = min(first, grid.size - 1)
        while _survivors(pool, at + 1, sums, above, prior_weight)[0] > most:
            at += 1
        return float(grid[at])
    return work / alive if alive > 0 else -1.0


@part
def _left(length: float, reached: float, width: float, unit: float) -> float:
    """Tokens that are left of a length in a pool's unit; -1 for none: to the end of the cell."""
    if length < 0:
        length = reached + width
    return max((length - reached) / unit, 1.0)


@kernel(NOTHING(INTS, FLOATS, FLOATS, *SURVIVAL, FLOATS_OUT))
def left_tokens(
    pool: IntArray,
    scale: FloatArray,
    produced: FloatArray,
    sums: FloatArray,
    above: IntArray,
    grid: FloatArray,
    width: FloatArray,
    shape: FloatArray,
    left: FloatArray,
) -> None:
    """Put what is expected to be left of n requests into (n,) `left`."""
    number = np.empty(1)
    bits = number.view(np.int64)
    for row in range(pool.size):
        unit = shape[0] / scale[row] if pool[row] == 1 else 1.0
        reached = produced[row] * unit
        number[0] = max(reached, 1.0)
        cell = _begin(bits[0], grid.size)
        cell += number[0] >= grid[cell + 1]
        edge = grid[min(cell + 1, grid.size - 1)]
        cell = _seen_cell(cell, number[0], edge, grid.size)
        first = cell + (reached >= 1.0)
        length = _length(pool[row], first, sums, above, grid, shape)
        left[row] = _left(length, reached, width[cell], unit)


@part
def _places(
    wanted: IntArray, stale: BoolArray, block_tokens: FloatArray, q: float
) -> tuple[IntArray, BoolArray]:
    """(g,) places of the stale of some workers, -1: none; there, whether q is whole blocks."""
    place, due = np.full(stale.size, -1), 0
    for g in wanted:
        if stale[g] and place[g] < 0:
            place[g] = due
            due += 1
    whole = np.zeros(due, np.bool_)
    for g in wanted:
        if place[g] >= 0:
            whole[place[g]] = block_tokens[g] > 1 and q % block_tokens[g] == 0
    return place, whole


@part
def _clear(
    wanted: IntArray,
    place: IntArray,
    some: FloatArray | BoolArray,
    others: FloatArray | BoolArray,
) -> None:
    """Set to zero what some workers have, where they have a place."""
    for g in wanted:
        if place[g] >= 0:
            some[g] = others[g] = 0


@part
def _unseen_tokens(elapsed_s: float, iteration_s: float, limit: float) -> float:
    """Tokens of a request that does not stream: it is taken to decode at the worker's pace."""
    return min(max(float(np.floor(elapsed_s / iteration_s)), 0.0), limit - 1.0)


@part
def _held_up(start: float, offset: float, wait_s: float, iteration_s: float) -> tuple[float, float]:
    """Start of a column whose request still waits for its prompt, and how long it holds nothing.

    Where it begins later than now it counts from now on.
    """
    if wait_s <= 0:
        return start, 0.0
    start += wait_s / iteration_s
    early = max(start - offset, 0.0)
    return start - early, early


@part
def _laid(
    end: float, level: float, block: float, q: float, whole: bool, buckets: int
) -> tuple[int, float, float]:
    """Lay out what runs now: its last bucket, its KV level, what its KV lacks at its last edge.

    It holds every bucket up to the last one, -1 for none, so a sum from the right over last buckets
    does the work of range adds. The level (use at an edge, less the edge) is in whole blocks, as
    columns.in_whole_blocks counts them. Where a bucket is whole blocks, the end is a bucket's too.
    """
    if whole:
        return min(int(np.ceil(end / q)), buckets) - 1, np.ceil(level / block) * block, 0.0
    last = int(np.ceil(min(end, buckets * q) / q)) - 1
    return last, level + (block - 1.0), max((last + 1) * q - end, 0.0)


@part
def _sum_up(batch: FloatArray, kv: FloatArray, short: FloatArray, reach: int, q: float) -> None:
    """Turn amounts by last bucket into what is held on each: sums from the right.

    `short` is (N,), or (0,) where nothing lacks anything.
    """
    slots, level = 0.0, 0.0
    for bucket in range(reach - 1, -1, -1):
        slots += batch[bucket]
        level += kv[bucket]
        batch[bucket] = slots
        kv[bucket] = level + slots * ((bucket + 1) * q)
        if short.size:
            kv[bucket] -= short[bucket]


@part
def _sum_up_all(
    wanted: IntArray,
    place: IntArray,
    batch: FloatArray,
    kv: FloatArray,
    short: FloatArray,
    reach: IntArray,
    q: float,
) -> None:
    """Sum up what some workers have, once where they have a place."""
    for g in wanted:
        if place[g] >= 0:
            _sum_up(batch[g], kv[g], short[place[g]], reach[place[g]], q)
            place[g] = -1


@kernel(NOTHING(INTS, *ROWS, *STARTED, *TIMES, *FRAME, *SURVIVAL))
def hold(
    wanted: IntArray,
    stale: BoolArray,
    late: BoolArray,
    batch: FloatArray,
    kv: FloatArray,
    worker: IntArray,
    pool: IntArray,
    prompt_tokens: FloatArray,
    produced: FloatArray,
    forecast: FloatArray,
    limit: FloatArray,
    scale: FloatArray,
    sequences: FloatArray,
    blind: bool,
    streams: BoolArray,
    ready_s: FloatArray,
    started_s: FloatArray,
    block_tokens: FloatArray,
    lead: FloatArray,
    iteration_s: FloatArray,
    frame: FloatArray,
    sums: FloatArray,
    above: IntArray,
    grid: FloatArray,
    width: FloatArray,
    shape: FloatArray,
) -> None:
    """Make the stale rows of some wanted workers from n started requests.

    Rows: `wanted` (w,) indices; `stale` (g,), those that are made are so no more; `late` (g,) which
    workers hold a request that outlived its forecast; `batch` and `kv` (g, N) what is held.
    Requests, (n,): from `worker` to `sequences`; `streams`, `ready_s` and `started_s` are looked at
    only where some are `blind`, not seen token by token. Workers, (g,): `block_tokens`, `lead`,
    `iteration_s`. `frame` (4,): q, iterations from the left edge to now, iterations of a mixed
    prefill, now_s. The rest is SURVIVAL.
    """
    q, offset, prefill, now_s = frame[0], frame[1], frame[2], frame[3]
    buckets = batch.shape[1]
    place, whole = _places(wanted, stale, block_tokens, q)
    reach = np.zeros(whole.size, np.int64)
    short = np.zeros((whole.size, 0 if whole.all() else buckets))
    _clear(wanted, place, batch, kv)
    _clear(wanted, place, stale, late)
    # Many ask the same of the lengths; what one asked is kept, where no other takes its place.
    known, lengths = np.full(LENGTHS_KEPT, -1), np.empty(LENGTHS_KEPT)
    number = np.empty(1)
    bits = number.view(np.int64)
    for row in range(worker.size):
        g = worker[row]
        # A request whose worker is gone has worker -1.
        if g < 0 or place[g] < 0:
            continue
        seen, total, wait_s, at = produced[row], forecast[row], 0.0, place[g]
        if blind and ready_s[row] > 0:
            wait_s = max(ready_s[row] - now_s, 0.0)
        elif blind and ready_s[row] == 0 and not streams[row]:
            seen = _unseen_tokens(now_s - started_s[row], iteration_s[g], limit[row])
        if seen >= total:
            late[g] = True
            unit = shape[0] / scale[row] if pool[row] == 1 else 1.0
            reached = seen * unit
            number[0] = max(reached, 1.0)
            cell = _begin(bits[0], grid.size)
            cell += number[0] >= grid[cell + 1]
            edge = grid[min(cell + 1, grid.size - 1)]
            cell = _seen_cell(cell, number[0], edge, grid.size)
            # Survivors are those in later cells; before the first token that is everybody.
            first = cell + (reached >= 1.0)
            key = pool[row] * (grid.size + 1) + first
            kept = key & (LENGTHS_KEPT - 1)
            if known[kept] != key:
                known[kept] = key
                lengths[kept] = _length(pool[row], first, sums, above, grid, shape)
            total = seen + _left(lengths[kept], reached, width[cell], unit)
        total = max(min(total, limit[row]), seen + 1.0)
        # A prefill counts as done when it has begun: whether it still runs cannot be known, and
        # taking it for done never understates the KV it holds.
        start = offset - (seen + prefill) - lead[g]
        start, early = _held_up(start, offset, wait_s, iteration_s[g])
        end, level = start + (total + prefill + early), prompt_tokens[row] - prefill - start
        last, level, lack = _laid(end, level, block_tokens[g], q, whole[at], buckets)
        if last >= 0:
            reach[at] = max(reach[at], last + 1)
            batch[g, last] += sequences[row]
            kv[g, last] += sequences[row] * level
            if lack > 0:
                short[at, last] += sequences[row] * lack
    _sum_up_all(wanted, place, batch, kv, short, reach, q)


@kernel(NOTHING(INTS, *ROWS[2:], *[dense(FLOATS)] * 2, *ROWS[2:]))
def with_others(
    wanted: IntArray,
    batch: FloatArray,
    kv: FloatArray,
    other_batch: FloatArray,
    other_kv: FloatArray,
    batch_out: FloatArray,
    kv_out: FloatArray,
) -> None:
    """Put the rows of w wanted workers, with what others hold on every bucket, into (w, N).

    `batch` and `kv` are (g, N), those of others (g,).
    """
    for row in range(wanted.size):
        g = wanted[row]
        for bucket in range(batch.shape[1]):
            batch_out[row, bucket] = batch[g, bucket] + other_batch[g]
            kv_out[row, bucket] = kv[g, bucket] + other_kv[g]
