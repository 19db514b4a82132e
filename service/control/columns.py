"""3 controller, LP columns: what a request takes from a worker's future, and what that costs.

A column is a footprint over decode iterations counted from the left edge of the look-ahead. Both KV
kernels of [OLP] have the same shape, footprint + theta + 1 over a number of steps, so one set of
kernels serves the ledger, the candidates and the recorded history. Nothing here loops over slots.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        size = self.worker.shape
        others = (self.start, self.steps, self.footprint, self.sequences)
        if any(values.shape != size for values in others):
            raise ValueError("the arrays of Columns must have one shape")

    def take(self, rows: IntArray | BoolArray) -> Columns:
        """The columns of some rows."""
        return Columns(
            worker=self.worker[rows],
            start=self.start[rows],
            steps=self.steps[rows],
            footprint=self.footprint[rows],
            sequences=self.sequences[rows],
        )

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


def in_whole_blocks(columns: Columns, block_tokens: FloatArray, horizon: Horizon) -> Columns:
    """Count KV as the engine allocates it, in whole blocks.

    Inside a bucket a column's use is largest at the right edge. Where q is a multiple of the block
    size, use at every edge is the same number of tokens short of a whole block, so the footprint
    grows by just that, and a column ends at an edge. Otherwise it grows by one block less a token,
    which is always enough.

    Args:
        columns: n columns.
        block_tokens: (n,) KV block size of the worker each is (or may be) on, or (1,) for all.
        horizon: of the buckets.
    """
    q = float(horizon.bucket_iterations)
    if block_tokens.size > 1 and block_tokens.min() == block_tokens.max():
        block_tokens = block_tokens[:1]
    if block_tokens.size == 1:
        return _in_equal_blocks(columns, float(block_tokens[0]), q)
    aligned = (np.remainder(q, block_tokens) == 0) & (block_tokens > 1)
    spare = block_tokens - 1.0
    steps = columns.steps
    if aligned.any():
        tokens_at_edge = columns.footprint - columns.start
        blocks = np.ceil(tokens_at_edge / block_tokens)
        spare = np.where(aligned, blocks * block_tokens - tokens_at_edge, spare)
        ends_at_edge = np.ceil((columns.start + steps) / q) * q
        steps = np.where(aligned, ends_at_edge - columns.start, steps)
    return Columns(
        worker=columns.worker,
        start=columns.start,
        steps=steps,
        footprint=columns.footprint + spare,
        sequences=columns.sequences,
    )


def _in_equal_blocks(columns: Columns, block_tokens: float, q: float) -> Columns:
    """`in_whole_blocks` where all blocks have one size."""
    if block_tokens <= 1 or q % block_tokens:
        steps, footprint = columns.steps, columns.footprint + (block_tokens - 1.0)
    else:
        tokens_at_edge = columns.footprint - columns.start
        spare = np.ceil(tokens_at_edge / block_tokens) * block_tokens - tokens_at_edge
        steps = np.ceil((columns.start + columns.steps) / q) * q - columns.start
        footprint = columns.footprint + spare
    return Columns(
        worker=columns.worker,
        start=columns.start,
        steps=steps,
        footprint=footprint,
        sequences=columns.sequences,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Which buckets a column touches: first <= bucket < last; and its end inside the last one."""

    first: IntArray
    last: IntArray
    end: FloatArray


def _span(columns: Columns, horizon: Horizon) -> _Span:
    q = horizon.bucket_iterations
    end = columns.start + columns.steps
    # Truncation towards zero is the floor here, as nothing is negative.
    last = np.maximum(np.ceil(np.minimum(end, horizon.iterations) / q), 0.0)
    first = (np.maximum(columns.start, 0.0) / q).astype(np.int64)
    last_index = last.astype(np.int64)
    return _Span(np.minimum(first, last_index), last_index, np.minimum(end, last * q))


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
    return np.bincount(index, weights=amount, minlength=size).astype(np.float64, copy=False)


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
        return ending[:, ::-1].cumsum(axis=1)[:, ::-1]

    batch = held(columns.sequences)
    kv = held(columns.sequences * (columns.footprint - columns.start))
    kv += batch * horizon.right_edges
    short = columns.sequences * np.maximum(last * q - end, 0.0)
    kv -= sum_per_slot(at, short, kv.size).reshape(shape)
    return Usage(batch=batch, kv=kv)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPrices:
    """Prefix sums of prices, so that any column costs O(1).

    Nothing is summed beyond the last bucket that has a price anywhere.

    Attributes:
        horizon: N buckets.
        sums: (3, g, L + 1) running sums of batch price, KV price, and KV price x right edge over
            the L <= N buckets up to the last one that has a price; later sums equal the last.
        kv_price: (g, min(L + 1, N)) the KV prices themselves, a zero at the end if L < N.
    """

    horizon: Horizon
    sums: FloatArray
    kv_price: FloatArray

    @staticmethod
    def of(prices: Usage, horizon: Horizon) -> PrefixPrices:
        """Sum once; used for every column of a decision."""
        priced = np.flatnonzero(prices.batch.any(axis=0) | prices.kv.any(axis=0))
        reach = int(priced[-1]) + 1 if priced.size else 0
        sums = np.empty((3, prices.batch.shape[0], reach + 1))
        sums[:, :, 0] = 0.0
        body = sums[:, :, 1:]
        body[0], body[1] = prices.batch[:, :reach], prices.kv[:, :reach]
        np.multiply(body[1], horizon.right_edges[:reach], out=body[2])
        body.cumsum(axis=2, out=body)
        return PrefixPrices(horizon, sums, prices.kv[:, : reach + 1])

    def of_workers(self, workers: IntArray) -> PrefixPrices:
        """The sums of w workers, in the order given."""
        return PrefixPrices(self.horizon, self.sums[:, workers], self.kv_price[workers])

    def cost(self, columns: Columns) -> FloatArray:
        """Price n columns, each on its own worker: a^T p.

        Returns:
            (n,) cost in the units of the prices.

        Source: [OLP] eq. (10), by prefix sums over slots of p_bat, p_mem and slot x p_mem.
        """
        span = _span(columns, self.horizon)
        reach = self.sums.shape[2] - 1
        g, first, last = columns.worker, span.first, span.last
        before = np.maximum(last - 1, 0)
        price = self.kv_price[g, np.minimum(before, reach)]
        first, last, before = (np.minimum(at, reach) for at in (first, last, before))
        batch, kv, edge = self.sums
        cost: FloatArray = batch[g, last] - batch[g, first]
        cost += (columns.footprint - columns.start) * (kv[g, last] - kv[g, first])
        cost += edge[g, before]
        cost -= edge[g, np.minimum(first, before)]
        cost += price * span.end
        cost *= columns.sequences
        cost[span.last <= span.first] = 0.0
        return cost

    def cost_of_starts(self, columns: Columns) -> FloatArray:
        """`cost_on_every_worker` of n columns that all start with the look-ahead, at less cost.

        Returns:
            (n, g) the same numbers to the last bit.
        """
        if self.sums.shape[2] == 1:
            return np.zeros((columns.steps.size, self.sums.shape[1]))
        q = self.horizon.bucket_iterations
        last = np.ceil(np.minimum(columns.steps, self.horizon.iterations) / q)
        end = np.minimum(columns.steps, last * q)
        index = last.astype(np.int64)
        before = index - 1
        cost, kv = self.sums[:2].take(index, axis=2, mode="clip")
        kv *= columns.footprint
        cost += kv
        cost += self.sums[2].take(before, axis=1, mode="clip")
        cost += self.kv_price.take(before, axis=1, mode="clip") * end
        cost *= columns.sequences
        return np.asarray(cost.T)

    def cost_on_every_worker(self, columns: Columns) -> FloatArray:
        """Price n columns on all g workers.

        Returns:
            (n, g) cost; column c of row i is the cost of starting request i on worker c.

        Source: [OLP] eq. (10).
        """
        if self.sums.shape[2] == 1:
            return np.zeros((columns.start.size, self.sums.shape[1]))
        span = _span(columns, self.horizon)
        first, last = span.first, span.last
        before = np.maximum(last - 1, 0)
        cost, kv = self.sums[:2].take(last, axis=2, mode="clip")
        edge: FloatArray = self.sums[2].take(before, axis=1, mode="clip")
        if first.any():
            batch_first, kv_first = self.sums[:2].take(first, axis=2, mode="clip")
            cost -= batch_first
            kv -= kv_first
            edge -= self.sums[2].take(np.minimum(first, before), axis=1, mode="clip")
        cost += (columns.footprint - columns.start) * kv
        cost += edge
        cost += self.kv_price.take(before, axis=1, mode="clip") * span.end
        cost *= columns.sequences
        cost[:, last <= first] = 0.0
        return np.asarray(cost.T)
