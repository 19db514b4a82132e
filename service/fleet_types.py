"""5 fleet: how workers are watched (settings), and what is known about them (stats)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.control.events import WorkerReport, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """How often a worker is asked and how long an answer may take.

    Attributes:
        metrics_interval_s: pause between scrapes.
        histograms_interval_s: pause between scrapes that ask for iteration times, queue times and
            cache hits too: they take an engine four times as long as the few gauges.
        metrics_timeout_s: longest scrape.
        stale_after_s: age of the last good scrape from which the ledger stands alone.
        health_interval_s: pause between health checks of a worker that is up.
        health_timeout_s: longest health check.
        models_interval_s: pause between looks at /v1/models.
        models_timeout_s: longest such look.
        stalled_after_s: an engine with requests in its batch whose counters have stood still for
            this long is out of use until they move; longer than the longest prefill.
        failures_to_down: health checks in a row that must fail; a refused connection is enough.
        suspect_interval_s: pause before a failed health check is repeated.
        reprobe_min_s: first pause before a worker that is down is asked again; doubles.
        reprobe_max_s: longest such pause.
        jitter: every pause is stretched or shrunk by up to this share.
    """

    metrics_interval_s: float = 0.5
    histograms_interval_s: float = 2.0
    metrics_timeout_s: float = 1.0
    stale_after_s: float = 2.0
    stalled_after_s: float = 30.0
    health_interval_s: float = 1.0
    health_timeout_s: float = 2.0
    models_interval_s: float = 10.0
    models_timeout_s: float = 2.0
    failures_to_down: int = 3
    suspect_interval_s: float = 0.2
    reprobe_min_s: float = 0.1
    reprobe_max_s: float = 5.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        """Refuse pauses and limits that make no sense."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name.endswith("_s") and not value > 0:
                raise ValueError(f"{spec.name} must be positive, got {value}")
        if self.reprobe_min_s > self.reprobe_max_s:
            raise ValueError("reprobe_min_s must be at most reprobe_max_s")
        if self.failures_to_down < 1 or not 0 <= self.jitter < 1:
            raise ValueError("failures_to_down must be at least 1 and jitter in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that could take a light request.

    Attributes:
        worker_id: which.
        load: requests it said to have, over its batch limit; 0 when it has not said.
    """

    worker_id: str
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchStats:
    """One worker for metrics and tests.

    Attributes:
        worker_id: which.
        state: as published.
        metrics_age_s: seconds since the last good scrape was sent; None before the first.
        metrics_stale: whether the worker is up and its metrics are missing or too old.
        filtered_scrapes: whether the cheap, filtered page is in use.
        scrapes_ok: good scrapes.
        scrapes_failed: failed scrapes.
        malformed_lines: lines of wanted series that could not be read.
        health_failures: failed health checks.
        times_lost: how often the worker went down after it was up.
        stalls: how often it was taken out of use because its engine stood still.
        restarts: how often its counters or its start time said it was restarted.
        report: the last one that was published.
    """

    worker_id: str
    state: WorkerState
    metrics_age_s: float | None
    metrics_stale: bool
    filtered_scrapes: bool
    scrapes_ok: int
    scrapes_failed: int
    malformed_lines: int
    health_failures: int
    times_lost: int
    stalls: int
    restarts: int
    report: WorkerReport
