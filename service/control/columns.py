"""3 controller, LP columns: what a request takes from a worker's future, and what that costs.

A column is a footprint over decode iterations counted from the left edge of the look-ahead. Both KV
kernels of [OLP] have the same shape, footprint + theta + 1 over a number of steps, so one set of
kernels serves the ledger, the candidates and the recorded history. Nothing here loops over slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.control.config import Kernel

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Horizon:
    """The look-ahead: N buckets of q iterations each.

    Attributes:
        buckets: N >= 1.
        bucket_iterations: q >= 1; q = 1 is the paper's slot.
    """

    buckets: int
    bucket_iterations: int

    def __post_init__(self) -> None:
        """Refuse an empty look-ahead."""
        if self.buckets < 1 or self.bucket_iterations < 1:
            raise ValueError("a horizon needs at least one bucket of at least one iteration")

    @property
    def iterations(self) -> int:
        """H, the whole look-ahead in iterations."""
        return self.buckets * self.bucket_iterations

    @property
    def right_edges(self) -> FloatArray:
        """(N,) last iteration of each bucket, exclusive."""
        return np.arange(1, self.buckets + 1, dtype=np.float64) * self.bucket_iterations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """n columns as a struct of arrays, all of shape (n,).

    Attributes:
        worker: worker index g, or any value where the caller prices against every worker.
        start: first active iteration relative to the look-ahead's left edge; may be negative.
        steps: active iterations; the column is active on [start, start + steps).
        footprint: KV tokens before the first step; use at step theta is footprint + theta + 1.
        sequences: parallel sequences; multiplies batch and KV use.
    """

    worker: IntArray
    start: FloatArray
    steps: FloatArray
    footprint: FloatArray
    sequences: FloatArray

    def __post_init__(self) -> None:
        """Check that all arrays have one length."""
        if len({getattr(self, spec.name).shape for spec in fields(self)}) != 1:
            raise ValueError("the arrays of Columns must have one shape")

    def take(self, rows: IntArray | BoolArray) -> Columns:
        """The columns of some rows."""
        return Columns(**{spec.name: getattr(self, spec.name)[rows] for spec in fields(self)})

    def on_worker(self, worker: IntArray) -> Columns:
        """The same footprints on other workers."""
        return Columns(
            worker=worker,
            start=self.start,
            steps=self.steps,
            footprint=self.footprint,
            sequences=self.sequences,
        )


def service_steps(kernel: Kernel, decode_tokens: FloatArray) -> FloatArray:
    """Active iterations of a request: o^ when decode-only, 1 + o^ when prefill is mixed in.

    Source: [OLP] section 2 and appendix A.
    """
    return decode_tokens + 1.0 if kernel is Kernel.MIXED else decode_tokens


def kv_footprint(kernel: Kernel, prompt_tokens: FloatArray) -> FloatArray:
    """KV tokens before the first step, such that use at step theta is footprint + theta + 1.

    Source: [OLP] eq. (1), m(theta) = s + theta + 1, and appendix A, m(0) = s, m(theta) = s + theta,
    which is the same line with footprint s - 1.
    """
    return prompt_tokens - 1.0 if kernel is Kernel.MIXED else prompt_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Which buckets a column touches: first <= bucket < last; and its end inside the last one."""

    first: IntArray
    last: IntArray
    end: FloatArray


def _span(columns: Columns, horizon: Horizon) -> _Span:
    end = columns.start + columns.steps
    last = np.ceil(np.minimum(end, horizon.iterations) / horizon.bucket_iterations)
    first = np.floor(np.maximum(columns.start, 0.0) / horizon.bucket_iterations)
    last_index = np.clip(last, 0, horizon.buckets).astype(np.int64)
    first_index = np.minimum(first.astype(np.int64), last_index)
    return _Span(first_index, last_index, np.minimum(end, last * horizon.bucket_iterations))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Two resources over workers and buckets; also the shape of capacities and of prices.

    Attributes:
        batch: (g, N) batch slots, or their price.
        kv: (g, N) KV tokens, or their price.
    """

    batch: FloatArray
    kv: FloatArray

    @staticmethod
    def zeros(workers: int, horizon: Horizon) -> Usage:
        """Nothing used, or everything free of charge."""
        shape = (workers, horizon.buckets)
        return Usage(batch=np.zeros(shape), kv=np.zeros(shape))


def sum_per_slot(index: IntArray, amount: FloatArray, size: int) -> FloatArray:
    """(size,) sum of amounts by index; float also when there are none (bincount's would be int)."""
    return np.bincount(index, weights=amount, minlength=size).astype(np.float64)


def total_usage(
    columns: Columns, horizon: Horizon, workers: int, weight: FloatArray | None = None
) -> Usage:
    """Sum the use of n columns on every worker and bucket, by range adds.

    A bucket's KV use is the column's largest use inside it: safe, never optimistic.

    Args:
        columns: n columns with their workers.
        horizon: N buckets.
        workers: g, number of workers.
        weight: (n,) multiplies each column; None is one.

    Returns:
        (g, N) batch slots and KV tokens.

    Source: [OLP] B.2; Differs: bucketed, see spec section 7.1.
    """
    span = _span(columns, horizon)
    stride = horizon.buckets + 1
    size = workers * stride
    begin = columns.worker * stride + span.first
    stop = columns.worker * stride + span.last
    scale = columns.sequences if weight is None else columns.sequences * weight
    scale = np.where(span.last > span.first, scale, 0.0)
    level = scale * (columns.footprint - columns.start)
    where = np.concatenate([begin, stop])

    def range_add(amount: FloatArray) -> FloatArray:
        steps = sum_per_slot(where, np.concatenate([amount, -amount]), size)
        return np.cumsum(steps.reshape(workers, stride), axis=1)[:, :-1]

    batch = range_add(scale)
    kv = range_add(level) + batch * horizon.right_edges
    # In its last bucket a column ends before the right edge: take the difference back.
    short = scale * (span.last * horizon.bucket_iterations - span.end)
    last_bucket = columns.worker * horizon.buckets + np.maximum(span.last - 1, 0)
    kv -= sum_per_slot(last_bucket, short, kv.size).reshape(kv.shape)
    return Usage(batch=batch, kv=kv)


def held_usage(columns: Columns, horizon: Horizon, workers: int) -> Usage:
    """`total_usage` of columns that are active in the first bucket, at half the cost.

    What runs now holds every bucket up to its last one, so a sum from the right over last buckets
    does the work of range adds.

    Args:
        columns: n columns with start < q and start + steps > 0.
        horizon: N buckets.
        workers: g, number of workers.

    Returns:
        (g, N) batch slots and KV tokens.
    """
    shape = (workers, horizon.buckets)
    q = horizon.bucket_iterations
    end = columns.start + columns.steps
    last = np.ceil(np.minimum(end, horizon.iterations) / q)
    at = columns.worker * horizon.buckets + (last.astype(np.int64) - 1)

    def held(amount: FloatArray) -> FloatArray:
        ending = sum_per_slot(at, amount, workers * horizon.buckets).reshape(shape)
        return np.cumsum(ending[:, ::-1], axis=1)[:, ::-1]

    batch = held(columns.sequences)
    kv = held(columns.sequences * (columns.footprint - columns.start))
    kv += batch * horizon.right_edges
    short = columns.sequences * np.maximum(last * q - end, 0.0)
    kv -= sum_per_slot(at, short, kv.size).reshape(shape)
    return Usage(batch=batch, kv=kv)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPrices:
    """Prefix sums of prices, so that any column costs O(1).

    Attributes:
        horizon: N buckets.
        batch: (g, N + 1) running sum of batch prices.
        kv: (g, N + 1) running sum of KV prices.
        kv_edge: (g, N + 1) running sum of KV price x right edge.
        kv_price: (g, N) the KV prices themselves.
    """

    horizon: Horizon
    batch: FloatArray
    kv: FloatArray
    kv_edge: FloatArray
    kv_price: FloatArray

    @staticmethod
    def of(prices: Usage, horizon: Horizon) -> PrefixPrices:
        """Sum once; used for every column of a decision."""
        edges = horizon.right_edges

        def prefix(values: FloatArray) -> FloatArray:
            return np.concatenate(
                [np.zeros((values.shape[0], 1)), np.cumsum(values, axis=1)], axis=1
            )

        return PrefixPrices(
            horizon,
            prefix(prices.batch),
            prefix(prices.kv),
            prefix(prices.kv * edges),
            prices.kv,
        )

    def cost(self, columns: Columns) -> FloatArray:
        """Price n columns, each on its own worker: a^T p.

        Returns:
            (n,) cost in the units of the prices.

        Source: [OLP] eq. (10), by prefix sums over slots of p_bat, p_mem and slot x p_mem.
        """
        span = _span(columns, self.horizon)
        g, first, last = columns.worker, span.first, span.last
        lastm1 = np.maximum(last - 1, 0)
        level = columns.footprint - columns.start
        cost = self.batch[g, last] - self.batch[g, first]
        cost = cost + level * (self.kv[g, last] - self.kv[g, first])
        cost = cost + self.kv_edge[g, lastm1] - self.kv_edge[g, np.minimum(first, lastm1)]
        cost = cost + self.kv_price[g, lastm1] * span.end
        return np.where(last > first, cost * columns.sequences, 0.0)

    def cost_on_every_worker(self, columns: Columns) -> FloatArray:
        """Price n columns on all g workers.

        Returns:
            (n, g) cost; column c of row i is the cost of starting request i on worker c.

        Source: [OLP] eq. (10).
        """
        span = _span(columns, self.horizon)
        first, last = span.first, span.last
        lastm1 = np.maximum(last - 1, 0)
        level = (columns.footprint - columns.start)[:, None]
        cost = (self.batch[:, last] - self.batch[:, first]).T
        cost = cost + level * (self.kv[:, last] - self.kv[:, first]).T
        cost = cost + (self.kv_edge[:, lastm1] - self.kv_edge[:, np.minimum(first, lastm1)]).T
        cost = cost + self.kv_price[:, lastm1].T * span.end[:, None]
        return np.where((last > first)[:, None], cost * columns.sequences[:, None], 0.0)
