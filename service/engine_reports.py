"""5 fleet: what changed between two scrapes of one worker, as a WorkerReport.

Pure: pages in, reports out. Counters are compared per `engine` label, so that an engine which
appears late (its series are absent until it has worked once) is not mistaken for progress.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from service.control.events import Role, WorkerReport
from service.engine_metrics import ENGINES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from service.engine_metrics import EnginePage, EngineSample
    from service.worker_config import WorkerConfig

_COUNTERS: Final = (
    "token_latency_count",
    "preemptions_total",
    "generation_tokens_total",
    "requests_succeeded_total",
    "queue_time_count",
    "prefix_queries_total",
    "prefix_hits_total",
)
# Process start times are printed with few digits and may wobble by the clock's corrections.
_START_TOLERANCE_S: Final = 1.0


class EngineReports:
    """Remembers the last page of a worker and turns the next one into a report."""

    def __init__(self, worker: WorkerConfig) -> None:
        self._worker = worker
        self._last: dict[str, EngineSample] = {}
        self._process_start_s: float | None = None

    def report(self, page: EnginePage, models: frozenset[str] | None = None) -> WorkerReport:
        """Compare a page with the one before.

        The iteration time is d(sum) / d(count) of the time between output tokens: the engine's
        own timestamps, so that the jitter of our scrapes drops out. It is None when no token was
        made, and over a restart.

        Args:
            page: the new scrape.
            models: names served, when they have changed.
        """
        restarted = self._restarted(page)
        iteration_s = None if restarted else self._iteration_s(page.engines)
        generated_tokens, queries, hits = (
            None if restarted else self._grown(page.engines, name)
            for name in ("generation_tokens_total", "prefix_queries_total", "prefix_hits_total")
        )
        self._remember(page, restarted)
        total = page.total
        return WorkerReport(
            running=total.running,
            waiting=self._waiting(total),
            kv_tokens_used=self._kv_tokens_used(total),
            kv_capacity_tokens=self._learned_capacity(total),
            block_tokens=total.block_tokens,
            iteration_s=iteration_s,
            generated_tokens=generated_tokens,
            preemptions_total=total.preemptions_total,
            models=models,
            restarted=restarted,
            prefix_queries=queries,
            prefix_hits=hits,
        )

    def _restarted(self, page: EnginePage) -> bool:
        """Whether a counter fell or the server process is another one."""
        before, after = self._process_start_s, page.process_start_s
        if before is not None and after is not None and abs(after - before) > _START_TOLERANCE_S:
            return True
        return any(
            _fell(self._last[label], sample)
            for label, sample in page.engines.items()
            if label in self._last
        )

    def _iteration_s(self, engines: Mapping[str, EngineSample]) -> float | None:
        """Mean time of one decode iteration since the last page, over engines on both pages."""
        seconds, tokens = 0.0, 0
        for label, sample in engines.items():
            last = self._last.get(label)
            if last is None or None in (last.token_latency_sum_s, sample.token_latency_sum_s):
                continue
            seconds += (sample.token_latency_sum_s or 0.0) - (last.token_latency_sum_s or 0.0)
            tokens += (sample.token_latency_count or 0) - (last.token_latency_count or 0)
        if tokens < 1 or not (math.isfinite(seconds) and seconds > 0):
            return None
        return seconds / tokens

    def _grown(self, engines: Mapping[str, EngineSample], name: str) -> int | None:
        """What a counter gained since the last page; None unless every engine is on both pages."""
        pairs = [
            (getattr(self._last[label], name), getattr(sample, name))
            for label, sample in engines.items()
            if label in self._last
        ]
        known: list[tuple[int, int]]
        known = [(last, now) for last, now in pairs if last is not None and now is not None]
        if not known or len(known) < max(len(engines), len(self._last)):
            return None
        return sum(now - last for last, now in known)

    def _remember(self, page: EnginePage, restarted: bool) -> None:
        """Keep the page; what it does not name keeps its last counters until a restart."""
        kept = {} if restarted or len(self._last) > ENGINES_MAX else self._last
        now = {
            label: sample.filled_from(kept[label]) if label in kept else sample
            for label, sample in page.engines.items()
        }
        self._last = {**kept, **now}
        if page.process_start_s is not None:
            self._process_start_s = page.process_start_s

    def _waiting(self, total: EngineSample) -> int | None:
        """Requests that want a slot; a decode worker's that fetch their prompt hold one already."""
        if total.waiting is None or self._worker.role is not Role.DECODE:
            return total.waiting
        return max(0, total.waiting - (total.deferred or 0))

    def _learned_capacity(self, total: EngineSample) -> int | None:
        """The engine's own capacity, unless the operator has set another."""
        return None if self._worker.kv_capacity_tokens is not None else total.kv_capacity_tokens

    def _kv_tokens_used(self, total: EngineSample) -> int | None:
        """Tokens in allocated blocks, by the configured capacity when the engine tells none."""
        if total.kv_tokens_used is not None:
            return total.kv_tokens_used
        if total.kv_use is None or self._worker.kv_capacity_tokens is None:
            return None
        return round(total.kv_use * self._worker.kv_capacity_tokens)


def _fell(last: EngineSample, now: EngineSample) -> bool:
    """Whether any counter known on both sides went down."""
    for name in _COUNTERS:
        before, after = getattr(last, name), getattr(now, name)
        if before is not None and after is not None and after < before:
            return True
    return False
