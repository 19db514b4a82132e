"""3 controller, tiers: requests worth more than others, and slots kept for those still to come.

A request holds its slot until its last token, so starting it may make a later one of a higher tier
wait. The price of a slot, per iteration: the probability that by then the higher tiers want more
slots than are free, times what an iteration of their wait is worth. Against it stands what a slot
that stays idle loses. Both follow the operator's weights, the measured arrivals and the calendar of
ends, so what is kept changes from tick to tick: little where many requests end soon, more where
few do, nothing where all traffic is worth the same.

The dual of prices.py cannot tell this. It knows arrivals by their mean alone, at which enough slots
come free for the higher tiers; what costs them is that arrivals come in bursts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.control.assign import NO_LIMIT
from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.config import Kernel, Weights
from service.control.kernels.arrivals import note_arrivals, nth_most_work
from service.control.kernels.queue import extent
from service.control.kernels.tiers import distinct_levels, free_sequences
from service.control.view import View

LOWEST_VALUE: Final = 2.0**-64
TIERS_MAX: Final = 256
"""More than there can be tiers between LOWEST_VALUE and the largest value."""
LOWEST_TIER: Final = -(2**62)
"""Below every tier."""
POOLS_MAX: Final = 256
"""Distinct sets of workers told apart in the record of arrivals; more count as all workers."""
EVERYWHERE: Final = 0
EXACT_MEAN: Final = 16.0
EXACT_COUNT: Final = 64
"""P(X >= 64) is below 1e-17 at a mean of 16."""
TINY: Final = 1e-300


def tiers(value: FloatArray) -> IntArray:
    """(n,) tier of each value; a tier begins at twice the value where the one below began."""
    return np.frexp(np.maximum(value, LOWEST_VALUE))[1].astype(np.int64) - 1


def levels(tier: IntArray) -> list[int]:
    """The tiers that occur, highest first; mostly there is one."""
    if not tier.size:
        return []
    lowest, highest = extent(tier)
    return [lowest] if lowest == highest else distinct_levels(tier).tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HigherDemand:
    """Recorded arrivals of the tiers above one, n of them.

    Attributes:
        value: (n,). steps: (n,) iterations in service. sequences: (n,) slots.
        kv_tokens: (n,) mean KV of a sequence over its life.
        share: (n,) part of each that falls on the workers asked about.
        of_all: n over all recorded arrivals.
    """

    value: FloatArray
    steps: FloatArray
    sequences: FloatArray
    kv_tokens: FloatArray
    share: FloatArray
    of_all: float


class SeenArrivals:
    """A ring of the last arrivals: what they are worth and what they hold. Bounded."""

    def __init__(self, capacity: int) -> None:
        self._numbers = np.zeros((5, capacity))
        self._tier = np.zeros(capacity, dtype=np.int64)
        self._pool = np.zeros(capacity, dtype=np.int64)
        # No recorded arrival is of a higher tier; there may be none of this one any more.
        self._highest = LOWEST_TIER
        self._next = 0
        self._size = 0
        self._largest = 0.0
        self._looked = False
        self._worker_ids: tuple[str, ...] = ()
        self._pools: dict[bytes, int] = {}
        self._members: list[BoolArray] = []
        # Pools of the kinds of requests, as long as the same `reach` is shown.
        self._reach: BoolArray | None = None
        self._of_kind: dict[int, int] = {}

    def extend(self, view: View, rows: IntArray, worth: IntArray) -> None:
        """Record some waiting requests as arrivals, with the workers each may go to.

        Args:
            view: the tick.
            rows: who.
            worth: (n,) tier of the value of everybody who waits.
        """
        if view.fleet.worker_ids != self._worker_ids:
            self._worker_ids = view.fleet.worker_ids
            self._reach = None
            self._pools, self._members = {}, [np.ones(len(view.fleet), dtype=np.bool_)]
            self._pool[:] = EVERYWHERE
        if view.waiting.reach is not self._reach:
            self._reach, self._of_kind = view.waiting.reach, {}
        rows = rows[-self._tier.size :]
        waiting, pools = view.waiting, self._of_kind
        kinds = waiting.kind[rows].tolist()
        missing = set(kinds).difference(pools)
        for number in sorted(missing):
            pools[number] = self._pool_of(waiting.reach[number])
        self._next = note_arrivals(
            rows,
            np.array([pools[number] for number in kinds], dtype=np.int64),
            worth,
            waiting.value,
            waiting.decode_tokens,
            waiting.sequences,
            waiting.prompt_tokens,
            1.0 if view.kernel is Kernel.MIXED else 0.0,
            self._next,
            self._numbers,
            self._tier,
            self._pool,
        )
        self._size = min(self._size + rows.size, self._tier.size)
        self._highest = max(self._highest, *worth[rows].tolist())
        self._looked = False

    def largest(self, share: float, prompt_steps: float) -> float:
        """Work that this share of the recorded arrivals does not exceed, in service steps.

        Infinity while there are too few to have one beyond it.

        Args:
            share: of the arrivals.
            prompt_steps: what a prompt token counts; looked at when there are new arrivals.
        """
        if self._size * (1.0 - share) < 1.0:
            return math.inf
        if not self._looked:
            nth = self._size - max(0, math.ceil(share * self._size) - 1)
            last = self._largest
            self._largest = nth_most_work(self._numbers, self._size, nth, prompt_steps, last)
            self._looked = True
        return self._largest

    def knows_above(self, tier: int) -> bool:
        """Whether any recorded arrival was of a higher tier."""
        if tier >= self._highest:
            return False
        known = bool(np.count_nonzero(self._tier[: self._size] > tier))
        if not known:
            self._highest = tier
        return known

    def above(self, tier: int, workers: BoolArray) -> HigherDemand:
        """Recorded arrivals of higher tiers, as far as they would go to (g,) some workers."""
        higher = np.flatnonzero(self._tier[: self._size] > tier)
        value, steps, sequences, kv_tokens = self._numbers[:4, higher]
        shares = np.array([(m & workers).sum() / max(1, m.sum()) for m in self._members])
        return HigherDemand(
            value=value,
            steps=steps,
            sequences=sequences,
            kv_tokens=kv_tokens,
            share=shares[self._pool[higher]],
            of_all=higher.size / max(1, self._size),
        )

    def _pool_of(self, reach: BoolArray) -> int:
        key = reach.tobytes()
        if key not in self._pools:
            if len(self._members) >= POOLS_MAX or not reach.any():
                return EVERYWHERE
            self._pools[key] = len(self._members)
            self._members.append(reach.copy())
        return self._pools[key]


class PoissonTail:
    """P(X >= count) for X Poisson with each of (n,) means, the small ones first.

    Exact up to a mean of EXACT_MEAN; above it by the square root transformation, within 0.01.
    """

    def __init__(self, mean: FloatArray) -> None:
        self._exact = np.count_nonzero(mean <= EXACT_MEAN)
        self._root = np.sqrt(mean[self._exact :] + 0.125)
        counts = np.arange(EXACT_COUNT)
        log_factorial = np.concatenate([[0.0], np.log(counts[1:]).cumsum()])
        small = np.maximum(mean[: self._exact, None], TINY)
        self._below = np.exp(counts * np.log(small) - small - log_factorial).cumsum(axis=1)
        self._row = np.arange(self._exact)

    def at_least(self, count: FloatArray) -> FloatArray:
        """(n,) probabilities; 1 where count <= 0."""
        few, many = count[: self._exact], count[self._exact :]
        tail = np.empty(count.size)
        at = np.minimum(np.maximum(few, 1), EXACT_COUNT).astype(np.int64) - 1
        np.maximum(1.0 - self._below[self._row, at], 0.0, out=tail[: self._exact])
        if many.size:
            z = 2.0 * (self._root - np.sqrt(np.maximum(many - 0.125, 0.0)))
            swing = np.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))
            tail[self._exact :] = 0.5 * (1.0 + swing)
        tail[count <= 0] = 1.0
        return tail


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stakes:
    """One tier's decision to start or to keep slots, over N buckets of q iterations.

    Attributes:
        free: (N,) slots free if nothing more starts, in sequences of the higher tiers.
        wanted: (N,) how many slots higher arrivals from now on will hold.
        wait_cost: reward lost when one of them waits an iteration.
        idle_cost: reward lost when a slot stays idle for an iteration.
    """

    free: FloatArray
    wanted: PoissonTail
    wait_cost: float
    idle_cost: float

    def startable(self) -> int:
        """Most starts that are worth more than the waits they may cause."""
        low, high = 0, max(0, math.ceil(self.free[0])) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._worth(middle) else (low, middle)
        return low

    def _worth(self, starts: int) -> bool:
        """Whether the last of so many starts beats waiting, for whatever time, before it."""
        price = self.wait_cost * self.wanted.at_least(self.free - (starts - 1))
        return bool(np.cumsum(price - self.idle_cost).max() <= 0)


def startable(view: View, weights: Weights, seen: SeenArrivals, tier: int, gone: list[int]) -> int:
    """How many waiting requests of a tier may start now without harming those above it.

    Demand of arrivals from now on is that of an M/G/infinity queue which starts empty: Poisson,
    with mean rate x integral of the survival function of their service steps.

    Args:
        view: the tick.
        weights: the operator's.
        seen: recorded arrivals.
        tier: which one asks.
        gone: rows of higher tiers that start in this tick; the others still want a slot.
    """
    if not seen.knows_above(tier):
        return NO_LIMIT
    waiting, fleet = view.waiting, view.fleet
    own = tiers(waiting.value)
    rows = np.flatnonzero(own == tier)
    asked = np.zeros(len(waiting.reach), dtype=np.bool_)
    asked[waiting.kind[rows]] = True
    pool = np.asarray(waiting.reach[asked].any(axis=0))
    demand = seen.above(tier, pool)
    work = demand.steps * demand.sequences * demand.share
    if not work.sum() > 0:
        return NO_LIMIT
    mean_kv = float((demand.kv_tokens * work).sum() / work.sum())
    before = own > tier
    before[gone] = False
    taken = waiting.sequences[gone].sum() + waiting.sequences[before].sum()
    pace_s = float(fleet.iteration_s[pool].mean())
    rate = view.arrivals_per_s * pace_s * demand.of_all
    length = float(waiting.decode_tokens[rows].mean())
    reach = min(view.horizon.buckets, math.ceil(length / view.horizon.bucket_iterations))
    edges = view.horizon.bucket_iterations * (np.arange(max(1, reach)) + 1.0)
    held = np.minimum(edges[:, None], demand.steps) @ (demand.sequences * demand.share)
    slots = float(fleet.batch_limit[pool].sum())
    worth = delay_worth(weights, pace_s)
    backlog = float(waiting.sequences[rows].sum()) / slots
    idle = worth * (1.0 + backlog) + weights.throughput + weights.queries / length
    stakes = Stakes(
        free=free_slots(view, pool, mean_kv, edges.size) - taken,
        wanted=PoissonTail(held * (rate / work.size)),
        wait_cost=float((demand.value * work).sum() / work.sum()) * worth,
        idle_cost=float(waiting.value[rows].mean()) * idle,
    )
    return stakes.startable()


def delay_worth(weights: Weights, pace_s: float) -> float:
    """Reward that a request of value 1 loses when it starts an iteration of pace_s later.

    The slope of [OLP] 3.1's reward in k; a tail bound's step is spread over the bound.
    """
    e2e_bound, ttft_bound = weights.e2e_bound_s / pace_s, weights.ttft_bound_s / pace_s
    return (
        weights.e2e
        + weights.ttft
        + weights.tail_e2e / max(e2e_bound, 1.0)
        + weights.tail_ttft / max(ttft_bound, 1.0)
    )


def free_slots(view: View, workers: BoolArray, kv_tokens: float, buckets: int) -> FloatArray:
    """(buckets,) sequences of a mean KV that some workers could hold if nothing more starts."""
    at, fleet = np.flatnonzero(workers), view.fleet
    used = view.occupancy(view.horizon, 0.0, at)
    limits = (fleet.batch_limit[at], fleet.kv_capacity_tokens[at])
    return free_sequences(*limits, used.batch, used.kv, kv_tokens, buckets)
