"""3 controller, kernels of the queue: what a tick works out for everybody who waits."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import types

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOL,
    BOOLS_OUT,
    FLOAT,
    FLOATS,
    FLOATS_2D_OUT,
    FLOATS_OUT,
    INT,
    INTS,
    INTS_OUT,
    kernel,
)

TWO_INTS: Final = types.UniTuple(INT, 2)  # type: ignore[no-untyped-call]
DIGITS: Final = 4095
"""The last binary digits of an order."""
STEPS, WHOLE_STEPS, FOOTPRINT, REWARD, COST = range(5)
"""Rows of what is kept of a request while it waits."""


@kernel(
    INT(
        *(INTS, FLOATS, FLOATS, FLOATS, FLOATS),
        *(BOOL, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT),
        *(INTS_OUT, INTS_OUT, FLOATS_2D_OUT),
    )
)
def settle(
    stamp: IntArray,
    decode_tokens: FloatArray,
    prompt_tokens: FloatArray,
    kv_max: FloatArray,
    value: FloatArray,
    mixed: bool,
    block_tokens: float,
    bucket_iterations: float,
    left: float,
    throughput: float,
    e2e: float,
    ttft: float,
    queries: float,
    value_min: float,
    kept_stamp: IntArray,
    kept_worth: IntArray,
    kept: FloatArray,
) -> int:
    """Make anew what is kept of those waiting requests whose stamp is another.

    Args:
        stamp: (n,) changes with what a row holds.
        decode_tokens: (n,) o^.
        prompt_tokens: (n,) s.
        kv_max: (n,) KV tokens that a sequence may take.
        value: (n,) reward multiplier.
        mixed: whether the prefill counts as an iteration ([OLP] appendix A).
        block_tokens: KV block size.
        bucket_iterations: q.
        left: T - k + 1, iterations.
        throughput: weight alpha of [OLP] 3.1.
        e2e: beta.
        ttft: gamma.
        queries: sigma.
        value_min: smaller values count as this one.
        kept_stamp: (at least n,) stamps of what is kept; changed.
        kept_worth: (at least n,) tier of the value; changed.
        kept: (at least 5, at least n) what is kept; changed.

    Returns:
        How many were made anew.
    """
    made = 0
    aligned = block_tokens > 1 and bucket_iterations % block_tokens == 0
    for row in range(stamp.size):
        if stamp[row] == kept_stamp[row]:
            continue
        made += 1
        length = decode_tokens[row]
        steps, footprint = length, prompt_tokens[row]
        if mixed:
            steps, footprint = steps + 1.0, footprint - 1.0
        whole = steps
        if aligned:
            footprint = math.ceil(footprint / block_tokens) * block_tokens
            whole = math.ceil(whole / bucket_iterations) * bucket_iterations
        else:
            footprint += block_tokens - 1.0
        kept[STEPS, row], kept[WHOLE_STEPS, row] = steps, whole
        kept[FOOTPRINT, row] = min(footprint, kv_max[row] - whole)
        gained = throughput * min(length, left) + e2e * max(left - length, 0.0)
        kept[REWARD, row] = gained + ttft * left + queries
        kept[COST, row] = 0.0
        kept_worth[row] = math.frexp(max(value[row], value_min))[1] - 1
        kept_stamp[row] = stamp[row]
    return made


@kernel(
    INT(
        *(INTS, FLOATS, FLOATS, FLOATS, FLOATS, BOOL, FLOAT, FLOAT, FLOAT, INT),
        *(FLOATS_OUT, INTS_OUT),
    )
)
def weigh(
    order: IntArray,
    prompt_tokens: FloatArray,
    value: FloatArray,
    discount: FloatArray,
    reward: FloatArray,
    shared: bool,
    prompt_steps: float,
    held_up_weight: float,
    normalizer: float,
    last_order: int,
    weighted: FloatArray,
    new: IntArray,
) -> int:
    """Weigh rewards by value, less what the prompts cost everybody else; find who is new.

    Args:
        order: (n,) rank by arrival.
        prompt_tokens: (n,) s.
        value: (n,) reward multiplier.
        discount: (n,) what the tenants' shares leave of it.
        reward: (n,) of starting now.
        shared: whether discounts count.
        prompt_steps: slot-iterations that a prompt token takes.
        held_up_weight: reward of one of these.
        normalizer: rewards are divided by it.
        last_order: rank of the last arrival that is not new.
        weighted: (n,) is filled.
        new: (n,) is filled, from the front, with the rows of who is new.

    Returns:
        How many are new.
    """
    found = 0
    for row in range(order.size):
        worth = value[row] * discount[row] if shared else value[row]
        left = reward[row] - held_up_weight * (prompt_steps * prompt_tokens[row])
        weighted[row] = (left / worth if left < 0 else worth * left) / normalizer
        if order[row] > last_order:
            new[found] = row
            found += 1
    return found


@kernel(TWO_INTS(INTS))
def extent(tier: IntArray) -> tuple[int, int]:
    """The lowest and the highest of (n,) tiers, n > 0."""
    lowest = highest = tier[0]
    for each in tier:
        lowest, highest = min(lowest, each), max(highest, each)
    return lowest, highest


@kernel(
    TWO_INTS(
        *(INTS, FLOATS, FLOATS, BOOL, FLOAT, INTS, FLOATS, FLOATS, FLOAT, FLOAT),
        *(INTS, FLOATS, FLOAT, FLOAT, INTS, BOOLS_OUT, INTS_OUT, INTS_OUT),
    )
)
def find_aged(
    order: IntArray,
    arrival_s: FloatArray,
    discount: FloatArray,
    shared: bool,
    now_s: float,
    tier: IntArray,
    steps: FloatArray,
    prompt_tokens: FloatArray,
    prompt_steps: float,
    large: float,
    levels: IntArray,
    bounds_s: FloatArray,
    stretch: float,
    bound_max_s: float,
    spared: IntArray,
    aged: BoolArray,
    still_spared: IntArray,
    asking: IntArray,
) -> tuple[int, int]:
    """Find who waited its bound, and who would wait longer if it may.

    Args:
        order: (n,) rank by arrival.
        arrival_s: (n,) seconds.
        discount: (n,) what the tenants' shares leave of an age.
        shared: whether discounts count.
        now_s: the time.
        tier: (n,) of value.
        steps: (n,) decode iterations.
        prompt_tokens: (n,) s.
        prompt_steps: slot-iterations that a prompt token takes.
        large: only requests with more work than this may be spared.
        levels: (t,) the tiers that occur.
        bounds_s: (t,) their bounds, seconds.
        stretch: bounds of those who are spared are so many times as long.
        bound_max_s: nobody's bound is longer.
        spared: (m,) orders of those who were spared before, ascending.
        aged: (n,) is filled: whether the bound is reached.
        still_spared: (n,) is filled, from the front, with the rows of those who wait on.
        asking: (n,) is filled, from the front, with those whom only being spared would keep back.

    Returns:
        How many are spared as before; how many ask.
    """
    kept, asked, level = 0, 0, 0
    # Few are spared, and who is not is mostly told apart by the last digits of its order.
    perhaps = np.zeros(DIGITS + 1, dtype=np.bool_)
    for each in spared:
        perhaps[each & DIGITS] = True
    for row in range(order.size):
        while levels[level] != tier[row]:
            level = (level + 1) % levels.size
        age_s = now_s - arrival_s[row]
        if shared:
            age_s *= discount[row]
        bound_s = bounds_s[level]
        at = np.searchsorted(spared, order[row]) if perhaps[order[row] & DIGITS] else spared.size
        if at < spared.size and spared[at] == order[row]:
            still_spared[kept] = row
            kept += 1
            bound_s *= stretch
        elif age_s >= bound_s and steps[row] + prompt_steps * prompt_tokens[row] > large:
            asking[asked] = row
            asked += 1
        aged[row] = age_s >= min(bound_s, bound_max_s)
    return kept, asked
