"""3 controller, affinity: which worker holds how much of a waiting prompt, and what that saves.

The guess is made once when a request begins to wait and looked at again in turn, a few a tick; the
engines' own counters correct it. Memory: a bounded cache a worker (prefix_cache.py), a row a
waiting request that has a prefix. What a guess is worth is in sway.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from service.control.prefix_cache import PrefixCache
from service.control.stats import AffinityStats
from service.control.uncached_pace import UncachedPace

if TYPE_CHECKING:
    from service.control.columns import FloatArray, IntArray
    from service.control.events import Request, WorkerReport
    from service.control.fleet_state import FleetState

REFRESH_MAX = 8
"""Waiting requests whose guess is made anew in one tick."""
FIRST_ROWS = 16
PRIOR_TOKENS = 4096.0
"""So many prompt tokens must be seen before the engine's counters weigh half."""
WINDOW_TOKENS = 1_000_000.0
"""What is counted is halved after so many prompt tokens, so that the correction follows."""
RATE_FLOOR = 0.02
"""Hit rates this small say nothing about each other's ratio."""
CORRECTION_MIN, CORRECTION_MAX = 0.05, 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Cached:
    """What a policy is shown of the prefix caches at one tick.

    Attributes:
        tokens: (n, g) prompt tokens of each waiting request that each worker is believed to hold.
        tokens_per_s: (g,) prompt tokens that each worker computes in a second, as learned.
        spared: (g,) tokens of prompts started on each worker, whose first tokens are still to come,
            that it does not compute: its cache holds them.
        unswayed: to be filled by the policy: where a started row would have gone without reward.
    """

    tokens: FloatArray
    tokens_per_s: FloatArray
    spared: FloatArray
    unswayed: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Tally:
    """Tokens of late, the oldest forgotten by halves.

    Attributes:
        prompt: of prompts we started. guessed: of these, guessed to be held.
        queries: of prompts that the engine looked up. hits: of these, found.
        queries_total, hits_total: the same since the worker joined, never halved.
    """

    prompt: float = 0.0
    guessed: float = 0.0
    queries: float = 0.0
    hits: float = 0.0
    queries_total: int = 0
    hits_total: int = 0
    told: bool = False

    def correction(self) -> float:
        """What guesses are multiplied by: the engine's hit rate over ours, as far as it is known.

        Rates, not tokens: the engine counts its own tokens, we a quarter of the bytes.
        """
        if not self.told or not self.prompt:
            return 1.0
        rate = self.hits / self.queries if self.queries else 0.0
        guessed = self.guessed / self.prompt
        known = self.prompt / (self.prompt + PRIOR_TOKENS)
        ratio = (rate + RATE_FLOOR) / (guessed + RATE_FLOOR)
        return float(np.clip(1.0 + known * (ratio - 1.0), CORRECTION_MIN, CORRECTION_MAX))

    def fade(self) -> None:
        """Forget half of what is old."""
        if max(self.prompt, self.queries) > WINDOW_TOKENS:
            self.prompt, self.guessed = self.prompt / 2, self.guessed / 2
            self.queries, self.hits = self.queries / 2, self.hits / 2


class Affinity:
    """Guesses what each worker's prefix cache holds, for the waiting requests that have a prefix.

    Row 0 of its matrix is that of every request without one.
    """

    def __init__(self, fleet: FleetState, weight: float, prefill_tokens_per_s: float) -> None:
        self._fleet = fleet
        self._caches: dict[str, PrefixCache] = {}
        self._tallies: dict[str, _Tally] = {}
        self._held: dict[int, Request] = {}
        self._free: list[int] = []
        self._rows: FloatArray = np.zeros((FIRST_ROWS, 0))
        self._ids: tuple[str, ...] = ()
        self._stale: list[int] = []
        self._pace = UncachedPace(prefill_tokens_per_s)
        self._prompt = self._with = self._without = 0
        self._shown: Cached | None = None
        self.on = weight > 0

    def enter(self, request: Request) -> int:
        """A request begins to wait: the number of its row; 0 where there is nothing to guess."""
        prefix = request.prefix
        if prefix is None or not self.on:
            return 0
        self._follow_fleet()
        row = self._free.pop() if self._free else len(self._held) + 1
        if row >= self._rows.shape[0]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._held[row] = request
        self._guess(row)
        return row

    def leave(self, row: int) -> None:
        """A request waits no more."""
        if row and self._held.pop(row, None) is not None:
            self._rows[row] = 0.0
            self._free.append(row)

    def show(self, rows: IntArray) -> Cached | None:
        """What a policy sees, by the (n,) row of each waiting request; None where none has one."""
        self._shown = None
        if not self._held:
            return None
        self._follow_fleet()
        self._refresh()
        self._shown = Cached(
            self._rows[rows],
            self._pace.tokens_per_s(self._ids),
            self._pace.spared(self._ids),
        )
        return self._shown

    def start(self, request: Request, worker: int, row: int, now_s: float) -> None:
        """A request that stood in a row of the last decision starts on a worker."""
        prefix = request.prefix
        if prefix is None or not self.on:
            return
        self._follow_fleet()
        other = worker if self._shown is None else self._shown.unswayed.get(row, worker)
        worker_id = self._ids[worker]
        known = self._caches[worker_id].held_tokens(prefix)
        held = self._tokens(worker_id, request)
        self._prompt += request.prompt_tokens
        self._with += round(held)
        self._without += round(held if other == worker else self._tokens(self._ids[other], request))
        tally = self._tallies[worker_id]
        tally.prompt += request.prompt_tokens
        tally.guessed += min(known, request.prompt_tokens)
        tally.fade()
        capacity = float(self._fleet.array("kv_capacity_tokens")[worker])
        self._caches[worker_id].hold(prefix, request.prompt_tokens, capacity)
        if request.streams and not self._fleet.decodes()[worker]:
            left = request.prompt_tokens - held
            self._pace.start(request.request_id, worker_id, left, now_s)
            self._pace.spare(request.request_id, held)

    def computed(self, request_id: str, now_s: float) -> None:
        """A started request has its first token."""
        g = self._fleet.index.get(self._pace.where(request_id))
        if g is None:
            self._pace.drop(request_id)
            return
        self._pace.computed(request_id, now_s, float(self._fleet.array("iteration_s")[g]))

    def dropped(self, request_id: str) -> None:
        """A started request is over; if its prompt was not computed it never will be."""
        self._pace.drop(request_id)

    def answered(self, request: Request, worker: int, decode_tokens: int) -> None:
        """A request got its whole answer."""
        cache = self._caches.get(self._fleet.worker_ids[worker]) if worker >= 0 else None
        if request.prefix is not None and cache is not None:
            cache.answered(request.prefix, decode_tokens)

    def forget(self, worker_id: str) -> None:
        """A worker is gone, down or was restarted: what it held is lost."""
        self._caches.pop(worker_id, None)
        self._tallies.pop(worker_id, None)
        self._pace.forget(worker_id)
        self._ids = ()

    def take(self, worker_id: str, report: WorkerReport) -> None:
        """Compare with what the engine has found; unknown is not zero."""
        if report.restarted:
            self.forget(worker_id)
        if report.prefix_queries is None or report.prefix_hits is None:
            return
        tally = self._tallies.setdefault(worker_id, _Tally())
        tally.told = True
        tally.queries += report.prefix_queries
        tally.hits += report.prefix_hits
        tally.queries_total += report.prefix_queries
        tally.hits_total += report.prefix_hits
        tally.fade()

    def stats(self) -> AffinityStats:
        """Counters, and each worker's rates of late."""
        ids = self._fleet.worker_ids
        tallies = {name: self._tallies.get(name, _Tally()) for name in ids}
        caches = {name: self._caches.get(name) for name in ids}
        return AffinityStats(
            prompt_tokens=self._prompt,
            hit_tokens=self._with,
            hit_tokens_unswayed=self._without,
            held_tokens={name: cache.tokens if cache else 0 for name, cache in caches.items()},
            queries={name: t.queries_total for name, t in tallies.items() if t.told},
            hits={name: t.hits_total for name, t in tallies.items() if t.told},
            observed={name: t.hits / t.queries for name, t in tallies.items() if t.queries},
            guessed={name: t.guessed / t.prompt for name, t in tallies.items() if t.prompt},
            correction={name: tally.correction() for name, tally in tallies.items()},
            prefill_tokens_per_s=dict(zip(ids, self._pace.tokens_per_s(ids).tolist(), strict=True)),
        )

    def _tokens(self, worker_id: str, request: Request) -> float:
        """Corrected guess; the engine computes at least one token of every prompt."""
        if request.prefix is None:
            return 0.0
        held = self._caches[worker_id].held_tokens(request.prefix)
        if not held:
            return 0.0
        most = max(0, request.prompt_tokens - 1)
        return min(held * self._tallies[worker_id].correction(), most)

    def _guess(self, row: int) -> None:
        request, decodes = self._held[row], self._fleet.decodes()
        # A decode worker computes no prompt, so nothing is saved there.
        self._rows[row] = [
            0.0 if decodes[g] else self._tokens(worker_id, request)
            for g, worker_id in enumerate(self._ids)
        ]

    def _refresh(self) -> None:
        """Guess anew for the next few in turn: others' prompts came and went since."""
        if not self._stale:
            self._stale = list(self._held)
        for _ in range(min(REFRESH_MAX, len(self._stale))):
            row = self._stale.pop()
            if row in self._held:
                self._guess(row)

    def _follow_fleet(self) -> None:
        """Make room for every worker, and guess all anew, when the workers are others."""
        if self._ids == self._fleet.worker_ids and self._ids:
            return
        self._ids = self._fleet.worker_ids
        for worker_id in self._ids:
            self._caches.setdefault(worker_id, PrefixCache())
            self._tallies.setdefault(worker_id, _Tally())
        for gone in self._caches.keys() - set(self._ids):
            del self._caches[gone]
        for gone in self._tallies.keys() - set(self._ids):
            del self._tallies[gone]
            self._pace.forget(gone)
        self._rows = np.zeros((self._rows.shape[0], len(self._ids)))
        for row in self._held:
            self._guess(row)
