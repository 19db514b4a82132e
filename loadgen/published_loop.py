"""The published method as one would first write it: columns as objects, loops over everything.

It is the yardstick of `bidgate-load bench tick`, not a caricature: a start is priced in constant
time by prefix sums ([OLP] eq. (10)), the calendar of occupancy is kept between ticks, and the slots
are the same buckets that the controller uses. What it has not got is arrays and pruning.
[OLP] is "Online Linear Programming for Multi-Objective Routing in LLM Serving".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the method needs to know.

    Attributes:
        buckets: N slots of the look-ahead. bucket_iterations: q, iterations per slot.
        steps: K. batch: columns in a mini-batch. step_size: eta. history_max: columns kept.
        e2e, ttft: beta and gamma of the reward; the other weights are zero.
        seed: of the mini-batches.
    """

    buckets: int = 256
    bucket_iterations: int = 16
    steps: int = 5
    batch: int = 64
    step_size: float = 0.05
    history_max: int = 2048
    e2e: float = 1.0
    ttft: float = 1.0
    seed: int = 0

    @property
    def iterations(self) -> int:
        """The whole look-ahead, T - k + 1."""
        return self.buckets * self.bucket_iterations


@dataclass(frozen=True, slots=True)
class LoopRequest:
    """A waiting request: s and o^ in tokens."""

    request_id: str
    prompt_tokens: int
    decode_tokens: int


@dataclass(slots=True)
class LoopWorker:
    """One worker's calendar: what is free and what it costs, slot by slot."""

    batch_free: list[float]
    kv_free: list[float]
    price_batch: list[float]
    price_kv: list[float]


@dataclass(frozen=True, slots=True)
class LoopColumn:
    """A start on a worker: slots [0, last) of the look-ahead, KV use footprint + edge on each."""

    worker: int
    last: int
    footprint: float
    end: int
    reward: float

    def kv_use(self, slot: int, bucket_iterations: int) -> float:
        """KV tokens on a slot: the largest use inside it."""
        return self.footprint + min((slot + 1) * bucket_iterations, self.end)


class PublishedLoop:
    """Algorithms 1 and 2 over Python objects; prefill is mixed in (appendix A)."""

    def __init__(
        self, settings: LoopSettings, batch_limits: Sequence[int], kv_tokens: Sequence[int]
    ) -> None:
        self._settings = settings
        self._scale = 1.0 / max(kv_tokens)
        self._normalizer = (settings.e2e + settings.ttft) * settings.iterations
        self._history: list[LoopColumn] = []
        self._refreshes = 0
        self.workers = [
            LoopWorker(
                [float(limit)] * settings.buckets,
                [float(tokens)] * settings.buckets,
                [0.0] * settings.buckets,
                [0.0] * settings.buckets,
            )
            for limit, tokens in zip(batch_limits, kv_tokens, strict=True)
        ]

    def tick(self, waiting: Sequence[LoopRequest], arrivals: float) -> list[tuple[str, int]]:
        """Update prices, price every pair, record the best, admit greedily.

        Args:
            waiting: in order of arrival.
            arrivals: n^_remain, forecast of admission opportunities.

        Returns:
            (request, worker) in order of admission; the calendar has them.

        Source: [OLP] Algorithm 1.
        """
        self._refresh(arrivals)
        priced = self._margins(waiting)
        if priced:
            self._record(priced[0][3])
        admitted: list[tuple[str, int]] = []
        taken: set[int] = set()
        for margin, row, worker, column in priced:
            if margin <= 0:
                break
            if row not in taken and self._fits(column):
                self.take(column)
                taken.add(row)
                admitted.append((waiting[row].request_id, worker))
        return admitted

    def column(self, request: LoopRequest, worker: int) -> LoopColumn:
        """The column of starting a request now, and its normalised reward ([OLP] 3.1, B.2)."""
        settings = self._settings
        end = min(request.decode_tokens + 1, settings.iterations)
        saved = max(0, settings.iterations - request.decode_tokens)
        reward = settings.e2e * saved + settings.ttft * settings.iterations
        return LoopColumn(
            worker,
            math.ceil(end / settings.bucket_iterations),
            float(request.prompt_tokens - 1),
            end,
            min(reward / self._normalizer, 1.0),
        )

    def take(self, column: LoopColumn, sign: float = 1.0) -> None:
        """Subtract a column from its worker's calendar; add it back with sign -1."""
        calendar = self.workers[column.worker]
        for slot in range(column.last):
            calendar.batch_free[slot] -= sign
            calendar.kv_free[slot] -= sign * column.kv_use(slot, self._settings.bucket_iterations)

    def _margins(self, waiting: Sequence[LoopRequest]) -> list[tuple[float, int, int, LoopColumn]]:
        """Reduced cost of every pair, largest first; then earlier arrival, then worker index."""
        prefix = [self._prefix_sums(calendar) for calendar in self.workers]
        pairs = []
        for row, request in enumerate(waiting):
            for worker in range(len(self.workers)):
                column = self.column(request, worker)
                margin = column.reward - self._cost(column, prefix[worker])
                pairs.append((margin, row, worker, column))
        pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
        return pairs

    def _prefix_sums(self, calendar: LoopWorker) -> tuple[list[float], list[float], list[float]]:
        """Running sums of p_bat, p_mem and slot x p_mem ([OLP] eq. (10))."""
        q = self._settings.bucket_iterations
        edges = [price * (slot + 1) * q for slot, price in enumerate(calendar.price_kv)]
        return (
            list(accumulate(calendar.price_batch, initial=0.0)),
            list(accumulate(calendar.price_kv, initial=0.0)),
            list(accumulate(edges, initial=0.0)),
        )

    def _cost(
        self, column: LoopColumn, prefix: tuple[list[float], list[float], list[float]]
    ) -> float:
        """a^T p in constant time."""
        batch, kv, edge = prefix
        last = column.last
        whole = column.footprint * kv[last] + edge[last - 1]
        whole += (kv[last] - kv[last - 1]) * column.end
        return batch[last] + whole * self._scale

    def _fits(self, column: LoopColumn) -> bool:
        """Whether a column fits on all its slots."""
        calendar, q = self.workers[column.worker], self._settings.bucket_iterations
        return all(
            calendar.batch_free[slot] >= 1 and calendar.kv_free[slot] >= column.kv_use(slot, q)
            for slot in range(column.last)
        )

    def _record(self, column: LoopColumn) -> None:
        self._history.append(column)
        if len(self._history) > self._settings.history_max:
            self._history.pop(0)

    def _refresh(self, arrivals: float) -> None:
        """K projected mini-batch subgradient steps from the last prices ([OLP] Algorithm 2)."""
        if not self._history:
            return
        self._refreshes += 1
        rng = np.random.default_rng(self._settings.seed + self._refreshes)
        size = min(self._settings.batch, len(self._history))
        for _ in range(self._settings.steps):
            sample = rng.choice(len(self._history), size=size, replace=False)
            self._step([self._history[row] for row in sample], 1.0 / max(1.0, arrivals))

    def _step(self, sample: list[LoopColumn], share: float) -> None:
        """One step against scarcity minus mean use of the columns worth their cost (eq. (8))."""
        settings, eta = self._settings, self._settings.step_size
        prefix = [self._prefix_sums(calendar) for calendar in self.workers]
        worth = [c for c in sample if c.reward - self._cost(c, prefix[c.worker]) > 0]
        for calendar in self.workers:
            for slot in range(settings.buckets):
                scarce = max(calendar.batch_free[slot], 0.0) * share
                calendar.price_batch[slot] -= eta * scarce
                scarce = max(calendar.kv_free[slot], 0.0) * self._scale * share
                calendar.price_kv[slot] -= eta * scarce
        for column in worth:
            calendar = self.workers[column.worker]
            for slot in range(column.last):
                calendar.price_batch[slot] += eta / len(sample)
                use = column.kv_use(slot, settings.bucket_iterations) * self._scale
                calendar.price_kv[slot] += eta * use / len(sample)
        for calendar in self.workers:
            calendar.price_batch = [max(price, 0.0) for price in calendar.price_batch]
            calendar.price_kv = [max(price, 0.0) for price in calendar.price_kv]
