"""3 controller, what can be looked at from outside without touching: counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.control.events import Outcome, Refusal, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the ledger sees it now.

    Attributes:
        active: sequences of our own started requests. foreign: those of others, as reported.
        kv_tokens: held by our own. kv_capacity_tokens: None while unknown.
        startable: up, a batch slot free, and no request known to wait inside the engine.
        price_batch: reward per batch slot and iteration. price_kv: per KV token and iteration.
    """

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
    """Counters since start and the state now; entered == waiting + running + ended + refused.

    Attributes:
        returns: starts that a worker did not take. fallback_ticks: decided first come first served
            because the policy failed; last_fault says how.
        prices_dropped: solutions that were not finite or came for another fleet.
        rate_rises, rate_falls: changes of the arrival rate that were noticed.
    """

    entered: int
    waiting: int
    running: int
    oldest_wait_s: float
    ended: dict[Outcome, int]
    refused: dict[Refusal, int]
    starts: int
    returns: int
    ticks: int
    fallback_ticks: int
    last_fault: str
    price_refreshes: int
    prices_dropped: int
    price_age_s: float
    arrivals_per_s: float
    rate_rises: int = 0
    rate_falls: int = 0
    workers: tuple[WorkerStats, ...] = field(default=())


@dataclass(slots=True)
class Counters:
    """The mutable half of RouterStats, owned by the router."""

    entered: int = 0
    starts: int = 0
    returns: int = 0
    ticks: int = 0
    fallback_ticks: int = 0
    last_fault: str = ""
    price_refreshes: int = 0
    prices_dropped: int = 0
    ended: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
