"""3 controller, dual side: shadow prices by Algorithm 2, its history, and the dual bound.

Prices are kept normalised (reward / normaliser per batch slot, and per KV token x kv_scale), as in
[OLP] B.2; `PriceSolution.natural` turns them back. Solving is a pure function of a PriceProblem, so
it may run in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.control.columns import (
    Columns,
    FloatArray,
    Horizon,
    IntArray,
    Usage,
)
from service.control.kernels.arrivals import record_columns
from service.control.kernels.descent import descend, price_tokens, reach_of_prices
from service.control.kernels.samples import draw_words, samples
from service.control.spans import PrefixPrices

WordArray: TypeAlias = NDArray[np.uint64]
SPARE_WORDS = 8
"""Random words for draws that are passed over: of 2,048 columns one in two million."""


@dataclass(frozen=True, slots=True, eq=False)
class PriceSums:
    """Sums of some prices per batch slot and per KV token.

    Attributes:
        prices: (g, N), normalised. horizon: N buckets.
        per_token: (g, 2, L) of a batch slot and of a KV token, up to the last bucket that has one.
        cheapest: of one worker that is nowhere dearer than any of them.
    """

    prices: Usage
    per_token: FloatArray
    horizon: Horizon
    cheapest: PrefixPrices

    @staticmethod
    def of(prices: Usage, kv_scale: float, horizon: Horizon) -> PriceSums:
        """Sum up the least of (g, N) normalised prices."""
        reach = reach_of_prices(prices.batch, prices.kv, kv_scale)
        per_token, least = np.empty((len(prices.batch), 2, reach)), np.zeros((4, reach + 1))
        q = float(horizon.bucket_iterations)
        price_tokens(prices.batch, prices.kv, kv_scale, q, per_token, least)
        return PriceSums(prices, per_token, horizon, PrefixPrices(horizon, least[None]))

    def of_workers(self, workers: IntArray) -> PrefixPrices:
        """Those of w workers, in the order given; a decision asks for few."""
        return PrefixPrices.stacked(self.per_token[workers], self.horizon)


@dataclass(frozen=True, slots=True, eq=False)
class PriceSolution:
    """Normalised prices and the look-ahead they belong to.

    Attributes:
        prices: (g, N) normalised shadow prices, >= 0.
        origin: absolute iteration of the look-ahead's left edge (0 for a relative look-ahead).
        worker_ids: the workers, in the order of the rows.
        normalizer: reward units per normalised unit.
        kv_scale: normalised KV units per token.
        sums: of these prices, where the solver made them.
    """

    prices: Usage
    origin: int
    worker_ids: tuple[str, ...]
    normalizer: float
    kv_scale: float
    sums: PriceSums | None = None
    _finite: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look at every price here, in the solver's thread, and not where they are adopted."""
        total = self.prices.batch.sum() + self.prices.kv.sum()
        object.__setattr__(self, "_finite", bool(np.isfinite(total)))

    def is_finite(self) -> bool:
        """Whether the prices, none of which is negative, may be used at all."""
        return self._finite

    def natural(self) -> Usage:
        """(g, N) prices in reward units per batch slot and per KV token, for one bucket."""
        return Usage(
            batch=self.prices.batch * self.normalizer,
            kv=self.prices.kv * (self.normalizer * self.kv_scale),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceProblem:
    """f_k(p) of [OLP] eq. (6) with all that Algorithm 2 needs, as one immutable snapshot.

    Attributes:
        horizon: N buckets of q iterations.
        scarcity: d_k, (g, N), residual capacity / expected arrivals, >= 0; KV in normalised units.
        columns: recorded or hypothetical columns, relative to the look-ahead's left edge.
        rewards: (n,) normalised rewards, min(r / normalizer, 1).
        warm: p_(k-1), normalised.
        any_worker: each column may use whichever worker is cheapest (the max over g of the reduced
            dual) instead of the worker it was recorded on.
        steps: K. batch: mini-batch size. step_size: eta.
        averaged: return the mean of the iterates instead of the last one.
        seed: of the mini-batches. words: the first random words of that seed, where they are known.
        origin, worker_ids, normalizer, kv_scale: passed through to the solution.
    """

    horizon: Horizon
    scarcity: Usage
    columns: Columns
    rewards: FloatArray
    warm: Usage
    any_worker: bool
    steps: int
    batch: int
    step_size: float
    averaged: bool
    seed: int
    origin: int
    worker_ids: tuple[str, ...]
    normalizer: float
    kv_scale: float
    words: WordArray | None = None

    def solve(self) -> PriceSolution:
        """Run K projected mini-batch subgradient steps from the warm start.

        Source: [OLP] Algorithm 2 (B.3); an empty history gives zero prices.
        """
        workers = len(self.worker_ids)
        if self.rewards.size == 0:
            return self._solution(Usage.zeros(workers, self.horizon))
        size = min(self.batch, self.rewards.size)
        words = self.words
        if words is None:
            words = random_words(self.seed, self.steps * size + SPARE_WORDS)
        chosen = mini_batches(words, self.rewards.size, size, self.steps)
        prices = Usage(batch=self.warm.batch.copy(), kv=self.warm.kv.copy())
        total = Usage.zeros(workers if self.averaged else 0, self.horizon)
        columns = self.columns
        descend(
            chosen,
            columns.worker,
            columns.start,
            columns.steps,
            columns.footprint,
            columns.sequences,
            self.rewards,
            self.any_worker,
            float(self.horizon.bucket_iterations),
            self.kv_scale,
            self.step_size,
            self.scarcity.batch,
            self.scarcity.kv,
            prices.batch,
            prices.kv,
            total.batch,
            total.kv,
        )
        if not self.averaged:
            return self._solution(prices)
        return self._solution(Usage(batch=total.batch / self.steps, kv=total.kv / self.steps))

    def _solution(self, prices: Usage) -> PriceSolution:
        # Decisions need them; here they cost the event loop nothing.
        sums = PriceSums.of(prices, self.kv_scale, self.horizon) if self.any_worker else None
        names, units = self.worker_ids, (self.normalizer, self.kv_scale)
        return PriceSolution(prices, self.origin, names, *units, sums=sums)


@dataclass(frozen=True, slots=True, eq=False)
class PriceSnapshot:
    """What a price problem follows from, copied where it may change: cheap to make.

    Attributes:
        problem: makes the problem, which takes long; in any thread.
    """

    problem: Callable[[], PriceProblem]

    def solve(self) -> PriceSolution:
        """Make the problem and solve it."""
        return self.problem().solve()


def random_words(seed: int, count: int) -> WordArray:
    """(n,) random bits, of which numpy's default generator makes its numbers."""
    return random_starts(seed, count, 0, 0.0)[0]


def random_starts(
    seed: int, count: int, starts: int, iterations: float
) -> tuple[WordArray, FloatArray]:
    """(n,) random bits of a seed, and of the first m of them whole iterations, all alike.

    Args:
        seed: from 0 up to 2**128, without it.
        count: n.
        starts: m <= n.
        iterations: the latest start.
    """
    spread = np.array([seed >> 32 * place & 2**32 - 1 for place in range(4)], dtype=np.uint64)
    words, numbers = np.empty(count, np.uint64), np.empty(starts)
    draw_words(spread, words, iterations, numbers)
    return words, numbers


def mini_batches(words: WordArray, count: int, size: int, batches: int) -> IntArray:
    """(K, size) rows of n columns: K mini-batches of distinct ones, all equally likely.

    The same as `Generator.choice` without replacement (of up to 10,000), in a tenth of its time.

    Args:
        words: random bits, at least K size + SPARE_WORDS.
        count: n >= 1.
        size: columns in a mini-batch, at most n.
        batches: K.

    Source: [OLP] Algorithm 2, line 10.
    """
    chosen = np.empty((batches, size), dtype=np.int64)
    # numpy takes the lower half of a word first.
    samples(count, words.astype("<u8", copy=False).view("<u4"), chosen)
    return chosen


def dual_bound(margins: FloatArray, capacity: Usage, prices: Usage) -> float:
    """Bound from above the reward any feasible set of starts can earn: b^T p + sum [max_g D]_+.

    Args:
        margins: (n, g) reduced costs r - a^T p; -inf where a start is not allowed.
        capacity: (g, N) what is free, in the units of the columns; may be infinite.
        prices: (g, N) >= 0; any such prices give a valid bound.

    Source: [OLP] 3.2, the reduced dual (weak duality).
    """
    best = margins.max(axis=1, initial=0.0) if margins.size else np.zeros(0)
    linear = 0.0
    for free, price in ((capacity.batch, prices.batch), (capacity.kv, prices.kv)):
        linear += float(np.sum(np.where(price > 0, free, 0.0) * price))  # 0 x inf is no bound
    return linear + float(np.maximum(best, 0.0).sum())


class History:
    """A ring of recorded columns on the absolute iteration axis. Bounded; oldest go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0
        self._size = 0
        # worker, start, steps, footprint, sequences, reward
        self._rows = np.zeros((6, capacity))

    def __len__(self) -> int:
        return self._size

    def record(self, columns: Columns, start: float, row: int, reward: float) -> None:
        """Remember one column that starts at an absolute iteration."""
        self._rows[:, self._next] = (
            columns.worker[row],
            start,
            columns.steps[row],
            columns.footprint[row],
            columns.sequences[row],
            reward,
        )
        self._next = (self._next + 1) % self._capacity
        self._size = min(self._size + 1, self._capacity)

    def extend(self, columns: Columns, start: float, rows: IntArray, rewards: FloatArray) -> None:
        """Remember some of n columns that start at an absolute iteration, and their rewards.

        Args:
            columns: n columns.
            start: of those that are remembered.
            rows: (m,) which.
            rewards: (n,) those below 0 count as 0.
        """
        place = (self._next + max(0, rows.size - self._capacity)) % self._capacity
        rows = rows[-self._capacity :]
        steps, footprint, sequences = columns.steps, columns.footprint, columns.sequences
        what = columns.worker, start, steps, footprint, sequences, rewards
        self._next = record_columns(rows, *what, place, self._rows)
        self._size = min(self._size + rows.size, self._capacity)

    def forget_before(self, keep: int) -> None:
        """Drop all but the newest `keep` columns (a rate shift made the rest stale)."""
        keep = min(keep, self._size)
        newest = (self._next - keep + np.arange(keep)) % self._capacity
        self._rows[:, :keep] = self._rows[:, newest]
        self._size = keep
        self._next = keep % self._capacity

    def forget_started_before(self, start: float) -> None:
        """Drop the columns that start before an absolute iteration; they are in that order."""
        self.forget_before(int((self._rows[1, : self._size] >= start).sum()))

    def columns(self, origin: float) -> tuple[Columns, FloatArray]:
        """All recorded columns relative to a look-ahead that begins at `origin`, and rewards."""
        return self.frozen()(origin)

    def whenever(self) -> Callable[[FloatArray], tuple[Columns, FloatArray]]:
        """All recorded columns as if they began elsewhere, on worker 0, and rewards.

        To be worked out later in any thread, for (n,) starts on the relative axis.
        """
        steps, footprint, sequences, reward = self._rows[2:, : self._size].copy()

        def columns(start: FloatArray) -> tuple[Columns, FloatArray]:
            worker = np.zeros(start.size, dtype=np.int64)
            sizes = {"steps": steps, "footprint": footprint, "sequences": sequences}
            return Columns(worker=worker, start=start, **sizes), reward

        return columns

    def frozen(self) -> Callable[[float], tuple[Columns, FloatArray]]:
        """What `columns` gives now, to be worked out later in any thread."""
        worker, start, steps, footprint, sequences, reward = self._rows[:, : self._size].copy()

        def columns(origin: float) -> tuple[Columns, FloatArray]:
            relative = Columns(
                worker=worker.astype(np.int64),
                start=start - origin,
                steps=steps,
                footprint=footprint,
                sequences=sequences,
            )
            return relative, reward

        return columns
