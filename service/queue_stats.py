"""2 central queue, its settings and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.control.events import Role, WorkerState

if TYPE_CHECKING:
    from service.control.stats import RouterStats


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How the queue drives the router.

    Attributes:
        tick_share_max: most of the event loop's time that ticks may take, in (0, 1]; a tick that
            comes too soon after a long one waits.
        tick_late_s: a decision that takes longer than this is late.
        late_ticks_max: late decisions in a row after which requests start first come first
            served; the policy is tried again after late_pause_s.
        late_pause_s: for how long that lasts.
    """

    tick_share_max: float = 0.5
    tick_late_s: float = 0.25
    late_ticks_max: int = 3
    late_pause_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse a share or bounds that are none."""
        if not 0 < self.tick_share_max <= 1:
            raise ValueError(f"tick_share_max must be in (0, 1], got {self.tick_share_max}")
        if not (self.tick_late_s > 0 and self.late_pause_s > 0 and self.late_ticks_max >= 1):
            raise ValueError(
                "tick_late_s and late_pause_s must be positive, late_ticks_max at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The queue and its router now.

    Attributes:
        router: counters and gauges of the router, its view only.
        refused_at_door: requests turned away without entering the router (draining).
        tick_errors: ticks that raised.
        event_errors: events the router raised on.
        late_ticks: decisions of the policy that took too long.
        ticking: whether the last tick went well.
        falling_back: whether requests start first come first served, as the policy fails or is
            too slow.
        draining: whether new requests are turned away.
        held: requests inside `place` now.
    """

    router: RouterStats
    refused_at_door: int
    tick_errors: int
    event_errors: int
    late_ticks: int
    ticking: bool
    falling_back: bool
    draining: bool
    held: int

    @property
    def imbalance(self) -> int:
        """Entered minus waiting, running and ended: zero, or a request was lost or ended twice."""
        router = self.router
        ended = sum(router.ended.values()) + sum(router.refused.values())
        return router.entered - router.waiting - router.running - ended

    @property
    def usable_workers(self) -> int:
        """Workers that are up, prefill workers not counted."""
        return sum(worker.state is WorkerState.UP for worker in self.router.workers)

    @property
    def lacks_prefill(self) -> bool:
        """Whether all workers that are up need a prefill worker, and none of these is up."""
        up = [worker for worker in self.router.workers if worker.state is WorkerState.UP]
        return all(worker.role is Role.DECODE for worker in up) and not any(
            worker.state is WorkerState.UP for worker in self.router.prefillers
        )
