"""Series of bidgate's own for a page of metrics, from plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


def gauge(name: str, text: str, value: float | None) -> Metric:
    """A gauge; one that has no value yet is announced without a sample."""
    return GaugeMetricFamily(f"bidgate_{name}", text, value=None if value is None else float(value))


def per_worker(name: str, text: str, values: Mapping[str, float]) -> Metric:
    """A gauge by worker."""
    family = GaugeMetricFamily(f"bidgate_{name}", text, labels=["worker"])
    for worker, value in values.items():
        family.add_metric([worker], value)
    return family


def keyed(counts: dict[str, int]) -> dict[tuple[str, ...], int]:
    """Counts by one label, as `counter` takes them."""
    return {(label,): count for label, count in counts.items()}


def counter(
    name: str, text: str, counts: dict[tuple[str, ...], int], labels: Iterable[str] = ()
) -> Metric:
    """A counter by any labels."""
    family = CounterMetricFamily(f"bidgate_{name}", text, labels=list(labels))
    for key, count in counts.items():
        family.add_metric(list(key), count)
    return family


def seconds_spelled(field: str) -> str:
    """A field's name as Prometheus has its unit: `iteration_s` is `iteration_seconds`."""
    if not field.endswith("_s"):
        return field
    return f"{field}econd" if field.endswith("_per_s") else f"{field}econds"
