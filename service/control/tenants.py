"""3 controller, tenants: who used more than its share, and what that does to its prices.

A tenant over its share pays a multiple of every price, which is the same as a reward that many
times smaller. Only order changes: what fits is started, so nobody is slowed down while nothing is
scarce, and a tenant that is alone may use everything.
"""

from __future__ import annotations

import numpy as np

from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.config import OTHER, TenantConfig
from service.control.fleet_state import FleetState
from service.control.stats import TenantStats
from service.control.waiting import Entry

STEEPNESS = 32.0
"""Prices rise by a factor e for every 1 / STEEPNESS by which a tenant exceeds its share."""
EXPONENT_MAX = 60.0
FORGOTTEN = 1e-3
"""A tenant with less than this part of all use may be forgotten for a new one."""
CREDIT = 0.25
"""Share of what the least served of those waiting had that a newcomer may be behind: it catches up
on so much, not on everything that others used while it was away."""


class Tenants:
    """Weighted recent use by tenant; bounded memory.

    Use is counted in batch slots x iterations, or in the same share of KV memory where that is
    more (the dominant resource). A start is charged by its forecast at once, and corrected when it
    ends. Use fades by a factor e every memory_s.
    """

    def __init__(self, config: TenantConfig) -> None:
        named = config.parsed()
        default = named.pop("*", 1.0)
        self._config = config
        self.active = bool(config.weights)
        self._memory_s = config.memory_s
        self._named = frozenset(named)
        self._size = 1 + max(config.tracked_max, len(named))
        self._index = {name: 1 + place for place, name in enumerate(named)}
        self._weight = np.full(self._size, default)
        self._weight[1 : 1 + len(named)] = list(named.values())
        self._use = np.zeros(self._size)
        self._tokens = np.zeros(self._size, dtype=np.int64)
        self._faded_s = 0.0

    def reconfigure(self, config: TenantConfig, waiting: list[Entry], places: IntArray) -> None:
        """Take other weights, or another memory; use up to now stays, and counts for them.

        Places do not move, as started requests know theirs; tracked_max is the first one's.

        Args:
            config: the new settings.
            waiting: who waits, in order.
            places: (n,) where their tenants are counted; changed where they had no place of theirs.
        """
        if config == self._config:
            return
        self._config, self._memory_s = config, config.memory_s
        self.active = bool(config.weights)
        weights = config.parsed()
        default = weights.pop("*", 1.0)
        before, self._named = self._named, frozenset(weights)
        # No counter falls or jumps because a tenant is shown under another name from now on.
        self._tokens[[self._index[name] for name in before - self._named]] = 0
        held = np.bincount(places, minlength=self._size) > 0
        for name in weights:
            if not self._find(name, held):
                held = self._grow(name, held)
        self._weight = np.full(self._size, default)
        self._weight[[self._index[name] for name in weights]] = list(weights.values())
        risen = [self._index[name] for name in self._named - before]
        self._tokens[0] += self._tokens[risen].sum()
        self._tokens[risen] = 0
        for row, entry in enumerate(waiting) if self.active else ():
            if not entry.tenant:
                entry.tenant = places[row] = self._find(entry.request.tenant, held)
                held[entry.tenant] = True

    def place(self, entry: Entry, waiting: IntArray, now_s: float) -> None:
        """A request begins to wait; so do others, whose tenants are counted at (n,) places."""
        if not self.active:
            return
        others = np.bincount(waiting, minlength=self._size) > 0
        at = entry.tenant = self._find(entry.request.tenant, others)
        if others.any() and not others[at]:
            self._fade(now_s)
            least = float((self._use[others] / self._weight[others]).min())
            floor = (1.0 - CREDIT) * least * float(self._weight[at])
            self._use[at] = max(self._use[at], floor)

    def start(self, entry: Entry, fleet: FleetState, now_s: float) -> None:
        """A waiting request starts: it is charged for all that it is expected to use."""
        if not self.active:
            # What was not charged is not given back either, should weights be set meanwhile.
            entry.slot_share = 0.0
            return
        self._fade(now_s)
        entry.slot_share = _slot_share(entry, fleet)
        self._charge(entry, entry.decode_tokens)

    def end(self, entry: Entry, decode_tokens: int, now_s: float) -> None:
        """A started request ended after so many tokens of each sequence."""
        if not self.active:
            return
        self._fade(now_s)
        self._tokens[entry.tenant] += entry.sequences * decode_tokens
        self._charge(entry, decode_tokens - entry.decode_tokens)

    def discounts(self, tenant: IntArray, now_s: float) -> FloatArray:
        """(n,) what the rewards, and the ages, of waiting requests are multiplied by.

        exp(-STEEPNESS x over) where over is how far a tenant's part of the weighted use of those
        who wait exceeds an equal part, relative to it.

        Args:
            tenant: (n,) places of the requests' tenants.
            now_s: the tick's time.
        """
        if not self.active:
            return np.ones(tenant.size)
        self._fade(now_s)
        waiting = np.bincount(tenant, minlength=self._size) > 0
        return np.asarray(self._discount(waiting)[tenant])

    def discounts_with(
        self, tenant: IntArray, newcomer: str, now_s: float
    ) -> tuple[FloatArray, float] | None:
        """The same with one more request waiting, and its own; None where there is no difference.

        Args:
            tenant: (n,) places of the tenants of those who wait.
            newcomer: the tenant of who would wait too.
            now_s: the time.
        """
        if not self.active:
            return None
        self._fade(now_s)
        waiting = np.bincount(tenant, minlength=self._size) > 0
        at = self._index.get(newcomer, 0)
        waiting[at] = True
        discount = self._discount(waiting)
        return np.asarray(discount[tenant]), float(discount[at])

    def stats(self, tenant: IntArray) -> tuple[TenantStats, ...]:
        """Tenants with a weight of their own, and all others as one."""
        if not self.active:
            return ()
        total = max(float(self._use.sum()), 1e-9)
        waiting = np.bincount(tenant, minlength=self._size)
        discount = self._discount(waiting > 0)
        rest = [0, *(at for name, at in self._index.items() if name not in self._named)]
        groups = {name: [self._index[name]] for name in sorted(self._named)} | {OTHER: rest}
        return tuple(
            TenantStats(
                tenant=name,
                waiting=int(waiting[places].sum()),
                decode_tokens=int(self._tokens[places].sum()),
                share=float(self._use[places].sum()) / total,
                discount=float(discount[places].min()),
            )
            for name, places in groups.items()
        )

    def _discount(self, waiting: BoolArray) -> FloatArray:
        """(t,) of every tenant, given which of them have a request waiting."""
        discount = np.ones(self._size)
        if waiting.sum() > 1:
            level = self._use[waiting] / self._weight[waiting]
            fair = max(float(self._use[waiting].sum() / self._weight[waiting].sum()), 1e-9)
            over = np.maximum(level / fair - 1.0, 0.0)
            discount[waiting] = np.exp(-np.minimum(STEEPNESS * over, EXPONENT_MAX))
        return discount

    def _charge(self, entry: Entry, decode_tokens: int) -> None:
        use = self._use[entry.tenant] + entry.sequences * decode_tokens * entry.slot_share
        self._use[entry.tenant] = max(use, 0.0)

    def _find(self, name: str, waiting: BoolArray) -> int:
        """Where a tenant is counted; one that nobody needs any more makes room for a new one."""
        at = self._index.get(name)
        if at is not None:
            return at
        if len(self._index) + 1 < self._size:
            at = len(self._index) + 1
        else:
            idle = [
                one
                for one, place in self._index.items()
                if one not in self._named and not waiting[place]
            ]
            least = min(idle, key=lambda one: float(self._use[self._index[one]]), default=None)
            if least is None or self._use[self._index[least]] > self._use.sum() * FORGOTTEN:
                return 0
            at = self._index.pop(least)
            # What it was served stays in the sum over all others.
            self._tokens[0] += self._tokens[at]
            self._tokens[at] = 0
            self._use[at] = 0.0
        self._index[name] = at
        return at

    def _grow(self, name: str, held: BoolArray) -> BoolArray:
        """Make room for a tenant with a weight although every place is in use.

        Of the others each has a request waiting, or more than FORGOTTEN of all use; so however
        often weights change there are no more places than that.
        """
        self._index[name] = self._size
        self._size += 1
        self._use = np.append(self._use, 0.0)
        self._tokens = np.append(self._tokens, 0)
        return np.append(held, False)

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._faded_s
        if passed_s > 0:
            self._use *= np.exp(-passed_s / self._memory_s)
            self._faded_s = now_s


def _slot_share(entry: Entry, fleet: FleetState) -> float:
    """Batch slots that a sequence's mean KV is worth, at least its own one."""
    kv_tokens = entry.request.prompt_tokens + entry.decode_tokens / 2.0
    capacity = float(fleet.array("kv_capacity_tokens").sum())
    return max(1.0, kv_tokens * float(fleet.array("batch_limit").sum()) / capacity)
