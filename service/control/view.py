"""3 controller, what a policy sees at one tick: the waiting requests and the fleet, as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from service.control.affinity import Cached
from service.control.columns import (
    BoolArray,
    Columns,
    FloatArray,
    Horizon,
    IntArray,
    Usage,
    in_whole_blocks,
    kv_footprint,
    service_steps,
)
from service.control.config import Kernel
from service.control.kernels.fleet import prompt_steps, startable_workers
from service.control.prices import PriceSnapshot, PriceSolution
from service.control.rate import RateShift

Pair = tuple[int, int]
"""(waiting row, worker index)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """n waiting requests; every array is (n,) unless said otherwise.

    Attributes:
        arrival_s: seconds. order: rank by arrival, breaks ties.
        prompt_tokens: s. decode_tokens: o^. sequences: batch slots wanted.
        kv_max: KV tokens a sequence that the worker a column was capped to has.
        value: reward multiplier. ttft_bound_s, e2e_bound_s: own bounds, NaN for the fleet's.
        discount: what the tenant's use of more than its share leaves of a request's reward and age.
        shared: whether any discount may be below 1.
        stamp: changes with whatever a row holds of a request, other than its kind and discount.
        kind: row of `reach`; requests of one model that avoid the same workers share a row.
        reach: (kinds, g) worker is up, serves the model, and was not just tried in vain.
        wanted: (g,) somebody may go to the worker.
    """

    arrival_s: FloatArray
    order: IntArray
    prompt_tokens: FloatArray
    decode_tokens: FloatArray
    kv_max: FloatArray
    sequences: FloatArray
    value: FloatArray
    ttft_bound_s: FloatArray
    e2e_bound_s: FloatArray
    discount: FloatArray
    shared: bool
    stamp: IntArray
    kind: IntArray
    reach: BoolArray
    wanted: BoolArray

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def allowed(
        self, workers: IntArray | None = None, rows: IntArray | slice = slice(None)
    ) -> BoolArray:
        """(n, w) whether some requests may go to each of some workers; None for all of them."""
        reach = self.reach if workers is None else self.reach[:, workers]
        return np.asarray(reach[self.kind[rows]])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetView:
    """g workers; every array is (g,).

    Attributes:
        worker_ids: names, in index order.
        batch_limit: B_g. kv_capacity_tokens: M_g, inf when unknown. block_tokens: KV block size.
        iteration_s: told decode iteration.
        step_s: what a decode iteration was seen to take, without the prompts computed in it.
        prompt_s: what a prompt token was seen to hold up everything else on the worker.
        ahead_tokens: prompt tokens that were started there and are not computed yet.
        outstanding: sequences started on the worker and not ended, foreign ones included.
        engine_queue_empty: no request is known to wait inside the engine.
        lead: iterations from now to when what starts now begins to decode; above 0 where a prefill
            worker computes its prompt first.
    """

    worker_ids: tuple[str, ...]
    batch_limit: FloatArray
    kv_capacity_tokens: FloatArray
    block_tokens: FloatArray
    iteration_s: FloatArray
    step_s: FloatArray
    prompt_s: FloatArray
    ahead_tokens: FloatArray
    outstanding: FloatArray
    engine_queue_empty: BoolArray
    lead: FloatArray

    def __len__(self) -> int:
        return len(self.worker_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """One tick's input.

    Attributes:
        now_s: the tick's time. kernel, horizon: of the columns.
        waiting, fleet: the arrays.
        occupancy: gives what started requests hold on a look-ahead whose left edge lies some
            iterations before now (with a lead: before now plus that): (w, N) for some workers,
            (g, N) for None; computed on demand.
        free: the same, of what started requests leave free of B_g and M_g; new arrays.
        frozen_occupancy: makes the copies from which that of all workers, as it is now, can be
            worked out later in any thread, to be read alone.
        kv_ceiling_tokens: most KV that a worker's started requests will ever hold, others' load
            included, given what rounding may add to a sequence; infinity when that cannot be told
            cheaply.
        left_steps: slot-iterations that requests started on some (g,) workers have left by their
            forecasts.
        usual_left_steps: iterations that a busy slot would have left on average, whatever the order
            of starts; 0 while unknown.
        arrivals_per_s: measured arrival rate.
        cached: what workers hold of the waiting prompts; None where no prompt can be known again.
    """

    now_s: float
    kernel: Kernel
    horizon: Horizon
    waiting: Waiting
    fleet: FleetView
    occupancy: Callable[[Horizon, float, IntArray | None], Usage]
    free: Callable[[Horizon, float, IntArray | None], Usage]
    frozen_occupancy: Callable[[Horizon, float], Callable[[], Usage]]
    kv_ceiling_tokens: Callable[[int, float], float]
    left_steps: Callable[[BoolArray], float]
    usual_left_steps: float
    arrivals_per_s: float
    cached: Cached | None = None

    def columns(self, start: float = 0.0, rows: IntArray | slice = slice(None)) -> Columns:
        """(n,) columns of starting some waiting requests now (worker left at 0)."""
        waiting = self.waiting
        steps = service_steps(self.kernel, waiting.decode_tokens[rows])
        columns = Columns(
            worker=np.zeros(steps.size, dtype=np.int64),
            start=np.full(steps.size, start),
            steps=steps,
            footprint=kv_footprint(self.kernel, waiting.prompt_tokens[rows]),
            sequences=waiting.sequences[rows],
        )
        # Workers may differ in block size; the largest is safe on all of them.
        whole = in_whole_blocks(columns, self.largest_block(), self.horizon)
        # Rounding up must not make a column that an empty worker holds larger than the worker.
        footprint = np.minimum(whole.footprint, waiting.kv_max[rows] - whole.steps)
        return replace(whole, footprint=footprint)

    def largest_block(self) -> FloatArray:
        """(1,) KV tokens of the largest block of any worker."""
        return np.asarray(self.fleet.block_tokens.max(keepdims=True, initial=1.0))

    def prompt_steps(self) -> float:
        """Slot-iterations that a prompt token takes: while one is computed no busy slot decodes.

        Mean over the workers, for the slots that are busy once one more request has started.
        """
        fleet = self.fleet
        if self.kernel is Kernel.DECODE_ONLY or not len(fleet):
            return 0.0
        return prompt_steps(fleet.outstanding, fleet.batch_limit, fleet.prompt_s, fleet.step_s)

    def age_s(self) -> FloatArray:
        """(n,) seconds waited; those of a tenant over its share count less."""
        age_s = self.now_s - self.waiting.arrival_s
        return age_s * self.waiting.discount if self.waiting.shared else age_s

    def capacity(self) -> Usage:
        """(g, 1) B_g and M_g, the same on every bucket."""
        fleet = self.fleet
        return Usage(batch=fleet.batch_limit[:, None], kv=fleet.kv_capacity_tokens[:, None])

    def open_workers(self) -> IntArray:
        """(w,) startable workers: a free batch slot, an empty engine queue, wanted by someone.

        Nothing can start anywhere else, so a decision need not look there. Where there is a lead a
        slot may become free within it: the look-ahead tells.
        """
        fleet = self.fleet
        found = np.empty(len(fleet), dtype=np.int64)
        held, wanted = (fleet.outstanding, fleet.batch_limit, fleet.lead), self.waiting.wanted
        return found[: startable_workers(*held, wanted, fleet.engine_queue_empty, found)]


class Policy(Protocol):
    """A decision rule; it may keep state of its own (a turn, prices), never the requests."""

    def decide(self, view: View) -> list[Pair]:
        """Choose starts, in order. Each row at most once, each pair allowed."""
        ...

    def price_problem(self, view: View) -> PriceSnapshot | None:
        """Return what to solve next, or None when the policy has no prices."""
        ...

    def adopt(self, solution: PriceSolution) -> None:
        """Use new prices from now on."""
        ...

    def follow_rise(self, shift: RateShift) -> None:
        """Drop what was recorded before the arrival rate rose."""
        ...

    def natural_prices(self, worker_ids: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
        """(g,) mean price over the look-ahead per batch slot and per KV token, one iteration."""
        ...


class Unpriced:
    """The price half of the protocol for rules that have no prices."""

    def price_problem(self, view: View) -> PriceSnapshot | None:
        """There is nothing to solve."""
        return None

    def adopt(self, solution: PriceSolution) -> None:
        """There is nothing to take."""

    def follow_rise(self, shift: RateShift) -> None:
        """There is no history."""

    def natural_prices(self, worker_ids: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
        """Everything is free of charge."""
        return np.zeros(len(worker_ids)), np.zeros(len(worker_ids))
