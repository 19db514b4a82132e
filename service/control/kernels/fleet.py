"""3 controller, kernels of the fleet: what a tick asks of all workers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numba
import numpy as np
from numba import types

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import (
    BOOL,
    BOOLS,
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    INT,
    INTS,
    INTS_OUT,
    NOTHING,
    dense,
    kernel,
    part,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FIVE_FLOATS: Final = types.UniTuple(FLOAT, 5)  # type: ignore[no-untyped-call]
UNROLLED: Final = 8
BLOCK: Final = 128
DEEP: Final = 128
"""More than there are halves to come in the sum of any array."""
BOTH: Final = -1
"""In place of a count: the two sums before are to be added."""


def _block_sum(values: FloatArray, first: int, count: int) -> float:
    """Sum of at most BLOCK values, in UNROLLED parts."""
    total, end = 0.0, first + count
    if count >= UNROLLED:
        parts = values[first : first + UNROLLED].copy()
        whole = end - count % UNROLLED
        for at in range(first + UNROLLED, whole):
            parts[(at - first) % UNROLLED] += values[at]
        low = (parts[0] + parts[1]) + (parts[2] + parts[3])
        total, first = low + ((parts[4] + parts[5]) + (parts[6] + parts[7])), whole
    for at in range(first, end):
        total += values[at]
    return total


_of_block: Callable[[FloatArray, int, int], float] = numba.njit()(_block_sum)


def _pairwise_sum(values: FloatArray, count: int) -> float:
    """Sum of the first values to the last bit as numpy forms it: by halves, down to blocks."""
    if count <= BLOCK:
        return _of_block(values, 0, count)
    firsts, counts = np.empty(DEEP, dtype=np.int64), np.empty(DEEP, dtype=np.int64)
    sums, summed, tasks = np.empty(DEEP), 0, 1
    firsts[0], counts[0] = 0, count
    while tasks > 0:
        tasks -= 1
        first, count = firsts[tasks], counts[tasks]
        if count == BOTH:
            summed -= 1
            sums[summed - 1] += sums[summed]
        elif count <= BLOCK:
            sums[summed] = _of_block(values, first, count)
            summed += 1
        else:
            half = count // 2
            half -= half % UNROLLED
            counts[tasks] = BOTH
            firsts[tasks + 1], counts[tasks + 1] = first + half, count - half
            firsts[tasks + 2], counts[tasks + 2] = first, half
            tasks += 3
    return float(sums[0])


_sum: Callable[[FloatArray, int], float] = numba.njit()(_pairwise_sum)


@kernel(FLOAT(FLOATS, FLOATS, FLOATS, FLOATS))
def prompt_steps(
    outstanding: FloatArray, batch_limit: FloatArray, prompt_s: FloatArray, step_s: FloatArray
) -> float:
    """Slot-iterations that a prompt token takes, mean over the workers.

    Args:
        outstanding: (g,) started sequences; one more is counted.
        batch_limit: (g,) B_g.
        prompt_s: (g,) seconds of a prompt token.
        step_s: (g,) seconds of a decode iteration.
    """
    steps = np.empty(outstanding.size)
    for g in range(outstanding.size):
        busy = min(1.0 + outstanding[g], batch_limit[g])
        steps[g] = busy * prompt_s[g] / step_s[g]
    return _sum(steps, steps.size) / steps.size


@kernel(INT(FLOATS, FLOATS, FLOATS, FLOATS, INTS, FLOAT, FLOAT, FLOAT, FLOATS_2D_OUT))
def weigh_waits(
    prompt_s: FloatArray,
    step_s: FloatArray,
    ahead_tokens: FloatArray,
    outstanding: FloatArray,
    workers: IntArray,
    own: float,
    others: float,
    normalizer: float,
    lines: FloatArray,
) -> int:
    """Work out what requests lose on some workers while prompts are computed there (delay.py).

    Args:
        prompt_s: (g,) seconds of a prompt token; 0 where it is not known.
        step_s: (g,) seconds of a decode iteration.
        ahead_tokens: (g,) prompt tokens to be computed there before others.
        outstanding: (g,) started sequences.
        workers: (w,) the indices of those that are asked about.
        own: what an iteration more until its first token counts for a request.
        others: what one counts for each that decodes.
        normalizer: all is divided by it.
        lines: (3, w) is filled, where a prompt token's time is known of any worker: per_token,
            held_up and before, one above the other.

    Returns:
        Of how many workers it is known.
    """
    tokens_s, count = np.empty(prompt_s.size), 0
    for each in prompt_s:
        if each > 0:
            tokens_s[count] = each
            count += 1
    if count:
        mean_s = _sum(tokens_s, count) / count
        step = _sum(step_s, step_s.size) / step_s.size * normalizer
        for place in range(workers.size):
            g = workers[place]
            lines[0, place] = max(prompt_s[g], mean_s) / step
            lines[1, place] = own + others * outstanding[g]
            lines[2, place] = own * ahead_tokens[g]
    return count


@kernel(
    NOTHING(
        *(INTS, dense(FLOATS_2D), dense(FLOATS_2D), FLOATS, FLOATS, FLOATS, FLOATS),
        *(dense(FLOATS_2D_OUT), dense(FLOATS_2D_OUT)),
    )
)
def free_beside(
    workers: IntArray,
    batch: FloatArray,
    kv: FloatArray,
    other_batch: FloatArray,
    other_kv: FloatArray,
    batch_limit: FloatArray,
    kv_capacity: FloatArray,
    batch_free: FloatArray,
    kv_free: FloatArray,
) -> None:
    """Put what is free on w workers beside what is held there into (w, N).

    Args:
        workers: (w,) their indices.
        batch: (g, N) slots held by our requests.
        kv: (g, N) KV tokens held by them.
        other_batch: (g,) slots held by others, on every bucket.
        other_kv: (g,) KV tokens, likewise.
        batch_limit: (g,) B_g.
        kv_capacity: (g,) M_g; may be infinite.
        batch_free: (w, N) is filled.
        kv_free: (w, N) is filled.
    """
    for place in range(workers.size):
        g = workers[place]
        for b in range(batch.shape[1]):
            batch_free[place, b] = batch_limit[g] - (batch[g, b] + other_batch[g])
            kv_free[place, b] = kv_capacity[g] - (kv[g, b] + other_kv[g])


@kernel(INT(FLOATS, FLOATS, FLOATS, BOOLS, BOOLS, INTS_OUT))
def startable_workers(
    outstanding: FloatArray,
    batch_limit: FloatArray,
    lead: FloatArray,
    wanted: BoolArray,
    engine_queue_empty: BoolArray,
    found: IntArray,
) -> int:
    """Find workers with a free slot now, or perhaps within their lead, that somebody may go to.

    Args:
        outstanding: (g,) started sequences.
        batch_limit: (g,) B_g.
        lead: (g,) iterations until what starts now decodes.
        wanted: (g,) somebody may go there.
        engine_queue_empty: (g,) nothing is known to wait inside the engine.
        found: (g,) is filled, from the front, with their indices.

    Returns:
        How many there are.
    """
    count = 0
    for g in range(outstanding.size):
        slot = batch_limit[g] - outstanding[g] >= 1 or lead[g] > 0
        if slot and wanted[g] and engine_queue_empty[g]:
            found[count] = g
            count += 1
    return count


@kernel(FLOAT(FLOATS, BOOLS))
def sum_over(values: FloatArray, which: BoolArray) -> float:
    """Sum of some of (g,) whole numbers, which is exact."""
    total = 0.0
    for g in range(which.size):
        total += values[g] if which[g] else 0.0
    return total


@kernel(
    FIVE_FLOATS(
        *(FLOATS, FLOATS, FLOATS, FLOATS, INTS, INT, BOOL, FLOAT),
        *(FLOATS, FLOATS, FLOATS, FLOATS, BOOLS),
    )
)
def work_and_pace(
    sequences: FloatArray,
    steps: FloatArray,
    prompt_tokens: FloatArray,
    decode_tokens: FloatArray,
    tier: IntArray,
    lowest: int,
    mixed: bool,
    head_unused: float,
    batch_limit: FloatArray,
    kv_capacity_tokens: FloatArray,
    step_s: FloatArray,
    prompt_s: FloatArray,
    wanted: BoolArray,
) -> tuple[float, float, float, float, float]:
    """Add up the work of the requests of some tiers, and what workers can do of it side by side.

    Numbers of tokens are whole, so their sums are exact.

    Args:
        sequences: (n,) slots.
        steps: (n,) decode iterations.
        prompt_tokens: (n,) s.
        decode_tokens: (n,) o^.
        tier: (n,) of value.
        lowest: the lowest of the tiers that count.
        mixed: whether workers compute prompts.
        head_unused: part of the KV tokens that a request needs which nobody can use of a worker.
        batch_limit: (g,) B_g.
        kv_capacity_tokens: (g,) M_g.
        step_s: (g,) seconds of a decode iteration.
        prompt_s: (g,) seconds of a prompt token.
        wanted: (g,) which count.

    Returns:
        Work in slot-iterations; how many workers count; slots that can be busy; slot-iterations a
        second; seconds of the prompts. All 0 where there is no work.
    """
    work, kv, decoded, prompts = _work_of(
        sequences, steps, prompt_tokens, decode_tokens, tier, lowest
    )
    if work <= 0:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    mean_kv = kv / work
    unused = head_unused * (mean_kv + decoded / work / 2.0)
    slots, rates, tokens_s = np.empty((3, batch_limit.size))
    count = 0
    for g in range(batch_limit.size):
        if wanted[g]:
            usable = max(kv_capacity_tokens[g] - unused, 1.0)
            slots[count] = min(batch_limit[g], usable / max(mean_kv, 1.0))
            rates[count] = slots[count] / step_s[g]
            tokens_s[count] = prompt_s[g]
            count += 1
    prompts_s = 0.0
    if mixed and count:
        prompts_s = prompts * (_sum(tokens_s, count) / count) / count
    return work, float(count), _sum(slots, count), _sum(rates, count), prompts_s


@part
def _work_of(
    sequences: FloatArray,
    steps: FloatArray,
    prompt_tokens: FloatArray,
    decode_tokens: FloatArray,
    tier: IntArray,
    lowest: int,
) -> tuple[float, float, float, float]:
    """Slot-iterations; these x mean KV of a life; x decode tokens; and prompt tokens."""
    total, kv, decoded, prompts = 0.0, 0.0, 0.0, 0.0
    for row in range(sequences.size):
        if tier[row] >= lowest:
            work = sequences[row] * steps[row]
            total += work
            kv += work * (prompt_tokens[row] + decode_tokens[row] / 2.0)
            decoded += work * decode_tokens[row]
            prompts += prompt_tokens[row]
    return total, kv, decoded, prompts
