"""vLLM's Prometheus series, names, labels and buckets, over what the mock engine does.

As in vLLM the gauges are those of the last engine step that ended, so they are blind for what
arrived since. Histograms are our own because prometheus_client cannot observe a value many times
at once, and a batch shares its gaps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from service.mock.decode_records import DecodeWorkerStats
    from service.mock.worker_config import MockWorkerConfig

PROCESS_START: Final = "process_start_time_seconds"
# fmt: off
_TOKEN_GAP_BOUNDS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)
_FIRST_TOKEN_BOUNDS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_REQUEST_BOUNDS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)
_ITERATION_BOUNDS: Final = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)
# fmt: on


class Histogram:
    """Counts by upper bound, and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, several times at once."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, labels: Mapping[str, str]) -> Metric:
        """Freeze into a Prometheus family."""
        cumulative, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            text = "+Inf" if bound == float("inf") else str(bound)
            cumulative.append((text, float(total)))
        family = HistogramMetricFamily(name, f"Histogram of {name}.", labels=list(labels))
        family.add_metric(list(labels.values()), cumulative, self._sum)
        return family


class EngineSeries(Collector):
    """Everything /metrics shows of one mock engine.

    Attributes:
        first_token_s: time to first token.
        queue_s: time in the worker's own queue.
        request_s: end-to-end time.
        finished: requests ended, by reason.
    """

    def __init__(
        self,
        config: MockWorkerConfig,
        stats: DecodeWorkerStats,
        label: int,
        started_unix_s: float,
    ) -> None:
        self.first_token_s = Histogram(_FIRST_TOKEN_BOUNDS)
        self.queue_s = Histogram(_REQUEST_BOUNDS)
        self.request_s = Histogram(_REQUEST_BOUNDS)
        # vLLM does not count aborted requests under "abort", and neither does this.
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort"), 0))
        self._token_gap_s = Histogram(_TOKEN_GAP_BOUNDS)
        self._iteration_tokens = Histogram(_ITERATION_BOUNDS)
        self._config = config
        self._stats = stats
        self._started_unix_s = started_unix_s
        self._labels = {"engine": str(label), "model_name": config.model}

    @property
    def stats(self) -> DecodeWorkerStats:
        """Gauges and counters of the last iteration that ended."""
        return self._stats

    def observe_idle(self, stats: DecodeWorkerStats) -> None:
        """Take the state of an engine that has nothing to do."""
        self._stats = stats

    def observe_iteration(
        self, stats: DecodeWorkerStats, tokens: int, gaps_s: Mapping[float, int]
    ) -> None:
        """Count an iteration: the state after it, its output tokens, the times between tokens."""
        prompt_tokens = stats.prompt_tokens_total - self._stats.prompt_tokens_total
        if tokens:
            self._iteration_tokens.observe(tokens + prompt_tokens)
        for gap_s, times in gaps_s.items():
            self._token_gap_s.observe(gap_s, times)
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Yield every family."""
        yield from self._gauges()
        yield from self._counters()
        labels = self._labels
        yield self.first_token_s.family("vllm:time_to_first_token_seconds", labels)
        yield self._token_gap_s.family("vllm:inter_token_latency_seconds", labels)
        yield self.queue_s.family("vllm:request_queue_time_seconds", labels)
        yield self.request_s.family("vllm:e2e_request_latency_seconds", labels)
        yield self._iteration_tokens.family("vllm:iteration_tokens_total", labels)

    def _gauges(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("vllm:num_requests_running", stats.running)
        yield self._gauge("vllm:num_requests_waiting", stats.waiting)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests by reason.",
            labels=[*self._labels, "reason"],
        )
        for reason, count in (("capacity", stats.waiting), ("deferred", 0)):
            by_reason.add_metric([*self._labels.values(), reason], count)
        yield by_reason
        yield self._gauge("vllm:kv_cache_usage_perc", stats.kv_blocks_used / stats.kv_blocks_total)
        config = self._cache_config()
        info = GaugeMetricFamily("vllm:cache_config_info", "Cache layout.", labels=list(config))
        info.add_metric(list(config.values()), 1)
        yield info
        start = GaugeMetricFamily(PROCESS_START, "Start time of the worker.")
        start.add_metric([], self._started_unix_s)
        yield start

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._counter("vllm:num_preemptions", stats.preemptions_total)
        yield self._counter("vllm:prefix_cache_queries", stats.prefix_queries_total)
        yield self._counter("vllm:prefix_cache_hits", stats.prefix_hits_total)
        yield self._counter("vllm:prompt_tokens", stats.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", stats.generation_tokens_total)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended well, by reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in self.finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, f"Gauge of {name}.", labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = CounterMetricFamily(name, f"Counter of {name}.", labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _cache_config(self) -> dict[str, str]:
        """Labels of the info series; like vLLM's they count one block that no request can get."""
        blocks = self._stats.kv_blocks_total + 1
        tokens = blocks * self._config.block_tokens
        return {
            "block_size": str(self._config.block_tokens),
            "cache_dtype": "auto",
            "enable_prefix_caching": str(self._config.prefix_caching),
            "engine": self._labels["engine"],
            "kv_cache_max_concurrency": str(tokens / self._config.max_model_len),
            "kv_cache_size_tokens": str(tokens),
            "num_gpu_blocks": str(blocks),
        }


class ServerSeries(Collector):
    """The series of all engines of a server on one page, family by family."""

    def __init__(self, engines: Sequence[EngineSeries]) -> None:
        self._engines = tuple(engines)

    def collect(self) -> Iterable[Metric]:
        """Yield every family once, with the samples of every engine."""
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for family in engine.collect():
                known = families.setdefault(family.name, family)
                # A series without the label is the process's, and all engines tell the same.
                if known is not family and family.name != PROCESS_START:
                    known.samples.extend(family.samples)
        return families.values()
