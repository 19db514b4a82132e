"""3 controller, kernels of tiers: which there are, and what is free for those that still come."""

from __future__ import annotations

import numpy as np
from numba import types

from service.control.columns import FloatArray, IntArray
from service.control.kernels.compiled import (
    FLOAT,
    FLOATS,
    FLOATS_2D,
    INT,
    INTS,
    kernel,
)

LEVELS = types.Array(INT, 1, "C")
SLOTS = types.Array(FLOAT, 1, "C")


@kernel(LEVELS(INTS))
def distinct_levels(tier: IntArray) -> IntArray:
    """The different ones of (n,) tiers, highest first; they are few."""
    found = np.empty(tier.size, dtype=np.int64)
    count, left = 0, tier.size
    while left:
        # The highest below the last one, and how many are lower still.
        highest, left = np.int64(0), 0
        for each in tier:
            if count == 0 or each < found[count - 1]:
                highest = each if left == 0 else max(highest, each)
                left += 1
        if left:
            found[count] = highest
            count += 1
    return found[:count]


@kernel(SLOTS(FLOATS, FLOATS, FLOATS_2D, FLOATS_2D, FLOAT, INT))
def free_sequences(
    batch_limit: FloatArray,
    kv_capacity: FloatArray,
    batch: FloatArray,
    kv: FloatArray,
    kv_tokens: float,
    buckets: int,
) -> FloatArray:
    """(buckets,) sequences of so many KV tokens that w workers can hold beside what they hold.

    Args:
        batch_limit: (w,) B_g.
        kv_capacity: (w,) M_g; may be infinite.
        batch: (w, N) slots held.
        kv: (w, N) tokens held.
        kv_tokens: of a sequence.
        buckets: the first so many are asked for.
    """
    free = np.zeros(buckets)
    for g in range(batch_limit.size):
        for b in range(buckets):
            fit = np.floor((kv_capacity[g] - kv[g, b]) / kv_tokens)
            free[b] += max(min(batch_limit[g] - batch[g, b], fit), 0.0)
    return free
