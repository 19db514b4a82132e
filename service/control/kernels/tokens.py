"""3 controller, kernels of tokens that came: what they move in the ledger, what pace they show."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from service.control.columns import FloatArray, IntArray
from service.control.kernels.compiled import (
    FLOAT,
    FLOATS,
    FLOATS_2D,
    FLOATS_2D_OUT,
    FLOATS_OUT,
    INT,
    INTS,
    INTS_OUT,
    kernel,
)

THREE_INTS: Final = types.UniTuple(INT, 3)  # type: ignore[no-untyped-call]


@kernel(
    THREE_INTS(
        *(INTS, FLOATS, FLOAT, INTS, FLOATS, FLOATS, FLOATS, FLOATS_OUT, FLOATS_OUT),
        *(FLOATS_OUT, FLOATS_OUT, INTS_OUT, FLOATS_2D_OUT, INTS_OUT),
    )
)
def book_tokens(
    rows: IntArray,
    totals: FloatArray,
    now_s: float,
    worker: IntArray,
    sequences: FloatArray,
    forecast: FloatArray,
    ahead_tokens: FloatArray,
    produced: FloatArray,
    seen_s: FloatArray,
    kv_tokens: FloatArray,
    left_steps: FloatArray,
    at: IntArray,
    came: FloatArray,
    first: IntArray,
) -> tuple[int, int, int]:
    """Note that n of the m started requests have produced so many tokens; totals never fall.

    Args:
        rows: (n,) which requests.
        totals: (n,) tokens of each sequence so far.
        now_s: the time.
        worker: (m,) index, -1 for one that is gone.
        sequences: (m,) slots held.
        forecast: (m,) tokens of each sequence in all.
        ahead_tokens: (m,) above 0 while the first token is waited for.
        produced: (m,) tokens so far; changed.
        seen_s: (m,) since when they are known; changed.
        kv_tokens: (g,) held on each worker; changed.
        left_steps: (g,) slot-iterations left by the forecasts; changed.
        at: (n,) is filled with the workers.
        came: (2, n) is filled with the slot-seconds since the last tokens, and with the tokens of
            all sequences that came in them.
        first: (n,) is filled, from the front, with the rows whose first token came.

    Returns:
        How many first tokens came; the lowest and the highest worker.
    """
    firsts, lowest, highest = 0, kv_tokens.size, -1
    for place in range(rows.size):
        row = rows[place]
        before = produced[row]
        after = max(before, totals[place])
        produced[row] = after
        at[place] = worker[row]
        came[0, place] = sequences[row] * max(now_s - seen_s[row], 0.0)
        came[1, place] = sequences[row] * (after - before)
        seen_s[row] = now_s
        if before == 0 and after > 0 and ahead_tokens[row] > 0:
            first[firsts] = row
            firsts += 1
        if worker[row] >= 0:
            kv_tokens[worker[row]] += came[1, place]
            over = max(after - max(before, forecast[row]), 0.0)
            left_steps[worker[row]] -= came[1, place] - sequences[row] * over
            lowest, highest = min(lowest, worker[row]), max(highest, worker[row])
    return firsts, lowest, highest


@kernel(types.void(INTS, FLOATS_2D, FLOAT, FLOATS_2D_OUT))
def note_pace(worker: IntArray, came: FloatArray, memory_tokens: float, sums: FloatArray) -> None:
    """Add to the sums of each worker what came from it; those of the past fade by halves.

    Args:
        worker: (n,) index; -1 counts nowhere.
        came: (2, n) slot-seconds, and tokens.
        memory_tokens: so many tokens are halved, with all else of the worker.
        sums: (3, g) slot-seconds, tokens, and prompt tokens x busy slots; changed.
    """
    more = np.zeros((2, sums.shape[1]))
    for place in range(worker.size):
        if worker[place] >= 0:
            more[0, worker[place]] += came[0, place]
            more[1, worker[place]] += came[1, place]
    for g in range(sums.shape[1]):
        sums[0, g] += more[0, g]
        sums[1, g] += more[1, g]
        if sums[1, g] > memory_tokens:
            for each in range(sums.shape[0]):
                sums[each, g] *= 0.5


@kernel(types.void(FLOATS, FLOATS, FLOATS_2D, FLOAT, FLOAT, FLOATS_OUT))
def iteration_pace(
    told_s: FloatArray,
    prompt_s: FloatArray,
    sums: FloatArray,
    prior_tokens: float,
    left_min: float,
    step_s: FloatArray,
) -> None:
    """Work out how long a decode iteration of (g,) workers takes without prompts.

    Args:
        told_s: (g,) iteration times as told.
        prompt_s: (g,) seconds of a prompt token.
        sums: (3, at least g) as of `note_pace`.
        prior_tokens: weight of what was told.
        left_min: least part of a token's time that prompts leave.
        step_s: (g,) is filled.
    """
    for g in range(told_s.size):
        tokens = prior_tokens + sums[1, g]
        token_s = (prior_tokens * told_s[g] + sums[0, g]) / tokens
        left_s = token_s - prompt_s[g] * sums[2, g] / tokens
        step_s[g] = max(left_s, left_min * token_s)
