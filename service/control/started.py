"""3 controller, started requests: what each will hold from now on, summed up by worker.

The numbers that follow may be worked out in any thread on a copy of those here (ledger.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from service.control.config import Kernel
from service.control.kernels.calendar import hold

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from service.control.columns import BoolArray, FloatArray, IntArray, Usage
    from service.control.lengths import Survival
    from service.control.occupancy import Frame


NUMBERS: Final = (
    "worker",
    "pool",
    "prompt_tokens",
    "produced",
    "forecast",
    "limit",
    "scale",
    "sequences",
)
"""What a started request's column follows from."""
TIMES: Final = ("streams", "ready_s", "started_s")
"""What it follows from as well where requests are not seen token by token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Started:
    """n started requests.

    A column began in the past, when its request did. The length of one that outlived its forecast
    is its conditional expectation (spec 7.3). Those that are being prefilled begin later than those
    that decode; where that is later than the look-ahead's left edge they count from there on. KV is
    counted in whole blocks.

    Attributes:
        held: (n,) arrays by name: NUMBERS of the ledger, and TIMES or nothing.
        blind: whether some are not seen token by token; only then are TIMES needed.
        iteration_s: (g,) of every worker.
        now_s: the tick's time. frame: the look-ahead.
        survival: tells what is left of requests that outlived their forecast.
    """

    held: dict[str, NDArray[Any]]
    blind: bool
    iteration_s: FloatArray
    now_s: float
    frame: Frame
    survival: Survival

    def frozen(self) -> Started:
        """The same, with copies of whatever others may change."""
        held = {name: values.copy() for name, values in self.held.items()}
        return replace(self, held=held, survival=self.survival.frozen())

    def hold(self, workers: IntArray, usage: Usage, stale: BoolArray, late: BoolArray) -> None:
        """Make the stale ones of some workers' rows.

        Args:
            workers: (w,) indices.
            usage: (g, N) batch slots and KV tokens, to be written to.
            stale: (g,) which rows are out of date; those that are made are so no more.
            late: (g,) which workers hold a request that outlived its forecast, to be written to.
        """
        held, frame, survival = self.held, self.frame, self.survival
        prefill = 1.0 if frame.kernel is Kernel.MIXED else 0.0
        q, none = float(frame.horizon.bucket_iterations), np.zeros(0)
        hold(
            workers,
            stale,
            late,
            usage.batch,
            usage.kv,
            held["worker"],
            held["pool"],
            held["prompt_tokens"],
            held["produced"],
            held["forecast"],
            held["limit"],
            held["scale"],
            held["sequences"],
            self.blind,
            held.get("streams", np.zeros(0, np.bool_)),
            held.get("ready_s", none),
            held.get("started_s", none),
            frame.block_tokens,
            frame.lead,
            self.iteration_s,
            np.array([q, frame.offset, prefill, self.now_s]),
            survival.sums,
            survival.above,
            survival.grid,
            survival.width,
            survival.shape,
        )
