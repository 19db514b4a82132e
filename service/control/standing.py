"""3 controller, standing: what stays the same of a request while it waits, worked out once.

Between two ticks few waiting requests come or go, so most rows of these arrays are those of the
tick before. A row is made again when its stamp says that it holds another request, or the same one
with another column. Nothing here depends on the time; rewards with tail weights do, so these are
made anew at each tick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from service.control.columns import Columns
from service.control.config import Kernel
from service.control.kept_views import KeptViews
from service.control.kernels.queue import settle
from service.control.pricing import waiting_reward
from service.control.tiers import LOWEST_VALUE

if TYPE_CHECKING:
    from service.control.columns import FloatArray, IntArray
    from service.control.config import ControlConfig
    from service.control.spans import PrefixPrices
    from service.control.view import View, Waiting

FIRST_ROWS = 64
NOBODY = -1
"""A stamp that no request has."""


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """What a tick need not work out; every array is (n,), a row for each waiting request.

    All are views of what is kept: read-only, and valid until the next look.

    Attributes:
        columns: of starting now. steps: iterations in service, not rounded up to buckets.
        rewards: [OLP] 3.1, without values; not normalised.
        cost: at most what starting now costs on whichever worker, normalised.
        worth: tier of the value, discounts left out.
    """

    columns: Columns
    steps: FloatArray
    rewards: FloatArray
    cost: FloatArray
    worth: IntArray


class Standing:
    """Keeps the numbers of the waiting requests, row by row; as many rows as there were at most."""

    def __init__(self, config: ControlConfig) -> None:
        weights = config.weights
        self._config = config
        self._timeless = not weights.tail_e2e and not weights.tail_ttft
        self._ground: tuple[object, ...] = ()
        self._blocks: FloatArray | None = None
        self._block = 1.0
        self._cheapest: PrefixPrices | None = None
        self._stamp: IntArray = np.zeros(0, dtype=np.int64)
        self._worth: IntArray = np.zeros(0, dtype=np.int64)
        # What `settle` keeps; then what is always zero.
        self._numbers: FloatArray = np.zeros((6, 0))
        self._nowhere: IntArray = np.zeros(0, dtype=np.int64)
        # True as long as the same views of who waits are shown.
        self._shown: KeptViews[tuple[Waiting, Settled]] = KeptViews()

    def look(self, view: View, cheapest: PrefixPrices | None) -> Settled:
        """The numbers of everybody who waits.

        Args:
            view: the tick.
            cheapest: prices of one worker that is nowhere dearer than any other; None for none.
        """
        n = len(view.waiting)
        ground = (view.kernel, view.horizon, self._block_tokens(view))
        if ground != self._ground or n > self._stamp.size:
            self._begin(ground, n)
        self._settle(view)
        settled = self._of(view.waiting)
        if cheapest is not self._cheapest:
            # A request that comes later has no cost here until prices change: bounds stay bounds.
            self._cheapest = cheapest
            columns = settled.columns
            settled.cost[:] = 0.0 if cheapest is None else cheapest.cost_of_starts(columns)[:, 0]
        return settled if self._timeless else replace(settled, rewards=self._timed_rewards(view))

    def _of(self, waiting: Waiting) -> Settled:
        """What is kept, cut to those who wait."""
        n = len(waiting)
        known = self._shown.get(n)
        if known is not None and known[0] is waiting:
            return known[1]
        steps, whole, footprint, rewards, cost, zeros = self._numbers[:, :n]
        columns = Columns(
            worker=self._nowhere[:n],
            start=zeros,
            steps=whole,
            footprint=footprint,
            sequences=waiting.sequences,
        )
        settled = Settled(columns, steps, rewards, cost, self._worth[:n])
        self._shown.put(n, (waiting, settled))
        return settled

    def _begin(self, ground: tuple[object, ...], rows: int) -> None:
        """Forget everything, with room for some more rows."""
        size = max(FIRST_ROWS, self._stamp.size, 2 * rows if rows > self._stamp.size else 0)
        self._ground = ground
        self._stamp = np.full(size, NOBODY)
        self._worth, self._nowhere = np.zeros((2, size), dtype=np.int64)
        self._numbers = np.zeros((6, size))
        self._shown.clear()

    def _settle(self, view: View) -> None:
        """Make anew the rows of those who came, moved or changed."""
        waiting, weights = view.waiting, self._config.weights
        settle(
            waiting.stamp,
            waiting.decode_tokens,
            waiting.prompt_tokens,
            waiting.kv_max,
            waiting.value,
            view.kernel is Kernel.MIXED,
            self._block,
            float(view.horizon.bucket_iterations),
            float(view.horizon.iterations),
            weights.throughput,
            weights.e2e,
            weights.ttft,
            weights.queries,
            LOWEST_VALUE,
            self._stamp,
            self._worth,
            self._numbers,
        )

    def _block_tokens(self, view: View) -> float:
        """The largest block; arrays of the fleet are never changed in place."""
        if self._blocks is not view.fleet.block_tokens:
            self._blocks, self._block = view.fleet.block_tokens, float(view.largest_block()[0])
        return self._block

    def _timed_rewards(self, view: View) -> FloatArray:
        """(n,) rewards that depend on the wait."""
        pace_s = float(view.fleet.iteration_s.mean()) if len(view.fleet) else 1.0
        waited = (view.now_s - view.waiting.arrival_s) / pace_s
        left = float(view.horizon.iterations)
        return waiting_reward(view, self._config.weights, waited, left, pace_s)
