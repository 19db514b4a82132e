"""3 controller, spans: columns laid over the buckets they touch, to be summed up and priced.

What a column touches is worked out once; its use is then a few range adds, and its cost a few
differences of running sums, whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from service.control.columns import Columns, FloatArray, Horizon, IntArray, Usage

SUMS: Final = 3
"""Running sums of a worker's prices: per batch slot, per KV token, and x the right edge."""
LAST, BEFORE, FIRST = slice(0, 2), slice(2, 4), slice(4, 7)
"""Where a sum, or the price itself, is looked up."""
PLANES: Final = (0, 1, 2, 3, 0, 1, 2)
"""Which sums are looked up at each of a span's buckets."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """n columns over N buckets.

    Attributes:
        horizon: N buckets of q iterations.
        worker: (n,) as in the columns.
        at: (7, n) buckets: the end of the span twice, the one before it twice, its begin three
            times; sums of a worker's prices are looked up there.
        level: (n,) KV use at a bucket's right edge is level + that edge.
        end: (n,) last active iteration, exclusive.
        scale: (n,) sequences; 0 for a column that touches no bucket.
        amount: (5, n) what is added at the begin and the end of the span: batch slots, KV level;
            and KV that the last bucket holds less, as a column ends before its right edge.
    """

    horizon: Horizon
    worker: IntArray
    at: IntArray
    level: FloatArray
    end: FloatArray
    scale: FloatArray
    amount: FloatArray

    @staticmethod
    def of(columns: Columns, horizon: Horizon) -> Spans:
        """Lay columns out."""
        q, count = horizon.bucket_iterations, columns.start.size
        end = columns.start + columns.steps
        # Truncation towards zero is the floor here, as nothing is negative.
        last = np.maximum(np.ceil(np.minimum(end, horizon.iterations) / q), 0.0)
        first = (np.maximum(columns.start, 0.0) / q).astype(np.int64)
        end = np.minimum(end, last * q)
        at = np.empty((7, count), dtype=np.int64)
        at[LAST] = last
        at[BEFORE] = np.maximum(at[0] - 1, 0)
        at[FIRST] = np.minimum(first, at[0])
        scale = np.where(at[0] > at[4], columns.sequences, 0.0)
        level = columns.footprint - columns.start
        amount = np.empty((5, count))
        amount[0], amount[2] = scale, scale * level
        np.negative(amount[0:4:2], out=amount[1:4:2])
        amount[4] = scale * (last * q - end)
        return Spans(horizon, columns.worker, at, level, end, scale, amount)

    def take(self, rows: IntArray | slice) -> Spans:
        """The spans of some columns."""
        return Spans(
            self.horizon,
            self.worker[rows],
            self.at[:, rows],
            self.level[rows],
            self.end[rows],
            self.scale[rows],
            self.amount[:, rows],
        )

    def usage(self, worker: IntArray, workers: int) -> Usage:
        """Sum the use of n columns on every worker and bucket, by range adds.

        A bucket's KV use is the column's largest use inside it: safe, never optimistic.

        Args:
            worker: (n,) where each column is.
            workers: g, number of workers.

        Returns:
            (g, N) batch slots and KV tokens.

        Source: [OLP] B.2; Differs: bucketed, see spec section 7.1.
        """
        stride = self.horizon.buckets + 1
        where = self.at[[4, 0, 4, 0, 2]]
        where[2:4] += stride
        where[4] += 2 * stride
        where += worker * (3 * stride)
        added = np.bincount(where.ravel(), self.amount.ravel(), workers * 3 * stride)
        sums = added.astype(np.float64, copy=False).reshape(workers, 3, stride)
        batch, kv = sums[:, :2].cumsum(axis=2)[:, :, :-1].swapaxes(0, 1)
        kv = kv + batch * self.horizon.right_edges
        kv -= sums[:, 2, :-1]
        return Usage(batch=batch, kv=kv)


def total_usage(columns: Columns, horizon: Horizon, workers: int) -> Usage:
    """Sum the use of n columns on their workers: (g, N) batch slots and KV tokens."""
    return Spans.of(columns, horizon).usage(columns.worker, workers)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPrices:
    """Running sums of prices, so that any column costs O(1).

    Attributes:
        horizon: N buckets.
        table: (g, 4, L + 1) sums over the first L <= N buckets of batch price, KV price, and KV
            price x right edge; and the KV prices themselves, a zero at the end. Beyond those
            buckets nothing has a price: later sums equal the last.
    """

    horizon: Horizon
    table: FloatArray

    @staticmethod
    def of(prices: Usage, horizon: Horizon) -> PrefixPrices:
        """Sum once, from the left.

        Args:
            prices: (g, L) on the first buckets; the others have none.
            horizon: N >= L buckets.
        """
        workers, reach = prices.batch.shape
        table = np.zeros((workers, SUMS + 1, reach + 1))
        body = table[:, :SUMS, 1:]
        body[:, 0], body[:, 1] = prices.batch, prices.kv
        np.multiply(prices.kv, horizon.right_edges[:reach], out=body[:, 2])
        body.cumsum(axis=2, out=body)
        table[:, SUMS, :-1] = prices.kv
        return PrefixPrices(horizon, table)

    def cost(self, spans: Spans) -> FloatArray:
        """Price n columns, each on its own worker: a^T p.

        Returns:
            (n,) cost in the units of the prices.

        Source: [OLP] eq. (10), by running sums over slots of p_bat, p_mem and slot x p_mem.
        """
        own = spans.worker * (self.table.shape[1] * self.table.shape[2])
        found = self.table.ravel()[self._places(spans.at) + own]
        batch, kv, edge, price = found[: SUMS + 1]
        batch_first, kv_first, edge_first = found[SUMS + 1 :]
        cost: FloatArray = batch - batch_first
        cost += spans.level * (kv - kv_first)
        cost += edge
        cost -= edge_first
        cost += price * spans.end
        cost *= spans.scale
        return cost

    def cost_on_every_worker(self, spans: Spans) -> FloatArray:
        """Price n columns on all g workers.

        Returns:
            (n, g) cost; column c of row i is the cost of starting request i on worker c.

        Source: [OLP] eq. (10).
        """
        if self.table.shape[2] == 1:
            return np.zeros((spans.end.size, len(self.table)))
        found = self._flat().take(self._places(spans.at), axis=1).swapaxes(0, 1)
        found[:SUMS] -= found[SUMS + 1 :]
        cost, kv, edge, price = found[: SUMS + 1]
        kv *= spans.level
        cost += kv
        cost += edge
        price *= spans.end
        cost += price
        cost *= spans.scale
        return np.asarray(cost.T)

    def cost_of_starts(self, columns: Columns) -> FloatArray:
        """`cost_on_every_worker` of n columns that all start with the look-ahead, at less cost.

        Returns:
            (n, g) the same numbers to the last bit.
        """
        if self.table.shape[2] == 1:
            return np.zeros((columns.steps.size, len(self.table)))
        q = self.horizon.bucket_iterations
        last = np.ceil(np.minimum(columns.steps, self.horizon.iterations) / q)
        end = np.minimum(columns.steps, last * q)
        at = np.empty((4, last.size), dtype=np.int64)
        at[LAST] = last
        at[BEFORE] = at[0] - 1
        cost, kv, edge, price = self._flat().take(self._places(at), axis=1).swapaxes(0, 1)
        kv *= columns.footprint
        cost += kv
        cost += edge
        cost += price * end
        cost *= columns.sequences
        return np.asarray(cost.T)

    def _flat(self) -> FloatArray:
        """(g, 4 (L + 1)) the table, a row for each worker."""
        workers, planes, width = self.table.shape
        return self.table.reshape(workers, planes * width)

    def _places(self, at: IntArray) -> IntArray:
        """Where in a worker's part of the table the sums of some buckets are."""
        width = self.table.shape[2]
        planes = np.array(PLANES[: len(at)])[:, None]
        return np.asarray(np.minimum(at, width - 1) + width * planes)
