"""3 controller, primal side: greedy admission that never overdraws a future slot (Algorithm 1).

Read residual.py for what fits; here is who goes first. The loops are kernels/admission.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from service.control.columns import BoolArray, Columns, FloatArray, IntArray
from service.control.kernels.admission import ALIKE, admit_by_best_margin
from service.control.kernels.room import admit_in_order
from service.control.residual import Residual

if TYPE_CHECKING:
    from service.control.delay import Waits

NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Pairs that may be admitted, on the workers of a residual.

    Attributes:
        columns: the n waiting requests' columns (their worker array is not used).
        margin: (n, g) reduced costs; -inf where a pair is not allowed.
        arrival_order: (n,) rank by arrival; breaks ties between equal margins.
        floor: only margins strictly above it are admitted; Algorithm 1 has 0.
    """

    columns: Columns
    margin: FloatArray
    arrival_order: IntArray
    floor: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """Requests that ask for a start now; every array is (n,), a row for each waiting request.

    Attributes:
        columns: of starting now; their start is 0 where prices are not.
        rewards: of starting now. least_cost: at most what it costs on whichever worker.
        asks: who asks. most: how many may start.
        order: rank by arrival. kind: row of the offer's `reach`.
        prompt: prompt tokens.
        floor: only margins strictly above it are admitted.
    """

    columns: Columns
    rewards: FloatArray
    least_cost: FloatArray
    asks: BoolArray
    order: IntArray
    kind: IntArray
    prompt: FloatArray
    most: int = NO_LIMIT
    floor: float = -np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What the w workers of a residual offer to those who ask.

    Attributes:
        reach: (kinds, g) where a request of a kind may go.
        liking: (w,) larger is better at equal margin, per free batch slot of the worker: the
            comparison is liking x free slots now, so starts of one tick spread out.
        prices: (g, 2, L) of a batch slot and of a KV token, up to the last bucket that has one.
        workers: (w,) their columns of `reach` and rows of `prices`.
        extra: (n, w) added to the margins of requests that have any toll, in place of what waits
            take from them; or (0, w) for nothing. Without waits it is added to everybody's.
        toll: (n, w) what a pair's margin is less after each start of this pass on its worker, or
            (0, w) for nothing. Without extra it is that of the waits.
        waits: what a start on each of the workers costs by its prompt; None for nothing.
    """

    reach: BoolArray
    liking: FloatArray
    prices: FloatArray
    workers: IntArray
    extra: FloatArray
    toll: FloatArray
    waits: Waits | None = None


def admit(candidates: Candidates, residual: Residual) -> list[tuple[int, int]]:
    """Admit greedily by decreasing margin; every admitted column fits on all its future slots.

    Order is total: margin, then earlier arrival, then worker index. Pairs that do not fit at the
    outset can never fit later in the pass, so they are dropped before sorting; this changes no
    decision.

    Returns:
        (request row, worker) in the order of admission; `residual` has them subtracted.

    Source: [OLP] Algorithm 1, lines 10-16, and constraint (5).
    """
    columns, margin = candidates.columns, candidates.margin
    rows, workers = (residual.fits(columns) & (margin > candidates.floor)).nonzero()
    order = np.lexsort((workers, candidates.arrival_order[rows], -margin[rows, workers]))
    started = admit_in_order(
        rows[order],
        workers[order],
        columns.start,
        columns.steps,
        columns.footprint,
        columns.sequences,
        residual.batch,
        residual.kv,
        residual.bucket_iterations,
    )
    return [(row, worker) for row, worker in started.tolist()]


def admit_balanced(
    candidates: Candidates, residual: Residual, preference: FloatArray
) -> list[tuple[int, int]]:
    """Admit by decreasing best margin; among a request's equally good workers take the preferred.

    Args:
        candidates: as for `admit`.
        residual: updated in place.
        preference: (g,) as an offer's `liking`.

    Returns:
        (request row, worker) in the order of admission.
    """
    n, places = candidates.margin.shape
    asking = Asking(
        columns=candidates.columns,
        rewards=np.zeros(n),
        least_cost=np.zeros(n),
        asks=np.ones(n, dtype=np.bool_),
        order=candidates.arrival_order,
        kind=np.zeros(n, dtype=np.int64),
        prompt=np.zeros(n),
        floor=candidates.floor,
    )
    offer = Offer(
        reach=np.ones((1, places), dtype=np.bool_),
        liking=preference,
        prices=np.zeros((places, 2, 0)),
        workers=np.arange(places),
        extra=candidates.margin,
        toll=np.zeros((0, places)),
    )
    return [(row, worker) for row, worker, _ in admit_priced(asking, offer, residual)]


def admit_priced(asking: Asking, offer: Offer, residual: Residual) -> list[tuple[int, int, int]]:
    """Admit by decreasing best margin, reward less cost; ties go to the preferred worker.

    A request's best worker and those about as good have the best one's margin.

    Args:
        asking: who asks.
        offer: of the workers of the residual.
        residual: updated in place.

    Returns:
        (request row, worker, worker without `extra`) in the order of admission. The last is where
        it had gone without `extra` if only batch slots counted, not KV memory.

    Differs: Algorithm 1 leaves ties between workers open; the lowest index would pile equal
    requests onto one worker, whose iterations then get longer. And it follows any difference of
    prices. At light load these are all but 0, and following them piles requests up where others'
    prompts are being computed.
    """
    columns, waits = asking.columns, offer.waits
    started = np.empty((asking.asks.size, 3), dtype=np.int64)
    count = admit_by_best_margin(
        asking.asks,
        asking.rewards,
        asking.least_cost,
        columns.start,
        columns.steps,
        columns.footprint,
        columns.sequences,
        asking.order,
        asking.kind,
        asking.prompt,
        asking.prompt if waits is None else waits.value,
        offer.toll[:0] if waits is None else waits.lines,
        0.0 if waits is None else waits.toll,
        offer.reach,
        offer.prices,
        offer.workers,
        offer.liking,
        offer.extra,
        offer.toll,
        residual.batch,
        residual.kv,
        residual.bucket_iterations,
        asking.most,
        asking.floor,
        started,
    )
    return [(row, worker, other) for row, worker, other in started[:count].tolist()]


def levelled(margin: FloatArray) -> FloatArray:
    """(n, g) margins, where a request's best worker and those about as good have the best one's."""
    if margin.shape[1] == 1:
        return margin
    best = margin.max(axis=1, keepdims=True, initial=-np.inf)
    return np.asarray(np.where(margin >= best - ALIKE * np.abs(best), best, margin))


def preferred(margin: FloatArray, liking: FloatArray) -> int:
    """The worker with the largest margin; the most liked, then the lowest index, breaks ties."""
    return int(np.where(margin == margin.max(), liking, -np.inf).argmax())
