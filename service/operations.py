"""What bidgate tells about its own operation: settings, sources of workers, keys and tenants.

Read at each scrape, like the state of the queue (state_series.py). Labels are bounded by the
settings: sources, tenants, limits; never anything that a client chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.auth import Door
from service.discovery.following import SourceStats
from service.reload import ReloadStats

ANONYMOUS = "default"
"""Label of keys that name no tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Where a scrape reads.

    Attributes:
        settings: of the reloads. sources: of discovery. door: of keys and tenants.
    """

    settings: Callable[[], ReloadStats]
    sources: Callable[[], tuple[SourceStats, ...]]
    door: Door


class OperationsCollector(Collector):
    """Turns the state at scrape time into series."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def collect(self) -> Iterator[Metric]:
        """Yield every series."""
        yield from _settings_series(self._operations.settings())
        yield from _source_series(self._operations.sources())
        yield from _door_series(self._operations.door)


def _settings_series(stats: ReloadStats) -> Iterator[Metric]:
    failed = "1 while the settings file cannot be used and the settings before it are in use"
    yield GaugeMetricFamily("bidgate_settings_rejected", failed, value=float(stats.rejected))
    pending = "Settings that differ from those in use until a restart"
    yield GaugeMetricFamily(
        "bidgate_settings_restart_pending", pending, value=float(len(stats.restart_pending))
    )
    reloads = CounterMetricFamily(
        "bidgate_settings_reloads", "Times that settings were read again", labels=["result"]
    )
    reloads.add_metric(["applied"], stats.applied)
    reloads.add_metric(["rejected"], stats.rejections)
    yield reloads


def _source_series(sources: Iterable[SourceStats]) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        "bidgate_discovery_workers", "Workers that a source names", labels=["source"]
    )
    failing = GaugeMetricFamily(
        "bidgate_discovery_failing",
        "1 while a source fails and its last workers are kept",
        labels=["source"],
    )
    age = GaugeMetricFamily(
        "bidgate_discovery_age_seconds", "Time since a source last spoke", labels=["source"]
    )
    failures = CounterMetricFamily(
        "bidgate_discovery_failures", "Times that a source failed", labels=["source"]
    )
    for source in sources:
        label = [source.label]
        workers.add_metric(label, source.workers)
        failing.add_metric(label, float(source.failing))
        failures.add_metric(label, source.failures)
        if source.age_s is not None:
            age.add_metric(label, source.age_s)
    yield from (workers, failing, age, failures)


def _door_series(door: Door) -> Iterator[Metric]:
    counts = door.counts
    yield CounterMetricFamily(
        "bidgate_unauthorized", "Requests without a right key", value=counts.unauthorized
    )
    running = GaugeMetricFamily(
        "bidgate_tenant_running", "Requests of a tenant inside now", labels=["tenant"]
    )
    for tenant, value in door.running().items():
        running.add_metric([tenant or ANONYMOUS], value)
    requests = CounterMetricFamily(
        "bidgate_tenant_requests", "Requests of a tenant that were let in", labels=["tenant"]
    )
    tokens = CounterMetricFamily(
        "bidgate_tenant_tokens", "Prompt and output tokens of a tenant", labels=["tenant"]
    )
    for family, counter in ((requests, counts.requests), (tokens, counts.tokens)):
        for tenant, value in counter.items():
            family.add_metric([tenant or ANONYMOUS], value)
    limited = CounterMetricFamily(
        "bidgate_tenant_limited",
        "Requests of a tenant kept out by a limit of its key",
        labels=["tenant", "limit"],
    )
    for (tenant, limit), value in counts.limited.items():
        limited.add_metric([tenant or ANONYMOUS, limit.value], value)
    yield from (running, requests, tokens, limited)
