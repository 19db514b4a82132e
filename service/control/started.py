"""3 controller, started requests as columns: what each will hold from now on.

A pure function of numbers, so that it may run in any thread on a copy of them (ledger.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from service.control.columns import (
    BoolArray,
    Columns,
    FloatArray,
    IntArray,
    Usage,
    held_usage,
    in_whole_blocks,
    kv_footprint,
    service_steps,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from service.control.lengths import LengthPredictor
    from service.control.occupancy import Frame


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Started:
    """n started requests on w workers.

    Attributes:
        workers: (w,) indices. at: (n,) place of each request's worker in it.
        held: (n,) arrays by name: the ledger's numbers.
        blind: whether some are not seen token by token; only then are their times needed.
        iteration_s: (g,) of every worker.
        now_s: the tick's time. frame: the look-ahead.
        predictor: tells what is left of requests that outlived their forecast.
    """

    workers: IntArray
    at: IntArray
    held: dict[str, NDArray[Any]]
    blind: bool
    iteration_s: FloatArray
    now_s: float
    frame: Frame
    predictor: LengthPredictor

    def frozen(self) -> Started:
        """The same, with copies of whatever others may change."""
        held = {
            name: values if values.base is None else values.copy()
            for name, values in self.held.items()
        }
        return replace(self, at=self.at.copy(), held=held, predictor=self.predictor.frozen())

    def usage(self) -> tuple[Usage, BoolArray]:
        """(w, N) what they hold, and (w,) which workers hold one that outlived its forecast."""
        columns, late = self._columns()
        usage = held_usage(columns, self.frame.horizon, self.workers.size)
        return usage, np.bincount(self.at[late], minlength=self.workers.size) > 0

    def _columns(self) -> tuple[Columns, IntArray]:
        """Columns that began in the past, whose worker is a place in `workers`; the late rows.

        The length of one that outlived its forecast is its conditional expectation (spec 7.3).
        """
        held, frame = self.held, self.frame
        produced = self._produced() if self.blind else held["produced"]
        total = held["forecast"]
        late = (produced >= total).nonzero()[0]
        if late.size:
            left = self.predictor.remaining(held["pool"][late], held["scale"][late], produced[late])
            total = total.copy()
            total[late] = produced[late] + left
        total = np.maximum(np.minimum(total, held["limit"]), produced + 1.0)
        # A prefill counts as done when it has begun: whether it still runs cannot be known, and
        # taking it for done never understates the KV it holds.
        done = service_steps(frame.kernel, produced)
        columns = Columns(
            worker=self.at,
            start=frame.offset - done,
            steps=service_steps(frame.kernel, total),
            footprint=kv_footprint(frame.kernel, held["prompt_tokens"]),
            sequences=held["sequences"],
        )
        later = (self.blind and held["ready_s"].any()) or np.count_nonzero(frame.lead)
        if later:
            columns = self._seen_later(columns)
        blocks = frame.block_tokens[self.workers]
        if blocks.size > 1:
            blocks = blocks[:1] if blocks.min() == blocks.max() else blocks[self.at]
        whole = in_whole_blocks(columns, blocks, frame.horizon)
        # Seen from now, whatever was started has a token to go.
        gone = whole.start + whole.steps <= 0 if later else None
        return (whole if gone is None or not gone.any() else whole.take(~gone)), late

    def _seen_later(self, columns: Columns) -> Columns:
        """Columns on the look-ahead of what starts now, which begins when its prefill ends.

        Those that are being prefilled begin later than those that decode; where that is later than
        the look-ahead's left edge they count from there on.
        """
        worker = self._worker()
        start = columns.start - self.frame.lead[worker]
        if self.blind:
            ready_s = self.held["ready_s"]
            wait_s = np.where(ready_s > 0, ready_s - self.now_s, 0.0)
            start = start + np.maximum(wait_s, 0.0) / self.iteration_s[worker]
        early = np.maximum(start - self.frame.offset, 0.0)
        return replace(columns, start=start - early, steps=columns.steps + early)

    def _produced(self) -> FloatArray:
        """Tokens so far; a request that does not stream is taken to decode at the worker's pace."""
        held = self.held
        produced: FloatArray = held["produced"].copy()
        blind = (~held["streams"] & (held["ready_s"] == 0)).nonzero()[0]
        if blind.size:
            pace_s = self.iteration_s[self._worker()[blind]]
            guess = np.floor((self.now_s - held["started_s"][blind]) / pace_s)
            produced[blind] = np.minimum(np.maximum(guess, 0.0), held["limit"][blind] - 1.0)
        return produced

    def _worker(self) -> IntArray:
        """(n,) index of each request's worker."""
        return np.asarray(self.workers[self.at])
