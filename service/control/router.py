"""3 controller: the sans-I/O state machine. Events in, commands out, time as a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.control.events import Command, Event, Outcome, Refusal, WorkerState

if TYPE_CHECKING:
    from service.control.config import ControlConfig
    from service.control.prices import PriceProblem, PriceSolution


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the ledger sees it now."""

    worker_id: str
    state: WorkerState
    batch_limit: int
    active: int
    foreign: int
    kv_tokens: int
    kv_capacity_tokens: int | None
    iteration_s: float
    startable: bool
    price_batch: float
    price_kv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    """Counters since start and the state now; entered == waiting + running + all ends."""

    entered: int
    waiting: int
    running: int
    oldest_wait_s: float
    ended: dict[Outcome, int]
    refused: dict[Refusal, int]
    starts: int
    ticks: int
    fallback_ticks: int
    price_refreshes: int
    price_age_s: float
    workers: tuple[WorkerStats, ...] = field(default=())


class Router:
    """Holds every waiting and started request; decides which waiting request starts where."""

    def __init__(self, config: ControlConfig) -> None:
        raise NotImplementedError

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Book one event; answers only refusals that need no decision (queue full, too large)."""
        raise NotImplementedError

    def tick(self, now_s: float) -> list[Command]:
        """Decide: starts and refusals, in the order they must be carried out."""
        raise NotImplementedError

    def next_tick_s(self, now_s: float) -> float | None:
        """When the next timer tick is wanted; None while only an event can change anything."""
        raise NotImplementedError

    def price_problem(self, now_s: float) -> PriceProblem | None:
        """Return an immutable snapshot to solve, when a price refresh is due; else None."""
        raise NotImplementedError

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """Take new prices; ones that are not finite are dropped and counted."""
        raise NotImplementedError

    def stats(self, now_s: float) -> RouterStats:
        """Counters and gauges for metrics and tests."""
        raise NotImplementedError
