"""Cache-aware routing as other routers do it: thresholds, in the place of a price.

Where loads are uneven beyond two thresholds, the worker with the fewest requests; else the worker
that was sent the longest beginning of this prompt, where that is a large enough part of it; else
the worker with the fewest requests. This is the rule `cache_aware` of vllm-router and of SGLang's
gateway, whose defaults are 0.3, 64 and 1.5. Without thresholds it is plain stickiness.

Differs, in its favour: those guess by characters and by trees that outlive what engines evict; here
pieces are exact and the least recently used ones are dropped as the engine's memory fills.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.push_at_once import PushAtOnce
from service.control.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.control.events import Request, WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRule:
    """Thresholds of one such router.

    Attributes:
        match_share: a beginning that was sent before counts when it is more than this share of the
            prompt.
        load_gap, load_ratio: loads are uneven when the most loaded worker has this many requests
            more than the least loaded one, and more than this many times as many.
    """

    match_share: float = 0.3
    load_gap: float = 64.0
    load_ratio: float = 1.5


STICKY = CacheRule(match_share=0.0, load_gap=math.inf)


class CacheAware(PushAtOnce):
    """A router that follows what it has sent where."""

    def __init__(self, rule: CacheRule) -> None:
        super().__init__()
        self._rule = rule
        self._load: dict[str, int] = {}
        self._capacity_tokens: dict[str, float] = {}
        self._caches: dict[str, PrefixCache] = {}

    def choose(self, request: Request, up: Sequence[str]) -> str:
        """By load where loads are uneven, else by what was sent."""
        most, least = (pick(self._load[worker_id] for worker_id in up) for pick in (max, min))
        gap, ratio = self._rule.load_gap, self._rule.load_ratio
        uneven = most - least > gap and most > ratio * least
        if request.prefix is None or uneven:
            return self._least_loaded(up)
        held = {worker_id: self._caches[worker_id].held_tokens(request.prefix) for worker_id in up}
        longest = max(held.values())
        if longest > self._rule.match_share * request.prompt_tokens:
            return self._least_loaded([w for w in up if held[w] == longest])
        return self._least_loaded(up)

    def joined(self, spec: WorkerSpec) -> None:
        """A worker has nothing yet."""
        capacity = spec.kv_capacity_tokens
        self._load.setdefault(spec.worker_id, 0)
        self._capacity_tokens[spec.worker_id] = math.inf if capacity is None else capacity
        self._caches[spec.worker_id] = PrefixCache()

    def sent(self, request: Request, worker_id: str) -> None:
        """Its prompt will be in that worker's cache."""
        self._load[worker_id] += 1
        if request.prefix is not None:
            capacity = self._capacity_tokens[worker_id]
            self._caches[worker_id].hold(request.prefix, request.prompt_tokens, capacity)

    def progressed(self, request: Request, worker_id: str, tokens: int) -> None:
        """Tokens make no difference."""

    def ended(self, request: Request, worker_id: str) -> None:
        """One request less."""
        self._load[worker_id] -= 1

    def lost(self, worker_id: str) -> None:
        """What was sent there is gone."""
        self._caches[worker_id] = PrefixCache()

    def _least_loaded(self, workers: Sequence[str]) -> str:
        return min(workers, key=self._load.__getitem__)
