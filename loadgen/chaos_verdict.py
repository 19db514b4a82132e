"""What a chaos run must leave behind: the router's own figures, and what they may not say."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from loadgen.chaos_keys import REQUESTS_MAX, Key

if TYPE_CHECKING:
    from loadgen.chaos import ChaosReport

MIB: Final = 1024 * 1024
MEMORY_GROWTH_MAX_MIB: Final = 24.0
"""From the second fifth of a run to its last: buffers of the busiest moments, not a leak."""
MEMORY_SAMPLES_MIN: Final = 40
WAITING_MIB: Final = 0.125
"""What a request that waits may hold: its body, read and unread, of up to 2 MiB."""
ASKING: Final = 3
"""Connections that ask one worker for health, metrics and models; they stay open once opened."""
OPEN_FILES_SLACK: Final = 4
TASKS_SLACK: Final = 2
CODES_MAX: Final = 12
"""Status codes a run can bring about: each is seen when it first occurs."""
SERIES_PER_CODE: Final = 2
"""A count, and when it began."""
TENANTS_MAX: Final = 6
"""Those of the keys, and what all others share."""
SERIES_PER_TENANT: Final = 10


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
        tenant_series: series by tenant. keyed: places of keys that are taken.
        limited: kept out by a key's limit. unauthorized: without a right key.
        legs, prefill_kv_tokens: of the prefill workers' account, over all of them.
        handoffs: first legs that were done; handoffs_failed: all others.
        running_by_key, let_in_by_key: requests inside, and let in, by the key's tenant.
        limited_by: kept out, by limit.
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
    tenant_series: int
    keyed: int
    limited: int
    unauthorized: int
    legs: int
    prefill_kv_tokens: int
    handoffs: int
    handoffs_failed: int
    running_by_key: dict[str, int]
    let_in_by_key: dict[str, int]
    limited_by: dict[str, int]

    @property
    def steady_series(self) -> int:
        """Series that are not there only since something happened for the first time."""
        return self.series - self.codes - self.tenant_series

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        queue = self.waiting or self.running or self.active or self.kv_tokens
        return not (queue or self.keyed or self.legs or self.prefill_kv_tokens)


def read_page(page: str) -> Books:
    """Read the router's page with Prometheus's own parser."""
    samples = [
        sample for family in text_string_to_metric_families(page) for sample in family.samples
    ]
    sums: dict[str, float] = defaultdict(float)
    for sample in samples:
        sums[sample.name] += sample.value

    def total(name: str) -> int:
        return round(sums[f"bidgate_{name}"])

    def by(label: str, name: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for sample in samples:
            if sample.name == f"bidgate_{name}":
                found[sample.labels[label]] += round(sample.value)
        return dict(found)

    handoffs = by("result", "handoffs_total")
    done = handoffs.pop("done", 0)
    return Books(
        series=len(samples),
        codes=sum("code" in sample.labels for sample in samples),
        tasks=total("tasks"),
        open_files=round(sums["process_open_fds"]),
        memory_mib=sums["process_resident_memory_bytes"] / MIB,
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
        workers=len({sample.labels["worker"] for sample in samples if "worker" in sample.labels}),
        tenant_series=sum("tenant" in sample.labels for sample in samples),
        keyed=total("tenant_running"),
        limited=total("tenant_limited_total"),
        unauthorized=total("unauthorized_total"),
        legs=total("prefill_worker_legs"),
        prefill_kv_tokens=total("prefill_worker_kv_tokens"),
        handoffs=done,
        handoffs_failed=sum(handoffs.values()),
        running_by_key=by("tenant", "tenant_running"),
        let_in_by_key=by("tenant", "tenant_requests_total"),
        limited_by=by("limit", "tenant_limited_total"),
    )


def memory_growth_mib(samples: list[Books]) -> float:
    """Growth of the highest memory from the second fifth of a run to its last fifth.

    A run of less than MEMORY_SAMPLES_MIN only shows how a new process fills its memory: 0.
    """
    fifth = len(samples) // 5
    if len(samples) < MEMORY_SAMPLES_MIN:
        return 0.0
    early = max(books.memory_mib for books in samples[fifth : 2 * fifth])
    late = max(books.memory_mib for books in samples[-fifth:])
    return late - early


def memory_growth_max_mib(samples: list[Books]) -> float:
    """Growth that is no leak: more where more requests came to wait later than had before.

    On a slow machine the queue fills in the course of a run, each request with its body.
    """
    early = samples[: 2 * (len(samples) // 5)]
    most, most_early = (
        max((books.waiting for books in part), default=0) for part in (samples, early)
    )
    return MEMORY_GROWTH_MAX_MIB + WAITING_MIB * (most - most_early)


def early_series(before: Books, samples: list[Books]) -> int:
    """Series but those of codes and tenants, the most up to the first fifth of a run.

    Some have no value before the first scrape of a worker, or the first refresh of prices.
    """
    looks = (before, *samples[: len(samples) // 5])
    return max(books.steady_series for books in looks)


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
        f"series grew from {early} to {after.steady_series}": after.steady_series <= early,
        f"{after.codes} series of codes, {after.tenant_series} of tenants": (
            after.codes <= SERIES_PER_CODE * CODES_MAX
            and after.tenant_series <= SERIES_PER_TENANT * TENANTS_MAX
        ),
        f"{after.workers} workers on the page, {before.workers} before": (
            after.workers == before.workers
        ),
        f"memory grew by {growth_mib:.1f} MiB": (
            growth_mib <= memory_growth_max_mib(report.samples)
        ),
    }
    checks |= _checks_of_keys(report)
    return [line for line, holds in checks.items() if not holds]


def _checks_of_keys(report: ChaosReport) -> dict[str, bool]:
    """Keys and their limits: what was kept out is what clients were told, and no limit was passed.

    Who left may have been kept out too, before it could read that.
    """
    after, ends, left = report.after, report.ends, report.ends["left"]
    at_once = max((books.running_by_key.get(Key.FEW, 0) for books in report.samples), default=0)
    slow = after.let_in_by_key.get(Key.SLOW, 0)
    return {
        f"{after.limited} were over a key's limit, {ends['limited']} were told so": (
            0 <= after.limited - ends["limited"] <= left
        ),
        f"{after.unauthorized} had no key, {ends['locked_out']} were told so": (
            0 <= after.unauthorized - ends["locked_out"] <= left
        ),
        f"a key for {REQUESTS_MAX} requests at once had {at_once}": at_once <= REQUESTS_MAX,
        f"a key for {report.slow_most:.1f} requests in all had {slow}": slow <= report.slow_most,
    }
