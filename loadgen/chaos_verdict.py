"""What a chaos run must leave behind: the router's own figures, and what they may not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from loadgen.chaos import ChaosReport

MIB: Final = 1024 * 1024
MEMORY_GROWTH_MAX_MIB: Final = 24.0
"""From the second fifth of a run to its last: buffers of the busiest moments, not a leak."""
ASKING: Final = 3
"""Connections that ask one worker for health, metrics and models; they stay open once opened."""
OPEN_FILES_SLACK: Final = 4
TASKS_SLACK: Final = 2
CODES_MAX: Final = 12
"""Status codes a run can bring about: each is seen when it first occurs."""
SERIES_PER_CODE: Final = 2
"""A count, and when it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The router's figures at one moment.

    Attributes:
        series: series on the page. codes: status codes among them.
        tasks, open_files: of the process; memory_mib: resident.
        waiting, running, imbalance: of the queue.
        active, kv_tokens: of the ledger, over all workers.
        entered, ended, answered, retries, returns, errors, fallbacks: counters since the
            start.
        workers: names of workers on the page.
    """

    series: int
    codes: int
    tasks: int
    open_files: int
    memory_mib: float
    waiting: int
    running: int
    imbalance: int
    active: int
    kv_tokens: int
    entered: int
    ended: int
    answered: int
    retries: int
    returns: int
    errors: int
    fallbacks: int
    workers: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not (self.waiting or self.running or self.active or self.kv_tokens)


def read_page(page: str) -> Books:
    """Read the router's page with Prometheus's own parser."""
    sums: dict[str, float] = {}
    workers: set[str] = set()
    series = codes = 0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            series += 1
            codes += "code" in sample.labels
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            if "worker" in sample.labels:
                workers.add(sample.labels["worker"])

    def total(name: str) -> int:
        return round(sums.get(f"bidgate_{name}", 0.0))

    return Books(
        series=series,
        codes=codes,
        tasks=total("tasks"),
        open_files=round(sums.get("process_open_fds", 0.0)),
        memory_mib=sums.get("process_resident_memory_bytes", 0.0) / MIB,
        waiting=total("queue_waiting"),
        running=total("queue_running"),
        imbalance=total("accounting_imbalance"),
        active=total("worker_active"),
        kv_tokens=total("worker_kv_tokens"),
        entered=total("requests_entered_total"),
        ended=total("requests_ended_total"),
        answered=total("responses_total"),
        retries=total("retries_total"),
        returns=total("returns_total"),
        errors=total("event_errors_total") + total("tick_errors_total"),
        fallbacks=total("fallback_ticks_total"),
        workers=len(workers),
    )


def memory_growth_mib(samples: list[Books]) -> float:
    """Growth of the highest memory from the second fifth of a run to its last fifth."""
    fifth = len(samples) // 5
    if not fifth:
        return 0.0
    early = max(books.memory_mib for books in samples[fifth : 2 * fifth])
    late = max(books.memory_mib for books in samples[-fifth:])
    return late - early


def early_series(before: Books, samples: list[Books]) -> int:
    """Series but those of codes, the most up to the first fifth of a run.

    Some have no value before the first scrape of a worker, or the first refresh of prices.
    """
    looks = (before, *samples[: len(samples) // 5])
    return max(books.series - books.codes for books in looks)


def troubles(report: ChaosReport) -> list[str]:
    """List everything that must not be, one line each."""
    before, after = report.before, report.after
    ended = sum(report.ends.values())
    # Who left before its head or body had arrived was never a request to the router.
    fewest = report.proxied - report.ends["left"]
    asking = (ASKING - 1) * before.workers
    growth_mib = memory_growth_mib(report.samples)
    early = early_series(before, report.samples)
    checks = {
        f"{ended} of {report.requests} requests ended for their clients": ended == report.requests,
        f"{report.ends['hung']} requests never ended": not report.ends["hung"],
        f"{report.ends['wrong']} answers were wrong": not report.ends["wrong"],
        f"the router answered {after.answered} of {fewest}..{report.proxied} requests": (
            fewest <= after.answered <= report.proxied
        ),
        f"{after.entered} requests entered, {after.ended} ended": after.entered == after.ended,
        f"the books are out by {after.imbalance}": not after.imbalance,
        f"still held: {after}": after.is_empty,
        f"{after.errors} events or ticks raised": not after.errors,
        f"{after.fallbacks} decisions fell back": not after.fallbacks,
        f"{report.twice} requests were generated twice": not report.twice,
        f"{report.left_at_workers} requests are left at workers": not report.left_at_workers,
        f"tasks grew from {before.tasks} to {after.tasks}": (
            after.tasks <= before.tasks + TASKS_SLACK
        ),
        f"open files grew from {before.open_files} to {after.open_files}": (
            after.open_files <= before.open_files + asking + OPEN_FILES_SLACK
        ),
        f"series grew from {early} to {after.series - after.codes} and {after.codes} of codes": (
            after.series - after.codes <= early and after.codes <= SERIES_PER_CODE * CODES_MAX
        ),
        f"{after.workers} workers on the page, {before.workers} before": (
            after.workers == before.workers
        ),
        f"memory grew by {growth_mib:.1f} MiB": growth_mib <= MEMORY_GROWTH_MAX_MIB,
    }
    return [line for line, holds in checks.items() if not holds]
