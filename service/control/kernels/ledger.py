"""3 controller, kernels of the ledger: sums over started requests."""

from __future__ import annotations

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.kernels.compiled import BOOLS, FLOAT, FLOATS, INTS, kernel


@kernel(FLOAT(INTS, FLOATS, FLOATS, FLOATS, BOOLS))
def left_steps(
    worker: IntArray,
    forecast: FloatArray,
    produced: FloatArray,
    sequences: FloatArray,
    counted: BoolArray,
) -> float:
    """Slot-iterations that n requests on the counted of (g,) workers have left.

    Args:
        worker: (n,) indices; -1 for one that is gone.
        forecast: (n,) tokens in all.
        produced: (n,) tokens so far.
        sequences: (n,) slots held.
        counted: (g,) workers.
    """
    total = 0.0
    for row in range(worker.size):
        if worker[row] >= 0 and counted[worker[row]]:
            total += max(forecast[row] - produced[row], 0.0) * sequences[row]
    return total
