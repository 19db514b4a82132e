"""3 controller, primal side: greedy admission that never overdraws a future slot (Algorithm 1).

Read residual.py for what fits; here is who goes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from service.control.columns import Columns, FloatArray, IntArray
from service.control.residual import Residual

BLOCK = 64
"""Candidates looked at together; what they share is computed once."""
ALIKE = 0.02
"""Workers whose margins are within this share of the best are equally good."""
NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Pairs that may be admitted, on the workers of a residual.

    Attributes:
        columns: the n waiting requests' columns (their worker array is not used).
        margin: (n, g) reduced costs; -inf where a pair is not allowed.
        arrival_order: (n,) rank by arrival; breaks ties between equal margins.
        floor: only margins strictly above it are admitted; Algorithm 1 has 0.
        most: how many may be admitted.
        toll: (n, g) what a pair's margin is less after each start of this pass on its worker, or
            None for nothing; `admit` knows none.
    """

    columns: Columns
    margin: FloatArray
    arrival_order: IntArray
    floor: float = 0.0
    most: int = NO_LIMIT
    toll: FloatArray | None = None


def by_decreasing(score: FloatArray, *ties: IntArray) -> Iterator[IntArray]:
    """Yield places by decreasing score, then by increasing ties, BLOCK or more at a time.

    The best are found by partition, so the order of those nobody asks for is never worked out.
    """
    left = np.arange(score.size)
    size = BLOCK
    while left.size:
        best = left
        if left.size > 2 * size:
            least = np.partition(score[left], left.size - size)[left.size - size]
            chosen = score[left] >= least
            best, left = left[chosen], left[~chosen]
        else:
            left = left[:0]
        yield best[np.lexsort((*(tie[best] for tie in reversed(ties)), -score[best]))]
        size *= 4


def admit(candidates: Candidates, residual: Residual) -> list[tuple[int, int]]:
    """Admit greedily by decreasing margin; every admitted column fits on all its future slots.

    Order is total: margin, then earlier arrival, then worker index. Pairs that do not fit at the
    outset can never fit later in the pass, so they are dropped before sorting; this changes no
    decision.

    Returns:
        (request row, worker) in the order of admission; `residual` has them subtracted.

    Source: [OLP] Algorithm 1, lines 10-16, and constraint (5).
    """
    demand = residual.demand(candidates.columns)
    allowed = residual.room(demand)
    allowed &= candidates.margin > candidates.floor
    rows, workers = allowed.nonzero()
    usable = allowed.any(axis=0)
    waits = np.ones(len(candidates.arrival_order), dtype=np.bool_)
    admitted: list[tuple[int, int]] = []
    margins = candidates.margin[rows, workers]
    for block in by_decreasing(margins, candidates.arrival_order[rows], workers):
        row, worker = rows[block], workers[block]
        alive = waits[row] & residual.has_room(demand.take(row), worker)
        while alive.any():
            at = int(alive.argmax())
            chosen = (int(row[at]), int(worker[at]))
            residual.subtract(candidates.columns, *chosen)
            admitted.append(chosen)
            waits[chosen[0]] = False
            if not (usable & residual.has_slot()).any():
                return admitted
            alive &= row != chosen[0]
            again = np.flatnonzero(alive & (worker == chosen[1]))
            alive[again] = residual.has_room(demand.take(row[again]), worker[again])
    return admitted


def admit_balanced(
    candidates: Candidates, residual: Residual, preference: FloatArray
) -> list[tuple[int, int]]:
    """Admit by decreasing best margin; among a request's equally good workers take the preferred.

    Args:
        candidates: as for `admit`.
        residual: updated in place.
        preference: (g,) larger is better at equal margin, per free batch slot of the worker: the
            comparison is preference x free slots now, so starts of one tick spread out.

    Differs: Algorithm 1 leaves ties between workers open; the lowest index would pile equal
    requests onto one worker, whose iterations then get longer.
    """
    demand = residual.demand(candidates.columns)
    allowed = residual.room(demand)
    allowed &= candidates.margin > candidates.floor
    rows = np.flatnonzero(allowed.any(axis=1))
    usable = allowed.any(axis=0)
    margin = np.where(allowed[rows], candidates.margin[rows], -np.inf)
    admitted: list[tuple[int, int]] = []
    for block in by_decreasing(margin.max(axis=1, initial=-np.inf), candidates.arrival_order[rows]):
        fits, needs = allowed[rows[block]], demand.take(rows[block])
        if admitted:
            fits &= residual.room(needs)
        alive = fits.any(axis=1)
        while alive.any():
            at = int(alive.argmax())
            row = int(rows[block[at]])
            worker = preferred(
                np.where(fits[at], margin[block[at]], -np.inf), preference * residual.batch[:, 0]
            )
            residual.subtract(candidates.columns, row, worker)
            admitted.append((row, worker))
            if candidates.toll is not None:
                margin[:, worker] -= candidates.toll[rows, worker]
            if len(admitted) >= candidates.most or not (usable & residual.has_slot()).any():
                return admitted
            fits[: at + 1] = False
            fits[:, worker] &= residual.has_room(needs, np.full(block.size, worker))
            alive = fits.any(axis=1)
    return admitted


def levelled(margin: FloatArray) -> FloatArray:
    """(n, g) margins, where a request's best worker and those about as good have the best one's.

    Differs: Algorithm 1 follows any difference of prices. At light load these are all but 0, and
    following them piles requests up where others' prompts are being computed.
    """
    if margin.shape[1] == 1:
        return margin
    best = margin.max(axis=1, keepdims=True, initial=-np.inf)
    return np.asarray(np.where(margin >= best - ALIKE * np.abs(best), best, margin))


def preferred(margin: FloatArray, liking: FloatArray) -> int:
    """The worker with the largest margin; the most liked, then the lowest index, breaks ties."""
    return int(np.where(margin == margin.max(), liking, -np.inf).argmax())
