"""3 controller, kernels of recorded arrivals: rings that are written to, and looked through."""

from __future__ import annotations

import math

import numpy as np

from service.control.columns import FloatArray, IntArray
from service.control.kernels.compiled import (
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    INT,
    INTS,
    INTS_OUT,
    kernel,
    part,
)

LIKELY = 0.9
"""What is above this part of the last value found is looked at first."""


@kernel(
    INT(
        *(INTS, INTS, INTS, FLOATS, FLOATS, FLOATS, FLOATS, FLOAT, INT),
        *(FLOATS_2D_OUT, INTS_OUT, INTS_OUT),
    )
)
def note_arrivals(
    rows: IntArray,
    pools: IntArray,
    worth: IntArray,
    value: FloatArray,
    decode_tokens: FloatArray,
    sequences: FloatArray,
    prompt_tokens: FloatArray,
    prefill_steps: float,
    place: int,
    numbers: FloatArray,
    tier: IntArray,
    pool: IntArray,
) -> int:
    """Write m of n waiting requests into a ring of arrivals.

    Args:
        rows: (m,) who; no more than the ring has places.
        pools: (m,) the workers each may go to.
        worth: (n,) tier of the value.
        value: (n,) reward multiplier.
        decode_tokens: (n,) o^.
        sequences: (n,) slots.
        prompt_tokens: (n,) s.
        prefill_steps: iterations of a prefill.
        place: where the ring is written to.
        numbers: (5, c) value, service steps, slots, mean KV of a sequence, prompt; changed.
        tier: (c,) changed.
        pool: (c,) changed.

    Returns:
        Where the ring is written to next.
    """
    for at in range(rows.size):
        row = rows[at]
        steps = decode_tokens[row] + prefill_steps
        numbers[0, place], numbers[1, place] = value[row], steps
        numbers[2, place], numbers[4, place] = sequences[row], prompt_tokens[row]
        numbers[3, place] = prompt_tokens[row] + steps / 2
        tier[place], pool[place] = worth[row], pools[at]
        place = (place + 1) % tier.size
    return place


@kernel(INT(INTS, INTS, FLOAT, FLOATS, FLOATS, FLOATS, FLOATS, INT, FLOATS_2D_OUT))
def record_columns(
    rows: IntArray,
    worker: IntArray,
    start: float,
    steps: FloatArray,
    footprint: FloatArray,
    sequences: FloatArray,
    rewards: FloatArray,
    place: int,
    ring: FloatArray,
) -> int:
    """Write m of n columns into a ring of them.

    Args:
        rows: (m,) which; no more than the ring has places.
        worker: (n,) index.
        start: absolute iteration.
        steps: (n,) active iterations.
        footprint: (n,) KV tokens before the first step.
        sequences: (n,) slots.
        rewards: (n,) those below 0 count as 0.
        place: where the ring is written to.
        ring: (6, c) worker, start, steps, footprint, sequences, reward; changed.

    Returns:
        Where the ring is written to next.
    """
    for row in rows:
        ring[0, place], ring[1, place] = worker[row], start
        ring[2, place], ring[3, place] = steps[row], footprint[row]
        ring[4, place], ring[5, place] = sequences[row], max(rewards[row], 0.0)
        place = (place + 1) % ring.shape[1]
    return place


@kernel(FLOAT(FLOATS_2D, INT, INT, FLOAT, FLOAT))
def nth_most_work(
    numbers: FloatArray, size: int, nth: int, prompt_steps: float, last: float
) -> float:
    """Find the n-th largest work among recorded arrivals, in service steps.

    Args:
        numbers: (5, c) as of `note_arrivals`.
        size: how many were recorded.
        nth: from 1 to size.
        prompt_steps: what a prompt token counts.
        last: what was found before, near which it is looked for first; any number is right.
    """
    work = np.empty(size)
    found, least = 0, LIKELY * last
    for _ in range(2):
        for at in range(size):
            work[found] = numbers[1, at] + prompt_steps * numbers[4, at]
            found += work[found] >= least
        if found >= nth:
            break
        found, least = 0, -math.inf
    return _nth_smallest(work[:found], found - nth)


@part
def _nth_smallest(values: FloatArray, nth: int) -> float:
    """The value that has nth smaller ones before it, by Hoare's selection; moves them about."""
    low, high = 0, values.size - 1
    while low < high:
        pivot, left, right = values[(low + high) // 2], low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left, right = left + 1, right - 1
        if right < nth < left:
            break
        low, high = (low, right) if nth <= right else (left, high)
    return float(values[nth])


@kernel(INT(FLOATS, FLOATS, FLOAT))
def last_within(counts: FloatArray, more: FloatArray, beyond: float) -> int:
    """Find the last of (b,) bins that no more than so many requests lie beyond; -1 for none.

    Args:
        counts: (b,) requests in each bin.
        more: (b,) others, or (0,).
        beyond: so many may lie in later bins.
    """
    place, later = counts.size - 1, 0.0
    while place >= 0:
        later += counts[place] + (more[place] if more.size else 0.0)
        if later > beyond:
            break
        place -= 1
    return place
