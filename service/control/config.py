"""3 controller, settings: every knob of the decision, with units. Built by the shell, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Self


class Choice(StrEnum):
    """Names to choose from; dashes will do for the underscores, as the command's help has them."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        name = value.replace("-", "_") if isinstance(value, str) else None
        return next((choice for choice in cls if choice.value == name), None)


OTHER = "other"
"""Under this name tenants without a weight of their own are shown together."""


class PolicyName(Choice):
    """The decision rules that can stand behind the router."""

    ONLINE_LP = "online_lp"
    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    CENTRAL_FCFS = "central_fcfs"
    CENTRAL_SHORTEST_FIRST = "central_shortest_first"


class Variant(Choice):
    """Which online LP stands behind `online_lp`.

    PUBLISHED is the paper to the letter. FORWARD re-times the history as hypothetical future
    arrivals, so that a price is an opportunity cost, and bounds the wait of every request.
    """

    PUBLISHED = "published"
    FORWARD = "forward"


class Kernel(Choice):
    """KV use of a request over its service steps: [OLP] eq. (1) or appendix A."""

    DECODE_ONLY = "decode_only"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The six reward weights of [OLP] 3.1 and the two tail bounds they refer to.

    Attributes:
        throughput: alpha, per decode token produced inside the horizon.
        e2e: beta, per iteration of end-to-end latency saved.
        ttft: gamma, per iteration of time to first token saved.
        queries: sigma, per request served.
        tail_e2e: zeta_1, per request that can still end within e2e_bound_s.
        tail_ttft: zeta_2, per request that can still start within ttft_bound_s.
        e2e_bound_s: t_1', seconds.
        ttft_bound_s: t_2', seconds.
    """

    throughput: float = 0.0
    e2e: float = 1.0
    ttft: float = 1.0
    queries: float = 0.0
    tail_e2e: float = 0.0
    tail_ttft: float = 0.0
    e2e_bound_s: float = 30.0
    ttft_bound_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse negative weights and bounds that are not positive."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not value >= 0 or (spec.name.endswith("_s") and value == 0):
                raise ValueError(f"weights.{spec.name} must not be negative, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceConfig:
    """Algorithm 2 and its history ([OLP] 3.3, B.2, B.3).

    Attributes:
        variant: the paper's method or ours.
        steps: K, projected subgradient steps per refresh.
        batch: columns in a mini-batch.
        step_size: eta, in units of normalised reward per normalised resource.
        history_max: recorded columns kept; the oldest are overwritten.
        reward_normalizer: rewards are divided by this and capped at 1; 0 picks the largest reward
            a request can have at the current horizon, so that rewards never saturate.
        refresh_s: shortest time between two refreshes.
        inline: refresh inside the decision, as Algorithm 1 says, instead of in the background.
        averaged: use the mean of a refresh's iterates instead of the last one.
        zero: force every price to zero (the ablation).
    """

    variant: Variant = Variant.FORWARD
    steps: int = 5
    batch: int = 64
    step_size: float = 0.05
    history_max: int = 2048
    reward_normalizer: float = 0.0
    refresh_s: float = 0.1
    inline: bool = False
    averaged: bool = False
    zero: bool = False

    def __post_init__(self) -> None:
        """Refuse a learner that cannot learn."""
        _require(self, at_least_1=("steps", "batch", "history_max"))
        _require(self, not_negative=("step_size", "reward_normalizer", "refresh_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConfig:
    """When the arrival rate counts as changed ([OLP] B.2, non-stationary load).

    A change makes the measured rate forget what came before it; a rise also drops the recorded
    columns of before, from which prices are learned.

    Attributes:
        significance: chance that a window of steady traffic is taken for a change, spent over all
            looks in it; 0 never looks. Bursts are allowed for by their measured dispersion.
        window_s: the longest recent stretch that is compared with what came before; the test looks
            128 times in it. Slower changes are followed by the moving average alone.
    """

    significance: float = 0.01
    window_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what is no probability and no time."""
        if not 0 <= self.significance < 1:
            raise ValueError(f"significance must be in [0, 1), got {self.significance}")
        if not 0 < self.window_s < float("inf"):
            raise ValueError(f"window_s must be positive, got {self.window_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """Prefill workers and what passes from them to decode workers; without them it says nothing.

    Attributes:
        prefill_tokens_max: a prefill worker gets no further prompt while so many tokens are sent to
            it and not answered; one engine batch (vLLM: --max-num-batched-tokens) keeps it busy.
        prefill_tokens_per_s: first guess of how fast a worker computes prompts, replaced by
            measurement: of prefill workers, and of all others for affinity.
        lease_s: how long a prefill worker keeps KV memory that nobody fetches (vLLM's NIXL
            connector: kv_lease_duration, 30 s); it is charged to the worker for as long.
        transfer_s: how long KV memory stays charged to the prefill worker after its hand-over when
            the request does not stream, as its first token cannot be seen.
        lead_max_s: how far ahead of a prefill's end a decode slot may still be in use by a request
            that is predicted to have ended by then; 0 sets the slot aside when the prefill starts.
        hold_s: 0 queues requests before their prefill. Above 0 they are prefilled as soon as a
            prefill worker has room and queue after it, as in the paper, each for so long at most;
            then its prefill is done again, with a decode slot set aside. Must be below lease_s.
    """

    prefill_tokens_max: int = 8192
    prefill_tokens_per_s: float = 10_000.0
    lease_s: float = 30.0
    transfer_s: float = 1.0
    lead_max_s: float = 1.0
    hold_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes and times that are none, and a hold that outlives the memory."""
        _require(self, at_least_1=("prefill_tokens_max",))
        _require(self, not_negative=("transfer_s", "lead_max_s", "hold_s"))
        if not self.prefill_tokens_per_s > 0:
            given = self.prefill_tokens_per_s
            raise ValueError(f"prefill_tokens_per_s must be positive, got {given}")
        if not self.hold_s < self.lease_s:
            raise ValueError(f"hold_s must be below lease_s, got {self.hold_s} and {self.lease_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """How tenants share what is scarce; only online_lp's forward variant does it.

    A tenant is what a request says it is, so nothing is shared by tenant until weights say so.

    Attributes:
        weights: shares at scarcity, as alice=3,bob=1,*=1; * is every other tenant, each by itself.
            Left empty, tenants make no difference and only values and lengths order requests.
        memory_s: use is forgotten by a factor e in this time: a tenant that was over its share
            has it back about so much later.
        tracked_max: tenants counted one by one; the rest share one account.
    """

    weights: str = ""
    memory_s: float = 60.0
    tracked_max: int = 256

    def __post_init__(self) -> None:
        """Refuse weights that are none."""
        _require(self, at_least_1=("tracked_max",))
        if not 0 < self.memory_s < float("inf"):
            raise ValueError(f"memory_s must be positive, got {self.memory_s}")
        if len(self.parsed()) > self.tracked_max:
            raise ValueError("weights names more tenants than tracked_max")

    def parsed(self) -> dict[str, float]:
        """The weights by name.

        Raises:
            ValueError: not NAME=WEIGHT with a positive weight, or a name twice.
        """
        found: dict[str, float] = {}
        for part in filter(None, self.weights.split(",")):
            name, equals, text = part.strip().rpartition("=")
            try:
                weight = float(text)
            except ValueError:
                weight = 0.0
            if not equals or not 0 < weight < float("inf") or name in (OTHER, *found):
                raise ValueError(
                    f"weights must be NAME=WEIGHT,... with positive weights, each name once and "
                    f"none of them {OTHER}, "
                    f"got {part.strip()!r}"
                )
            found[name] = weight
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityConfig:
    """What prompt tokens in a worker's prefix cache are worth; only for the forward variant.

    Traffic whose prompts have no beginning in common is decided alike with it and without.

    Attributes:
        weight: multiplies the cached tokens, no further than to the whole prompt: 1 counts the time
            that is really saved; 0 switches affinity off.
        crowding: how much longer an iteration of a full batch takes than one of an almost empty
            batch, as a share; 0.3 is Llama-3-8B on an A100 with 32 sequences. Larger spreads hot
            prefixes wider.
    """

    weight: float = 1.0
    crowding: float = 0.3

    def __post_init__(self) -> None:
        """Refuse rewards that are fines."""
        _require(self, not_negative=("weight", "crowding"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Everything the router needs to know before the first event.

    Attributes:
        policy: the decision rule.
        kernel: how KV use grows over a request's life; where every worker that decodes is a decode
            worker it is decode_only.
        weights: the operator's trade-off.
        prices: the price learner.
        rate: the watch over the arrival rate.
        handoff: prefill workers, where there are any.
        tenants: shares between tenants.
        affinity: reward for prompts that a worker holds already.
        horizon_iterations: H, look-ahead in decode iterations.
        bucket_iterations: q, iterations per bucket of the look-ahead.
        fixed_horizon: T is a wall, horizon_iterations after the first tick, as in the paper's
            experiments; otherwise the look-ahead rolls, T = k + H - 1. Only for PUBLISHED.
        age_bound_s: a request that waited this long goes first, oldest first; 0 switches it off.
        age_factor: online_lp's forward variant lets a request go first after this many times the
            wait that first come first served would have given at most, of late, to all but twice
            the share that age_share leaves; smaller spares the tail, larger the mean; 0 leaves
            age_bound_s alone.
        age_floor_s: that relative bound is never shorter than this.
        age_share: share of the recent requests that this relative bound protects; of those that
            reach it, the ones with the most work are left out.
        age_stretch: those left out wait this many times as long.
        age_memory_s: how long the waits and the number of recent requests are remembered, at least;
            at most twice as long.
        queue_max: most requests that may wait.
        displace: a full queue refuses the newest of those in its lowest tier of value instead of a
            newcomer of a higher one, as online_lp starts the higher one first in any case; off
            refuses the newcomer whoever it is, as the plain policies do.
        max_wait_s: longest wait of a request in the central queue.
        no_worker_hold_s: how long a request waits for any worker to come up.
        slow_start_s: a worker that comes up while others serve gets its batch slots one after the
            other over this time: it is cold, and may fail again; 0 switches it off.
        decode_tokens_default: forecast for a request about which nothing is known.
        decode_quantile: what a request is expected to use: 0 the mean of its length distribution,
            else this quantile of it, as a margin against preemption; hints are taken as they are
            with 0, else stretched by that quantile of how wrong hints were.
        seed: of every random choice.
    """

    policy: PolicyName = PolicyName.ONLINE_LP
    kernel: Kernel = Kernel.MIXED
    weights: Weights = field(default_factory=Weights)
    prices: PriceConfig = field(default_factory=PriceConfig)
    rate: RateConfig = field(default_factory=RateConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    tenants: TenantConfig = field(default_factory=TenantConfig)
    affinity: AffinityConfig = field(default_factory=AffinityConfig)
    horizon_iterations: int = 4096
    bucket_iterations: int = 16
    fixed_horizon: bool = False
    age_bound_s: float = 60.0
    age_factor: float = 1.05
    age_floor_s: float = 0.1
    age_share: float = 0.9905
    age_stretch: float = 5.0
    age_memory_s: float = 60.0
    queue_max: int = 10_000
    displace: bool = True
    max_wait_s: float = 120.0
    no_worker_hold_s: float = 5.0
    slow_start_s: float = 5.0
    decode_tokens_default: int = 256
    decode_quantile: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes and times that are none."""
        _require(
            self,
            at_least_1=(
                "horizon_iterations",
                "bucket_iterations",
                "queue_max",
                "decode_tokens_default",
            ),
        )
        _require(
            self,
            not_negative=(
                "age_bound_s",
                "age_factor",
                "age_floor_s",
                "max_wait_s",
                "no_worker_hold_s",
                "slow_start_s",
                "seed",
            ),
        )
        if not 0 < self.age_share <= 1:
            raise ValueError(f"age_share must be above 0 and at most 1, got {self.age_share}")
        if not self.age_stretch >= 1:
            raise ValueError(f"age_stretch must be at least 1, got {self.age_stretch}")
        if not 0 <= self.decode_quantile < 1:
            raise ValueError(f"decode_quantile must be in [0, 1), got {self.decode_quantile}")
        if self.age_memory_s <= 0:
            raise ValueError(f"age_memory_s must be positive, got {self.age_memory_s}")
        if self.bucket_iterations > self.horizon_iterations:
            raise ValueError("bucket_iterations must not exceed horizon_iterations")


FIXED_AT_START = (
    "kernel",
    "horizon_iterations",
    "bucket_iterations",
    "fixed_horizon",
    "decode_tokens_default",
    "seed",
)
"""What the ledger, the look-ahead and the forecasts are built on."""
NOT_THE_POLICYS = ("queue_max", "displace", "max_wait_s", "no_worker_hold_s", "slow_start_s")


def taken_live(old: ControlConfig, new: ControlConfig) -> tuple[ControlConfig, bool]:
    """New settings for a router that lives, and whether its policy can go on as it is.

    What is fixed at the start stays. A policy with other settings begins anew: its prices were
    learned in units of the old reward.
    """
    taken = replace(new, **{name: getattr(old, name) for name in FIXED_AT_START})
    alike = replace(taken, **{name: getattr(old, name) for name in NOT_THE_POLICYS}) == old
    return taken, alike


def _require(
    config: PriceConfig | HandoffConfig | ControlConfig | TenantConfig | AffinityConfig,
    at_least_1: tuple[str, ...] = (),
    not_negative: tuple[str, ...] = (),
) -> None:
    for name in at_least_1:
        if not getattr(config, name) >= 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
    for name in not_negative:
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} must not be negative, got {getattr(config, name)}")
