"""3 controller, residual: what is free on every future bucket, and which columns fit into it."""

from __future__ import annotations

from service.control.columns import BoolArray, Columns, Horizon, Usage
from service.control.kernels.room import earliest_room, fitting, is_full, take_out


class Residual:
    """Working residual b^(k) of a tick: capacity minus use, and what still fits into it.

    Mutable on purpose: the greedy pass subtracts as it admits. Capacities may be infinite.

    Attributes:
        batch: (g, N) free batch slots. kv: (g, N) free KV tokens.
        bucket_iterations: q.
    """

    def __init__(self, free: Usage, horizon: Horizon) -> None:
        """Take what is free; its arrays are written to from now on."""
        self.bucket_iterations = float(horizon.bucket_iterations)
        self.batch = free.batch
        self.kv = free.kv

    def is_full(self) -> bool:
        """Whether no worker has a free batch slot now."""
        return is_full(self.batch)

    def fits(self, columns: Columns) -> BoolArray:
        """Whether each of n columns that start in the first bucket fits each of g workers.

        Returns:
            (n, g) True where the column's use is within the residual on all its future slots.

        Source: [OLP] Algorithm 1, line 13.
        """
        return fitting(
            *(columns.start, columns.steps, columns.footprint, columns.sequences),
            *(self.batch, self.kv, self.bucket_iterations),
        )

    def subtract(self, columns: Columns, row: int, worker: int, shift: int = 0) -> None:
        """Take a column out of one worker's residual, moved right by some buckets."""
        column = _column(columns, row)
        take_out(self.batch, self.kv, worker, column, shift, self.bucket_iterations)

    def reserve(self, columns: Columns, row: int, allowed: BoolArray) -> bool:
        """Set aside the earliest room for a column that fits nowhere now.

        It is subtracted where `earliest` finds room, so that whoever starts later must end before
        it or fit beside it.

        Returns:
            Whether there was room inside the look-ahead.
        """
        found = self.earliest(columns, row, allowed)
        if found is not None:
            self.subtract(columns, row, *found)
        return found is not None

    def earliest(self, columns: Columns, row: int, allowed: BoolArray) -> tuple[int, int] | None:
        """Find the fewest buckets a column must move right until it fits some allowed worker.

        Returns:
            The worker, the one with the most free slots there, and the shift in buckets >= 1; None
            when there is no room inside the look-ahead.
        """
        column = _column(columns, row)
        worker, shift = earliest_room(allowed, column, self.batch, self.kv, self.bucket_iterations)
        return (worker, shift) if shift else None


def _column(columns: Columns, row: int) -> tuple[float, float, float, float]:
    """One column for a kernel: start, steps, footprint, sequences."""
    return (
        float(columns.start[row]),
        float(columns.steps[row]),
        float(columns.footprint[row]),
        float(columns.sequences[row]),
    )
