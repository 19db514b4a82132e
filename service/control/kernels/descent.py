"""3 controller, kernels of the prices: Algorithm 2, step by step, and what prices sum up to.

prices.py says what these numbers mean. Of most workers only what they hold now is scarce: they
have prices on the first few buckets alone. `reach` is how many buckets of a worker may have one,
and nobody looks further.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from service.control.columns import FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOL,
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    FLOATS_3D_OUT,
    INT,
    INTS,
    INTS_2D,
    NOTHING,
    dense,
    kernel,
    part,
)

COLUMNS: Final = (dense(INTS), *[dense(FLOATS)] * 5)
"""(n,) worker, start, steps, footprint, sequences, reward."""
PRICES: Final = (dense(FLOATS_2D_OUT),) * 2
"""(g, N) of a batch slot and of KV, normalised."""
SCARCE: Final = (dense(FLOATS_2D),) * 2
"""(g, N) d_k."""
FIRST, STOP = 0, 1
"""Rows of (2, n): each column touches these buckets, the last exclusive."""
LEVEL, END, SCALE = 0, 1, 2
"""Rows of (3, n): KV use at the right edge of a bucket is scale x (level + edge), with `end` for
the last edge; a column that touches no bucket has scale 0."""
SLOT, TOKEN, EDGE, PRICE = 0, 1, 2, 3
"""Rows of (4, N + 1): sums over the first buckets of prices per slot, per KV token, and of that x
the right edge; and the KV price itself."""


@part
def _lay(
    column: tuple[float, float, float, float], buckets: int, q: float
) -> tuple[int, int, float, float, float]:
    """FIRST, STOP, LEVEL, END and SCALE of start, steps, footprint and sequences."""
    start, steps, footprint, sequences = column
    last = max(np.ceil(min(start + steps, buckets * q) / q), 0.0)
    stop = int(last)
    first = min(int(max(start, 0.0) / q), stop)
    scale = sequences if stop > first else 0.0
    return first, stop, footprint - start, min(start + steps, last * q), scale


@part
def _sum_prices(
    batch: FloatArray,
    kv: FloatArray,
    g: int,
    reach: int,
    unit: tuple[float, float],
    sums: FloatArray,
) -> None:
    """Sum up a worker's prices on the buckets that may have one."""
    kv_scale, q = unit
    slot, token, edge = 0.0, 0.0, 0.0
    for bucket in range(reach):
        price = kv[g, bucket] * kv_scale
        sums[SLOT, bucket], sums[TOKEN, bucket], sums[EDGE, bucket] = slot, token, edge
        sums[PRICE, bucket] = price
        slot += batch[g, bucket]
        token += price
        edge += price * ((bucket + 1) * q)
    sums[SLOT, reach], sums[TOKEN, reach], sums[EDGE, reach] = slot, token, edge
    sums[PRICE, reach] = 0.0


@part
def _cost(sums: FloatArray, reach: int, at: IntArray, use: FloatArray, c: int) -> float:
    """Cost of column c on the worker whose prices these are.

    Source: [OLP] eq. (10), by running sums over slots of p_bat, p_mem and slot x p_mem.
    """
    if at[FIRST, c] >= reach:
        return 0.0
    first, stop = at[FIRST, c], min(at[STOP, c], reach)
    before = min(max(at[STOP, c] - 1, 0), reach)
    cost = sums[SLOT, stop] - sums[SLOT, first]
    cost += use[LEVEL, c] * (sums[TOKEN, stop] - sums[TOKEN, first])
    cost += sums[EDGE, before] - sums[EDGE, first]
    cost += sums[PRICE, before] * use[END, c]
    return float(cost * use[SCALE, c])


@part
def _place(
    own: IntArray,
    any_worker: bool,
    at: IntArray,
    use: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    reach: IntArray,
    unit: tuple[float, float],
    worker: IntArray,
    cost: FloatArray,
) -> None:
    """Put each column where it is priced (its own worker, or the cheapest), and give its cost.

    Nothing is cheaper than nothing: what has found a worker where it costs nothing is looked at no
    more. Most do at once, as most workers have few prices.
    """
    sums, looking, left = np.empty((4, batch.shape[1] + 1)), np.arange(own.size), own.size
    wanted = np.full(reach.size, any_worker)
    for c in range(own.size):
        worker[c], cost[c] = own[c], np.inf
        wanted[own[c]] = True
    for g in range(reach.size):
        if left == 0:
            break
        if wanted[g]:
            _sum_prices(batch, kv, g, reach[g], unit, sums)
            kept = 0
            for place in range(left):
                c = looking[place]
                if any_worker or own[c] == g:
                    found = _cost(sums, reach[g], at, use, c)
                    if found < cost[c]:
                        worker[c], cost[c] = g, found
                if cost[c] > 0:
                    looking[kept] = c
                    kept += 1
            left = kept


@part
def _add_use(
    g: int, worker: IntArray, at: IntArray, use: FloatArray, q: float, added: FloatArray
) -> int:
    """Add what the columns on a worker use where that changes; returns where it ends.

    By range adds: batch slots, KV level, and what the last bucket's KV lacks, in (3, N + 1).
    """
    stop = 0
    for c in range(worker.size):
        if worker[c] == g:
            stop = max(stop, at[STOP, c])
    added[:, : stop + 1] = 0.0
    for c in range(worker.size):
        if worker[c] == g and use[SCALE, c] > 0:
            held = use[SCALE, c] * use[LEVEL, c]
            added[0, at[FIRST, c]] += use[SCALE, c]
            added[0, at[STOP, c]] -= use[SCALE, c]
            added[1, at[FIRST, c]] += held
            added[1, at[STOP, c]] -= held
            added[2, at[STOP, c] - 1] += use[SCALE, c] * (at[STOP, c] * q - use[END, c])
    return stop


@part
def _move(
    g: int,
    added: FloatArray,
    stop: int,
    share: tuple[float, float, float],
    step_size: float,
    scarce_batch: FloatArray,
    scarce_kv: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    reach: int,
) -> int:
    """One projected step of a worker's prices, p = (p - eta g)+; returns their reach.

    A bucket's KV use is the column's largest use inside it: safe, never optimistic. What is not
    looked at has no price, nobody uses it, and its d_k is not negative: it would stay zero.

    Source: [OLP] Algorithm 2, lines 11-18, and B.2; Differs: bucketed, see spec section 7.1.
    """
    count, kv_share, q = share
    slots, level, after = 0.0, 0.0, 0
    for bucket in range(max(reach, stop)):
        used_batch, used_kv = 0.0, 0.0
        if bucket < stop:
            slots += added[0, bucket]
            level += added[1, bucket]
            used_batch = slots / count
            used_kv = (level + slots * ((bucket + 1) * q) - added[2, bucket]) * kv_share
        batch_price = (scarce_batch[g, bucket] - used_batch) * -step_size + batch[g, bucket]
        kv_price = (scarce_kv[g, bucket] - used_kv) * -step_size + kv[g, bucket]
        # Not by max: what is not a number must be seen (PriceSolution.is_finite).
        batch[g, bucket] = 0.0 if batch_price < 0 else batch_price
        kv[g, bucket] = 0.0 if kv_price < 0 else kv_price
        if batch[g, bucket] != 0 or kv[g, bucket] != 0:
            after = bucket + 1
    return after


@part
def _reach(batch: FloatArray, kv: FloatArray) -> IntArray:
    """(g,) how many first buckets may have a price."""
    reach = np.zeros(batch.shape[0], np.int64)
    for g in range(reach.size):
        for bucket in range(batch.shape[1] - 1, -1, -1):
            if batch[g, bucket] != 0 or kv[g, bucket] != 0:
                reach[g] = bucket + 1
                break
    return reach


@kernel(NOTHING(dense(INTS_2D), *COLUMNS, BOOL, *[FLOAT] * 3, *SCARCE, *PRICES, *PRICES))
def descend(
    samples: IntArray,
    own: IntArray,
    start: FloatArray,
    steps: FloatArray,
    footprint: FloatArray,
    sequences: FloatArray,
    rewards: FloatArray,
    any_worker: bool,
    q: float,
    kv_scale: float,
    step_size: float,
    scarce_batch: FloatArray,
    scarce_kv: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    total_batch: FloatArray,
    total_kv: FloatArray,
) -> None:
    """Move prices by a projected subgradient step for each of K mini-batches.

    `samples` is (K, size): rows of the n columns, from `own` (their workers) to `rewards`. d_k is
    `scarce_batch` and `scarce_kv`, (g, N); `batch` and `kv`, (g, N), are the prices that move.
    Every iterate is added to `total_batch` and `total_kv`, (g, N); (0, N) for none.

    Source: [OLP] Algorithm 2 (B.3).
    """
    buckets, size = batch.shape[1], samples.shape[1]
    reach, added = _reach(batch, kv), np.zeros((3, buckets + 1))
    at, use = np.zeros((2, size), np.int64), np.zeros((3, size))
    worker, cost, used = np.zeros(size, np.int64), np.zeros(size), np.zeros(reach.size, np.bool_)
    for sample in samples:
        for c in range(size):
            row = sample[c]
            column = (start[row], steps[row], footprint[row], sequences[row])
            at[FIRST, c], at[STOP, c], use[LEVEL, c], use[END, c], use[SCALE, c] = _lay(
                column, buckets, q
            )
        unit, share = (kv_scale, q), (float(size), kv_scale / size, q)
        _place(own[sample], any_worker, at, use, batch, kv, reach, unit, worker, cost)
        used[:] = False
        for c in range(size):
            if rewards[sample[c]] - cost[c] > 0:
                used[worker[c]] = True
            else:
                worker[c] = -1
        for g in range(reach.size):
            stop = _add_use(g, worker, at, use, q, added) if used[g] else 0
            reach[g] = _move(
                g, added, stop, share, step_size, scarce_batch, scarce_kv, batch, kv, reach[g]
            )
            if total_batch.size:
                total_batch[g, : reach[g]] += batch[g, : reach[g]]
                total_kv[g, : reach[g]] += kv[g, : reach[g]]


@kernel(INT(dense(FLOATS_2D), dense(FLOATS_2D), FLOAT))
def reach_of_prices(batch: FloatArray, kv: FloatArray, kv_scale: float) -> int:
    """How many first buckets have a price per batch slot or per KV token on any of g workers."""
    reach = 0
    for g in range(batch.shape[0]):
        for bucket in range(batch.shape[1] - 1, reach - 1, -1):
            if batch[g, bucket] != 0 or kv[g, bucket] * kv_scale != 0:
                reach = bucket + 1
                break
    return reach


@kernel(NOTHING(*SCARCE, FLOAT, FLOAT, dense(FLOATS_3D_OUT), dense(FLOATS_2D_OUT)))
def price_tokens(
    batch: FloatArray,
    kv: FloatArray,
    kv_scale: float,
    q: float,
    per_token: FloatArray,
    sums: FloatArray,
) -> None:
    """Put prices per batch slot and per KV token into (g, 2, L); the sums of the least into `sums`.

    `sums` is (4, L + 1), of one worker that is nowhere dearer than any other.
    """
    reach = per_token.shape[2]
    least = np.zeros((2, 1, reach))
    for g in range(batch.shape[0]):
        for bucket in range(reach):
            slot, token = batch[g, bucket], kv[g, bucket] * kv_scale
            per_token[g, 0, bucket], per_token[g, 1, bucket] = slot, token
            if g == 0 or slot < least[0, 0, bucket]:
                least[0, 0, bucket] = slot
            if g == 0 or token < least[1, 0, bucket]:
                least[1, 0, bucket] = token
    _sum_prices(least[0], least[1], 0, reach, (1.0, q), sums)


@kernel(NOTHING(*[dense(FLOATS)] * 2, *SCARCE, *[FLOAT] * 3, *PRICES))
def scarce(
    capacity_batch: FloatArray,
    capacity_kv: FloatArray,
    used_batch: FloatArray,
    used_kv: FloatArray,
    share: float,
    kv_share: float,
    never_scarce: float,
    batch: FloatArray,
    kv: FloatArray,
) -> None:
    """Put d_k into (g, N): of (g,) capacity less what is used; that of unknown KV is given."""
    for g in range(batch.shape[0]):
        all_slots, all_kv = capacity_batch[g], capacity_kv[g]
        for bucket in range(batch.shape[1]):
            free = all_kv - used_kv[g, bucket]
            batch[g, bucket] = max(all_slots - used_batch[g, bucket], 0.0) * share
            kv[g, bucket] = max(free * kv_share, 0.0) if np.isfinite(free) else never_scarce
