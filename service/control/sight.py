"""3 controller, from the books to a view: what a policy is shown, what of its answer is booked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.control.columns import FloatArray, Horizon, IntArray, Usage
from service.control.config import Kernel
from service.control.occupancy import Frame
from service.control.tenants import Tenants
from service.control.view import FleetView, Pair, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.control.config import ControlConfig
    from service.control.fleet_state import FleetState
    from service.control.handoff import Handoff
    from service.control.ledger import Ledger
    from service.control.waiting import WaitingRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Makes views of a router's books; `horizon` is the look-ahead."""

    config: ControlConfig
    fleet: FleetState
    waiting: WaitingRoom
    ledger: Ledger
    handoff: Handoff
    tenants: Tenants
    horizon: Horizon = field(init=False)

    def __post_init__(self) -> None:
        """Lay the look-ahead out."""
        config = self.config
        buckets = max(1, config.horizon_iterations // config.bucket_iterations)
        object.__setattr__(self, "horizon", Horizon(buckets, config.bucket_iterations))

    @property
    def kernel(self) -> Kernel:
        """Where every prompt is computed elsewhere, requests only decode."""
        decoders = self.fleet.decoders
        return Kernel.DECODE_ONLY if 0 < decoders == len(self.fleet) else self.config.kernel

    def _discounts(self, now_s: float) -> FloatArray | None:
        if not self.tenants.active:
            return None
        return self.tenants.discounts(self.waiting.tenants, now_s)

    def view(self, now_s: float, arrivals_per_s: float, *, with_cached: bool = True) -> View:
        """What there is to decide about now; prices do not ask what is cached."""
        fleet, kernel = self.fleet, self.kernel
        workers = len(fleet)
        step_s, prompt_s = self.ledger.pace(fleet)
        lead = self.handoff.lead(now_s, self.config.bucket_iterations)

        def frame(horizon: Horizon, offset: float) -> Frame:
            return Frame(
                horizon=horizon,
                offset=offset,
                block_tokens=fleet.array("block_tokens"),
                lead=lead,
                kernel=kernel,
            )

        def occupancy(horizon: Horizon, offset: float, workers: IntArray | None) -> Usage:
            return self.ledger.occupancy(fleet, now_s, frame(horizon, offset), workers)

        def free(horizon: Horizon, offset: float, workers: IntArray | None) -> Usage:
            limits = fleet.batch_limit(now_s), fleet.array("kv_capacity_tokens")
            return self.ledger.free(fleet, now_s, frame(horizon, offset), limits, workers)

        def frozen_occupancy(horizon: Horizon, offset: float) -> Callable[[], Usage]:
            return self.ledger.frozen_occupancy(fleet, now_s, frame(horizon, offset))

        def kv_ceiling_tokens(worker: int, spare_tokens: float) -> float:
            own_tokens = self.ledger.kv_ceiling_tokens(worker, spare_tokens)
            return own_tokens + fleet.workers[worker].foreign_kv

        return View(
            now_s=now_s,
            kernel=kernel,
            horizon=self.horizon,
            waiting=self.waiting.arrays(
                fleet,
                self._discounts(now_s),
                prefill_open=bool(fleet.decoders) and self.handoff.is_open(now_s),
            ),
            fleet=FleetView(
                worker_ids=fleet.worker_ids,
                batch_limit=fleet.batch_limit(now_s),
                kv_capacity_tokens=fleet.array("kv_capacity_tokens"),
                block_tokens=fleet.array("block_tokens"),
                iteration_s=fleet.array("iteration_s"),
                step_s=step_s,
                prompt_s=prompt_s,
                ahead_tokens=self.ledger.ahead_tokens(workers),
                outstanding=self.ledger.outstanding(fleet),
                engine_queue_empty=fleet.engine_queue_empty(now_s),
                lead=lead,
            ),
            occupancy=occupancy,
            free=free,
            frozen_occupancy=frozen_occupancy,
            kv_ceiling_tokens=kv_ceiling_tokens,
            left_steps=self.ledger.left_steps,
            usual_left_steps=self.ledger.usual_left_steps(),
            arrivals_per_s=arrivals_per_s,
            cached=self.waiting.cached() if with_cached else None,
        )


def checked(pairs: list[Pair], view: View) -> list[Pair]:
    """Starts that can all be booked, or none: half-booked starts would lose requests.

    Raises:
        ValueError: a policy named a request twice, or a pair that does not exist.
    """
    rows = [row for row, _ in pairs]
    if len(set(rows)) != len(rows):
        raise ValueError("a policy started one request twice")
    waiting, workers = len(view.waiting), len(view.fleet)
    for row, worker in pairs:
        if not (0 <= row < waiting and 0 <= worker < workers):
            raise ValueError(f"a policy started request {row} on worker {worker}: no such pair")
    return pairs
