"""3 controller, what can be looked at from outside without touching: counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.control.events import Outcome, Refusal, Role, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the ledger sees it now.

    Attributes:
        role: decode, or both.
        active: sequences of our own started requests. foreign: those of others, as reported.
        kv_tokens: held by our own. kv_capacity_tokens: None while unknown.
        startable: up, a batch slot free, and no request known to wait inside the engine.
        iteration_s: as told. token_s: what a batch slot was seen to take for a token.
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
    token_s: float
    startable: bool
    price_batch: float
    price_kv: float
    role: Role = Role.BOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStats:
    """One prefill worker as its account stands now.

    Attributes:
        legs: prompts sent and not answered. leg_tokens: theirs.
        kv_tokens: memory charged to it, in whole blocks. orphaned_kv_tokens: of these, what nobody
            will fetch and its engine keeps until the lease ends. kv_capacity_tokens: None while
            unknown.
        tokens_per_s: speed as learned.
    """

    worker_id: str
    state: WorkerState
    legs: int
    leg_tokens: int
    kv_tokens: int
    orphaned_kv_tokens: int
    kv_capacity_tokens: int | None
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """A tenant with a weight of its own; all others are one.

    Attributes:
        tenant: its name.
        waiting: requests.
        decode_tokens: served so far.
        share: of all recent use, 0 to 1.
        discount: what its rewards are multiplied by now; 1 is no more than its share.
    """

    tenant: str
    waiting: int
    decode_tokens: int
    share: float
    discount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityStats:
    """Prefix caches as guessed and as the engines count; by worker where a dict.

    Attributes:
        prompt_tokens: of started prompts that have a prefix to be known by, since the start.
        hit_tokens: of these, guessed to be cached where they were started.
        hit_tokens_unswayed: guessed to be cached where they would have gone without the reward.
        held_tokens: prompt tokens guessed to be in the cache.
        queries, hits: prompt tokens that the engine looked up and found, since it joined.
        observed, guessed: hit rates of late, the engine's and ours before correction.
        correction: what guesses are multiplied by.
        prefill_tokens_per_s: prompt tokens that a worker computes in a second, as learned.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_unswayed: int = 0
    held_tokens: dict[str, int] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    observed: dict[str, float] = field(default_factory=dict)
    guessed: dict[str, float] = field(default_factory=dict)
    correction: dict[str, float] = field(default_factory=dict)
    prefill_tokens_per_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    """Counters since start and the state now; entered == waiting + running + ended + refused.

    Attributes:
        returns: starts that a worker did not take. fallback_ticks: decided first come first served
            because the policy failed; last_fault says how.
        prices_dropped: solutions that were not finite or came for another fleet.
        rate_rises, rate_falls: changes of the arrival rate that were noticed.
        prefills: prompts sent to a prefill worker. holds_passed: of those held between the legs,
            how many waited longer than hold_s. whole_on_decode: requests that cannot be split and
            went to a decode worker, which computes their prompt.
        price_age_s: of the prices in use; None while there are none yet.
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
    price_age_s: float | None
    arrivals_per_s: float
    prefills: int
    holds_passed: int
    whole_on_decode: int
    tenants: tuple[TenantStats, ...] = ()
    rate_rises: int = 0
    rate_falls: int = 0
    workers: tuple[WorkerStats, ...] = field(default=())
    prefillers: tuple[PrefillStats, ...] = field(default=())
    affinity: AffinityStats = field(default_factory=AffinityStats)


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
    prefills: int = 0
    holds_passed: int = 0
    whole_on_decode: int = 0
    ended: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
