"""3 controller, spans: columns laid over the buckets they touch, to be summed up and priced.

What a column touches is worked out once; its use is then a few range adds, and its cost a few
differences of running sums, whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from service.control.columns import (
    BoolArray,
    Columns,
    FloatArray,
    Horizon,
    IntArray,
    Usage,
    sum_per_slot,
)

SUMS: Final = 3
"""Running sums of a worker's prices: per batch slot, per KV token, and x the right edge."""
LOOKED_UP: Final = np.array([[0], [1], [2], [3], [0], [1], [2]])
"""Which sums, or as number 3 the price itself, are looked up at each of a span's buckets."""
ADDED: Final = np.array([[0], [0], [1], [1], [2]])
"""To which resource each amount is added: batch slots, KV level, KV that the last bucket lacks."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """n columns over N buckets, packed so that it costs little to take some of them.

    Attributes:
        horizon: N buckets of q iterations.
        ints: (13, n) worker as in the columns; 7 places in a worker's sums over all buckets, which
            are those at the end of the span, one before it, and at its begin; 5 places in a
            worker's use at which `amount` is added.
        numbers: (8, n) see below.
    """

    horizon: Horizon
    ints: IntArray
    numbers: FloatArray

    @staticmethod
    def of(columns: Columns, horizon: Horizon) -> Spans:
        """Lay columns out."""
        q, stride = horizon.bucket_iterations, horizon.buckets + 1
        end = columns.start + columns.steps
        # Truncation towards zero is the floor here, as nothing is negative.
        last = np.maximum(np.ceil(np.minimum(end, horizon.iterations) / q), 0.0)
        end = np.minimum(end, last * q)
        stop = last.astype(np.int64)
        first = np.minimum((np.maximum(columns.start, 0.0) / q).astype(np.int64), stop)
        before = np.maximum(stop - 1, 0)
        places = (stop, stop, before, before, first, first, first)
        ints = np.array([columns.worker, *places, first, stop, first, stop, before])
        ints[1:8] += stride * LOOKED_UP
        ints[8:] += stride * ADDED
        scale = np.where(stop > first, columns.sequences, 0.0)
        level = columns.footprint - columns.start
        held = scale * level
        short = scale * (last * q - end)
        numbers = np.array([level, end, scale, scale, -scale, held, -held, short])
        return Spans(horizon, ints, numbers)

    def take(self, rows: IntArray | BoolArray | slice) -> Spans:
        """The spans of some columns."""
        return Spans(self.horizon, self.ints[:, rows], self.numbers[:, rows])

    @property
    def worker(self) -> IntArray:
        """(n,) as in the columns."""
        worker: IntArray = self.ints[0]
        return worker

    @property
    def size(self) -> int:
        """How many columns there are."""
        return int(self.ints.shape[1])

    @property
    def level(self) -> FloatArray:
        """(n,) KV use of a sequence at a bucket's right edge is level + that edge."""
        level: FloatArray = self.numbers[0]
        return level

    @property
    def end(self) -> FloatArray:
        """(n,) last active iteration, exclusive."""
        end: FloatArray = self.numbers[1]
        return end

    @property
    def scale(self) -> FloatArray:
        """(n,) sequences; 0 for a column that touches no bucket."""
        scale: FloatArray = self.numbers[2]
        return scale

    def places(self, buckets: int) -> IntArray:
        """(7, n) where the sums of a span's buckets are in a worker's sums over so many buckets."""
        found = self.ints[1:8]
        if buckets < self.horizon.buckets:
            at = found - (self.horizon.buckets + 1) * LOOKED_UP
            found = np.minimum(at, buckets) + (buckets + 1) * LOOKED_UP
        return found

    def usage(self, worker: IntArray, workers: int) -> FloatArray:
        """Sum the use of n columns on every worker and bucket, by range adds.

        A bucket's KV use is the column's largest use inside it: safe, never optimistic.

        Args:
            worker: (n,) where each column is.
            workers: g, number of workers.

        Returns:
            (g, 2, N) batch slots and KV tokens.

        Source: [OLP] B.2; Differs: bucketed, see spec section 7.1.
        """
        stride = self.horizon.buckets + 1
        where = self.ints[8:] + worker * (3 * stride)
        added = sum_per_slot(where.ravel(), self.numbers[3:].ravel(), workers * 3 * stride)
        added = added.reshape(workers, 3, stride)[:, :, :-1]
        use = added[:, :2].cumsum(axis=2)
        use[:, 1] += use[:, 0] * self.horizon.right_edges
        use[:, 1] -= added[:, 2]
        return use


def total_usage(columns: Columns, horizon: Horizon, workers: int) -> Usage:
    """Sum the use of n columns on their workers: (g, N) batch slots and KV tokens."""
    use = Spans.of(columns, horizon).usage(columns.worker, workers)
    return Usage(batch=use[:, 0], kv=use[:, 1])


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
        return PrefixPrices.stacked(np.stack([prices.batch, prices.kv], axis=1), horizon)

    @staticmethod
    def stacked(prices: FloatArray, horizon: Horizon) -> PrefixPrices:
        """`of` (g, 2, L) prices: of a batch slot, of a KV token."""
        workers, _, reach = prices.shape
        table = np.zeros((workers, SUMS + 1, reach + 1))
        table[:, :2, 1:] = prices
        table[:, SUMS, :-1] = prices[:, 1]
        body = table[:, :SUMS, 1:]
        np.multiply(prices[:, 1], horizon.right_edges[:reach], out=body[:, 2])
        body.cumsum(axis=2, out=body)
        return PrefixPrices(horizon, table)

    def cost_on_every_worker(self, spans: Spans) -> FloatArray:
        """Price n columns on all g workers.

        Returns:
            (n, g) cost; column c of row i is the cost of starting request i on worker c.

        Source: [OLP] eq. (10), by running sums over slots of p_bat, p_mem and slot x p_mem.
        """
        if self.table.shape[2] == 1:
            return np.zeros((spans.size, len(self.table)))
        found = self._flat().take(spans.places(self.table.shape[2] - 1), axis=1).swapaxes(0, 1)
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
        stop, width = last.astype(np.int64), self.table.shape[2]
        at = np.minimum([stop, stop, stop - 1, stop - 1], width - 1) + width * LOOKED_UP[:4]
        cost, kv, edge, price = self._flat().take(at, axis=1).swapaxes(0, 1)
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
