"""3 controller, kernels of a decision: who starts where (assign.py says by which rule).

All look-aheads are N buckets of q iterations from now; a bucket's right edge is (b + 1) q. What is
free is (w, N) batch slots and (w, N) KV tokens of w workers. Columns start in the first bucket.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOLS,
    BOOLS_2D,
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    FLOATS_3D,
    INT,
    INTS,
    INTS_2D_OUT,
    Column,
    kernel,
    part,
)

ROUNDING = 1e-9
"""More than sums of normalised prices are off."""
SOME: Final = 64
"""So many rows have a leader; of some thousands of rows whoever is first is found the soonest."""
ALIKE: Final = 0.02
"""Workers whose margins are within this share of a request's best are equally good."""


@kernel(
    INT(
        *(BOOLS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, INTS, INTS),
        *(FLOATS, FLOATS, FLOATS_2D, FLOAT),
        *(BOOLS_2D, FLOATS_3D, INTS, FLOATS, FLOATS_2D, FLOATS_2D),
        *(FLOATS_2D_OUT, FLOATS_2D_OUT, FLOAT, INT, FLOAT, INTS_2D_OUT),
    )
)
def admit_by_best_margin(
    asks: BoolArray,
    reward: FloatArray,
    least_cost: FloatArray,
    start: FloatArray,
    steps: FloatArray,
    footprint: FloatArray,
    sequences: FloatArray,
    order: IntArray,
    kind: IntArray,
    prompt: FloatArray,
    value: FloatArray,
    waits: FloatArray,
    waits_toll: float,
    reach: BoolArray,
    prices: FloatArray,
    workers: IntArray,
    liking: FloatArray,
    extra: FloatArray,
    toll: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    q: float,
    most: int,
    floor: float,
    started: IntArray,
) -> int:
    """Start requests by decreasing best margin, each on its best worker that has room.

    A request is ranked by a bound on its margin until it comes first. Then its margin is worked
    out, and it is ranked by that. So few are looked at; the starts are those of a full pass.

    Args:
        asks: (n,) who asks.
        reward: (n,) of starting.
        least_cost: (n,) at most what it costs on whichever worker.
        start: (n,) of the columns, in iterations.
        steps: (n,) theirs.
        footprint: (n,) theirs.
        sequences: (n,) theirs.
        order: (n,) rank by arrival.
        kind: (n,) row of `reach`.
        prompt: (n,) prompt tokens.
        value: (n,) multiplies what waits for prompts cost.
        waits: (3, w) as in delay.py, or (0, w) where workers are alike.
        waits_toll: the toll of delay.py.
        reach: (kinds, g) where a kind may go.
        prices: (g, 2, L) of a batch slot and of a KV token on the first buckets.
        workers: (w,) columns of `reach` and rows of `prices`.
        liking: (w,) per free batch slot, breaks ties between workers.
        extra: (n, w) in place of the waits where a request has any toll, or (0, w) for nothing.
        toll: (n, w) taken from a margin for each start on the worker in this pass, or (0, w).
        batch: (w, N) free batch slots; starts are taken out.
        kv: (w, N) free KV tokens; likewise.
        q: iterations per bucket.
        most: how many may start.
        floor: only margins above it start.
        started: (n, 3) is filled, from the front, with the starts in order: request, worker, and
            the worker it would have had by margins without `extra` if only batch slots counted.

    Returns:
        How many started.
    """
    count, places, longest = 0, workers.size, q
    for row in range(asks.size):
        longest = max(longest, start[row] + steps[row]) if asks[row] else longest
    buckets = math.ceil(min(longest, batch.shape[1] * q) / q)
    sums, low = _running_sums(prices, workers, buckets, q), _lows(batch, kv, buckets, q)
    before, unswayed_free = np.empty((places, 3, buckets)), batch[:, 0].copy()
    starts_on, none = np.zeros((2, places), dtype=np.int64)
    score = _bounds(asks, reward, least_cost, extra, waits)
    leaders, known = _leaders(score, order), np.zeros(asks.size, dtype=np.bool_)
    (plain, margin, delay, draws), may = np.empty((4, places)), np.empty(places, dtype=np.bool_)
    slots = np.maximum(batch[:, 0], 0.0).sum()
    most = int(min(slots, most, asks.size))
    while count < most:
        row = _first(leaders, score, order)
        if row < 0:
            break
        column = (start[row], steps[row], footprint[row], sequences[row])
        for place in range(places):
            may[place] = reach[kind[row], workers[place]]
        need = _asked(column, batch.shape[1], q)
        _price(plain, may, reward[row], column, sums, q, batch.shape[1])
        _delay(delay, draws, may, waits, value[row], prompt[row], waits_toll)
        _draw(margin, draws, plain, delay, extra, toll, row, waits)
        best = _keep_fitting(margin, floor, need, low, before, starts_on, q)
        if not known[row]:
            known[row], score[row] = True, best
        else:
            score[row] = -np.inf
            _take_tolls(margin, draws, starts_on)
            _keep_fitting(margin, -np.inf, need, low, before, none, q)
            worker = _preferred(margin, liking, batch[:, 0])
            if worker >= 0:
                if starts_on[worker] == 0:
                    before[worker] = low[:, :, worker]
                _take(batch, kv, worker, column, 0, q)
                _lows_of(low, batch, kv, worker, q)
                started[count, 0], started[count, 1] = row, worker
                started[count, 2] = _without(plain, delay, worker, liking, unswayed_free)
                count += 1
                starts_on[worker] += 1
                slots -= sequences[row]
                if slots < 1:
                    break
        leaders[row // SOME] = _leader(row // SOME, score, order)
    return count


@part
def _asked(column: Column, buckets: int, q: float) -> tuple[int, float, float, float]:
    """Last bucket, KV use on an earlier one less what the edge adds, and there; batch slots."""
    start, steps, footprint, sequences = column
    end = min(start + steps, buckets * q)
    last = max(math.ceil(end / q) - 1, 0)
    level = sequences * (footprint - start)
    return last, level, level + sequences * end, sequences


@part
def _lows(batch: FloatArray, kv: FloatArray, buckets: int, q: float) -> FloatArray:
    """(3, buckets, w) by bucket, as a request asks all workers about one bucket.

    Fewest batch slots up to the bucket, least KV less the edge before it, and KV on it.
    """
    low = np.empty((3, buckets, kv.shape[0]))
    for g in range(kv.shape[0]):
        _lows_of(low, batch, kv, g, q)
    return low


@part
def _lows_of(low: FloatArray, batch: FloatArray, kv: FloatArray, g: int, q: float) -> None:
    slots = line = np.inf
    for b in range(low.shape[1]):
        slots = min(slots, batch[g, b])
        low[0, b, g], low[1, b, g], low[2, b, g] = slots, line, kv[g, b]
        line = min(line, kv[g, b] - (b + 1) * q)


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


@part
def _running_sums(prices: FloatArray, workers: IntArray, buckets: int, q: float) -> FloatArray:
    """(4, L + 1, w) as `PrefixPrices.table`, by bucket; no further than is asked for."""
    reach = min(prices.shape[2], buckets)
    sums = np.zeros((4, reach + 1, workers.size))
    for place in range(workers.size):
        slot, token = prices[workers[place]]
        for b in range(reach):
            sums[0, b + 1, place] = sums[0, b, place] + slot[b]
            sums[1, b + 1, place] = sums[1, b, place] + token[b]
            sums[2, b + 1, place] = sums[2, b, place] + token[b] * ((b + 1) * q)
            sums[3, b, place] = token[b]
    return sums


@part
def _price(
    plain: FloatArray,
    reach: BoolArray,
    reward: float,
    column: Column,
    sums: FloatArray,
    q: float,
    buckets: int,
) -> None:
    """Reward less cost on each worker; -inf where the request may not go; levelled."""
    _, steps, footprint, sequences = column
    width, best = sums.shape[1], -np.inf
    last = math.ceil(min(steps, buckets * q) / q)
    end = min(steps, last * q)
    stop, before = min(last, width - 1), min(last - 1, width - 1)
    for g in range(plain.size):
        plain[g] = -np.inf
        if reach[g]:
            cost = sums[0, stop, g] + sums[1, stop, g] * footprint
            cost += sums[2, before, g]
            cost += sums[3, before, g] * end
            plain[g] = reward - cost * sequences
            best = max(best, plain[g])
    for g in range(plain.size):
        if plain[g] >= best - ALIKE * abs(best):
            plain[g] = best


@part
def _bounds(
    asks: BoolArray,
    reward: FloatArray,
    least_cost: FloatArray,
    extra: FloatArray,
    waits: FloatArray,
) -> FloatArray:
    """(n,) no margin of a request that asks is above its bound; -inf for who does not ask."""
    bound = np.full(asks.size, -np.inf)
    for row in range(asks.size):
        if asks[row]:
            bound[row] = reward[row] - least_cost[row] + ROUNDING
            if extra.shape[0]:
                most = 0.0 if waits.shape[0] else -np.inf
                for g in range(extra.shape[1]):
                    most = max(most, extra[row, g])
                bound[row] += most
    return bound


@part
def _delay(
    delay: FloatArray,
    toll: FloatArray,
    reach: BoolArray,
    waits: FloatArray,
    value: float,
    prompt: float,
    waits_toll: float,
) -> None:
    """`delay.Delay` of a request."""
    least = np.inf
    for g in range(delay.size):
        delay[g], toll[g] = 0.0, 0.0
        if waits.shape[0]:
            per_token = value * waits[0, g]
            delay[g] = per_token * (prompt * waits[1, g] + waits[2, g])
            toll[g] = per_token * prompt * waits_toll
            least = min(least, delay[g]) if reach[g] else least
    for g in range(delay.size):
        delay[g] = delay[g] - least if reach[g] and waits.shape[0] else 0.0


@part
def _draw(
    margin: FloatArray,
    draws: FloatArray,
    plain: FloatArray,
    delay: FloatArray,
    extra: FloatArray,
    toll: FloatArray,
    row: int,
    waits: FloatArray,
) -> None:
    """What delays, or in their place caches, leave of a request's margins; and their toll."""
    counted = extra.shape[0] > 0 and waits.shape[0] == 0
    for g in range(toll.shape[1] if toll.shape[0] else 0):
        counted = counted or toll[row, g] != 0.0
    for g in range(plain.size):
        margin[g] = plain[g] + extra[row, g] if counted else plain[g] - delay[g]
        if counted:
            draws[g] = toll[row, g] if toll.shape[0] else 0.0


@part
def _keep_fitting(
    margin: FloatArray,
    floor: float,
    need: tuple[int, float, float, float],
    low: FloatArray,
    before: FloatArray,
    starts_on: IntArray,
    q: float,
) -> float:
    """Leave the margins above a floor where a column fits, without those starts; the largest."""
    best = -np.inf
    last, level, peak, several = need
    for g in range(margin.size):
        then, fits = starts_on[g] > 0, margin[g] > floor
        fits = fits and several <= (before[g, 0, last] if then else low[0, last, g])
        fits = fits and peak <= (before[g, 2, last] if then else low[2, last, g])
        if fits and several == 1.0:
            fits = level <= (before[g, 1, last] if then else low[1, last, g])
        elif fits:
            for b in range(last):
                free = before[g, 2, b] if then else low[2, b, g]
                fits = fits and level <= free - several * ((b + 1) * q)
        margin[g] = margin[g] if fits else -np.inf
        best = max(best, margin[g])
    return best


@part
def _take_tolls(margin: FloatArray, toll: FloatArray, starts_on: IntArray) -> None:
    for g in range(margin.size):
        for _ in range(starts_on[g]):
            margin[g] -= toll[g]


@part
def _preferred(margin: FloatArray, liking: FloatArray, free: FloatArray) -> int:
    """Worker of the largest margin; liking x free, then the index, breaks ties; -1 for none."""
    found, best, most_liked = -1, -np.inf, -np.inf
    for g in range(margin.size):
        liked = liking[g] * free[g]
        if margin[g] > best or (found >= 0 and margin[g] == best and liked > most_liked):
            found, best, most_liked = g, margin[g], liked
    return found


@part
def _without(
    plain: FloatArray, delay: FloatArray, worker: int, liking: FloatArray, free: FloatArray
) -> int:
    """Where a start on a worker had gone without caches; takes a slot of the (w,) free there."""
    for g in range(plain.size):
        plain[g] = plain[g] - delay[g] if free[g] >= 1 or g == worker else -np.inf
    other = _preferred(plain, liking, free)
    free[other] -= 1
    return other


@part
def _leaders(score: FloatArray, tie: IntArray) -> IntArray:
    """Of each SOME rows the first by score; -1 where all scores are -inf."""
    leaders = np.empty((score.size + SOME - 1) // SOME, dtype=np.int64)
    for part_of in range(leaders.size):
        leaders[part_of] = _leader(part_of, score, tie)
    return leaders


@part
def _leader(part_of: int, score: FloatArray, tie: IntArray) -> int:
    """The row with the largest score, then the smallest tie, of SOME; -1 for none."""
    found, best = -1, -np.inf
    for row in range(part_of * SOME, min((part_of + 1) * SOME, score.size)):
        if score[row] >= best and (score[row] > best or (found >= 0 and tie[row] < tie[found])):
            found, best = row, score[row]
    return found


@part
def _first(leaders: IntArray, score: FloatArray, tie: IntArray) -> int:
    """The first of all leaders; -1 for none."""
    found = -1
    for row in leaders:
        if row >= 0 and (found < 0 or _precedes(row, found, score, tie)):
            found = row
    return found


@part
def _precedes(one: int, other: int, score: FloatArray, tie: IntArray) -> bool:
    equal = score[one] == score[other]
    return bool(score[one] > score[other] or (equal and tie[one] < tie[other]))
