"""What decides in an experiment: the router under some settings, or a yardstick beside it.

The four heuristics of the paper, the strong baselines that every table shows, and the paper's
policy and ours under given weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from loadgen.cache_aware import CacheRule
from service.control.config import (
    AffinityConfig,
    ControlConfig,
    PolicyName,
    PriceConfig,
    Variant,
    Weights,
)

BUCKET_ITERATIONS = 10
"""Of the linear program that bounds every policy (hindsight_lp.py)."""
ROUND_ROBIN = "round_robin"
PUBLISHED = "online_lp published"
ZERO_PRICES = "published, zero prices"
FORWARD = "online_lp forward (shipped)"
SHORTEST_FIRST = "central_shortest_first"
FIRST_COME = "central_fcfs"
AFFINITY_OFF = "online_lp, affinity off"
HINDSIGHT = "hindsight bound (LP)"
OFFLINE = "best offline schedule"

PUBLISHED_STEPS, PUBLISHED_STEP = 1, 0.0025
"""K and eta of the paper's policy, which the paper does not give: the best in price_step.py."""
LARGE_ALPHA, LARGE_ALPHA_STEP = 0.03, 0.00025
"""From this throughput weight on normalised rewards are small, and a smaller step is better."""
BLIND = frozenset(
    {
        PolicyName.ROUND_ROBIN,
        PolicyName.LEAST_OUTSTANDING,
        PolicyName.RANDOM,
        PolicyName.POWER_OF_TWO,
    }
)
"""Policies that do not look at predicted lengths."""


class Kind(StrEnum):
    """What stands behind a rule."""

    ROUTER = "router"
    TRUE_JSQ = "true_jsq"
    CACHE_AWARE = "cache_aware"
    RESERVE = "reserve"
    HINDSIGHT = "hindsight"
    REWARD_BOUND = "reward_bound"
    OFFLINE = "offline"


class Lengths(StrEnum):
    """How much the router learns of the lengths of requests without a hint."""

    SHIPPED = "shipped"
    POOLED = "pooled"
    UNLEARNT = "unlearnt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to decide.

    Attributes:
        label: what tables call it.
        control: the router's settings; the seed of the case replaces its seed.
        kind: the router itself or a yardstick.
        reserve_slots: batch slots of the fleet kept free for the first tier, for RESERVE.
        lengths: which predictor the router has.
        bucket_iterations: coarseness of REWARD_BOUND.
        cache: thresholds of CACHE_AWARE.
    """

    label: str
    control: ControlConfig
    kind: Kind = Kind.ROUTER
    reserve_slots: int = 0
    lengths: Lengths = Lengths.SHIPPED
    bucket_iterations: int = BUCKET_ITERATIONS
    cache: CacheRule = field(default_factory=CacheRule)

    @property
    def blind(self) -> bool:
        """Whether predicted lengths make no difference to it."""
        if self.kind in (Kind.ROUTER, Kind.RESERVE):
            return self.kind is Kind.ROUTER and self.control.policy in BLIND
        return True


def published_step(weights: Weights) -> float:
    """The step size that serves the paper's policy best under these weights."""
    return LARGE_ALPHA_STEP if weights.throughput >= LARGE_ALPHA else PUBLISHED_STEP


@dataclass(frozen=True, slots=True)
class RuleBook:
    """Rules that share the settings of one experiment.

    Attributes:
        base: kernel, bounds and look-ahead of every rule; its weights are the shipped ones.
    """

    base: ControlConfig

    def plain(self, policy: PolicyName, label: str = "") -> Rule:
        """A policy without weights."""
        return Rule(label=label or policy.value, control=replace(self.base, policy=policy))

    def heuristics(self) -> list[Rule]:
        """The four baselines of the paper, round robin first."""
        names = (
            PolicyName.ROUND_ROBIN,
            PolicyName.RANDOM,
            PolicyName.LEAST_OUTSTANDING,
            PolicyName.POWER_OF_TWO,
        )
        return [self.plain(name) for name in names]

    def first_come(self) -> Rule:
        """One queue, first come first served, released when startable."""
        return self.plain(PolicyName.CENTRAL_FCFS)

    def shortest_first(self, age_bound_s: float | None = None) -> Rule:
        """One queue, shortest predicted decode first, with an age guard."""
        rule = self.plain(PolicyName.CENTRAL_SHORTEST_FIRST)
        if age_bound_s is None:
            return rule
        control = replace(rule.control, age_bound_s=age_bound_s)
        return replace(rule, label=f"{SHORTEST_FIRST}, age {age_bound_s:g} s", control=control)

    def published(self, weights: Weights | None = None, label: str = PUBLISHED) -> Rule:
        """The paper's policy to the letter: prices refreshed inside every period."""
        prices = PriceConfig(
            variant=Variant.PUBLISHED,
            inline=True,
            steps=PUBLISHED_STEPS,
            step_size=published_step(self.base.weights if weights is None else weights),
        )
        return self._priced(label, weights, prices)

    def zero_prices(self, weights: Weights | None = None) -> Rule:
        """The paper's policy with every price forced to zero."""
        prices = PriceConfig(variant=Variant.PUBLISHED, zero=True)
        return self._priced(ZERO_PRICES, weights, prices)

    def forward(self, weights: Weights | None = None, label: str = FORWARD) -> Rule:
        """The shipped variant."""
        return self._priced(label, weights, self.base.prices)

    def without_affinity(self) -> Rule:
        """The shipped variant, blind for what workers hold of a prompt."""
        off = replace(self.base, affinity=AffinityConfig(weight=0.0))
        return RuleBook(off).forward(label=AFFINITY_OFF)

    def cache_aware(self, cache: CacheRule, label: str) -> Rule:
        """A cache-aware router of others."""
        return Rule(label=label, control=self.base, kind=Kind.CACHE_AWARE, cache=cache)

    def true_jsq(self) -> Rule:
        """Join the shortest queue, with true lengths."""
        return Rule(label="true_jsq (true lengths)", control=self.base, kind=Kind.TRUE_JSQ)

    def hindsight(self) -> Rule:
        """What no policy can beat: all arrivals known beforehand."""
        return Rule(label=HINDSIGHT, control=self.base, kind=Kind.HINDSIGHT)

    def reward_bound(self, bucket_iterations: int = BUCKET_ITERATIONS) -> Rule:
        """What no policy can beat, in reward and in mean TTFT."""
        return Rule(
            label=HINDSIGHT,
            control=self.base,
            kind=Kind.REWARD_BOUND,
            bucket_iterations=bucket_iterations,
        )

    def offline(self) -> Rule:
        """The best schedule that there is, of a small instance."""
        return Rule(label=OFFLINE, control=self.base, kind=Kind.OFFLINE)

    def reserve(self, slots: int, order: PolicyName = PolicyName.CENTRAL_SHORTEST_FIRST) -> Rule:
        """Strict priority of the first tier, and this many slots kept free for it."""
        in_turn = " in turn" if order is PolicyName.CENTRAL_FCFS else ""
        return Rule(
            label=f"priority{in_turn}, reserve {slots}",
            control=replace(self.base, policy=order),
            kind=Kind.RESERVE,
            reserve_slots=slots,
        )

    def strong(self, weights: Weights | None = None) -> list[Rule]:
        """The rules that must stand beside the paper's baselines in every table."""
        return [
            self.first_come(),
            self.shortest_first(),
            self.zero_prices(weights),
            self.published(weights),
            self.forward(weights),
        ]

    def _priced(self, label: str, weights: Weights | None, prices: PriceConfig) -> Rule:
        control = replace(
            self.base,
            policy=PolicyName.ONLINE_LP,
            weights=self.base.weights if weights is None else weights,
            prices=prices,
        )
        return Rule(label=label, control=control)
