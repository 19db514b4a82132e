"""Series of the state of queue, router, workers and fleet, read from their `stats()` at a scrape.

Nothing is set in passing, so a worker that left leaves no series.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.control.events import WorkerState
from service.control.replica_worth import ReplicaWorth, replica_worths
from service.control.stats import AffinityStats, PrefillStats, RouterStats, TenantStats, WorkerStats
from service.fleet_types import WatchStats
from service.metric_families import counter, gauge, keyed, per_worker, seconds_spelled
from service.queue_stats import QueueStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a scrape reads the state.

    Attributes:
        queue: of queue and router.
        fleet: of the watches.
        light: places lent by the light path now, and how those ended.
        retries: other workers tried, by reason.
        handoffs: ends of first legs, by result.
        refresh_failures: price refreshes that raised.
        bytes_held: of request bodies in memory.
        spans: of requests, by what became of them.
    """

    queue: Callable[[], QueueStats]
    fleet: Callable[[], tuple[WatchStats, ...]]
    light: Callable[[], tuple[int, dict[str, int]]]
    retries: Callable[[], dict[str, int]]
    refresh_failures: Callable[[], int]
    bytes_held: Callable[[], int]
    handoffs: Callable[[], dict[str, int]] = dict
    spans: Callable[[], dict[str, int]] = dict


class StateCollector(Collector):
    """Turns the state at scrape time into series.

    Args:
        sources: where the state is.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Read the state and write its series."""
        sources = self._sources
        queue = sources.queue()
        yield from _queue_series(queue)
        yield from _decision_series(queue)
        yield from _worker_series(queue.router.workers, queue.router.prefillers)
        yield from _worth_series(replica_worths(queue.router.workers))
        yield from _prefill_series(queue.router)
        yield counter(
            "handoffs",
            "Prompts sent to a prefill worker: done, failed, or missing how to fetch them",
            keyed(sources.handoffs()),
            ["result"],
        )
        yield from _affinity_series(queue.router.affinity)
        yield from _tenant_series(queue.router.tenants)
        yield from _watch_series(sources.fleet())
        yield from _light_series(*sources.light())
        yield from _shell_series(sources)


def _light_series(held: int, ended: dict[str, int]) -> Iterator[Metric]:
    yield gauge("light_running", "Requests at workers that skipped the queue", held)
    yield counter("light_ended", "How they ended", keyed(ended), ["outcome"])


def _shell_series(sources: Sources) -> Iterator[Metric]:
    """What moves the bytes, and the refresher."""
    yield counter(
        "retries",
        "Other workers tried before the first byte; over_budget: not tried, as too many were",
        keyed(sources.retries()),
        ["reason"],
    )
    failures = sources.refresh_failures()
    yield counter("price_refresh_failures", "Price refreshes that raised", {(): failures})
    held = sources.bytes_held()
    yield gauge("body_bytes_held", "Bytes of request bodies in memory", held)
    yield counter(
        "spans",
        "OpenTelemetry spans: ended, exported, failed; the rest waits, at most spans_max",
        keyed(sources.spans()),
        ["result"],
    )
    tasks = len(asyncio.all_tasks())
    yield gauge("tasks", "Asyncio tasks alive: a few, and a few for each request", tasks)


def _queue_series(stats: QueueStats) -> Iterator[Metric]:
    router = stats.router
    yield gauge("queue_waiting", "Requests waiting for a start", router.waiting)
    yield gauge("queue_running", "Requests started and not ended", router.running)
    yield gauge("queue_oldest_wait_seconds", "Wait of the oldest request", router.oldest_wait_s)
    yield gauge("queue_draining", "Whether new requests are turned away", stats.draining)
    yield gauge(
        "accounting_imbalance",
        "Entered less waiting, running and ended: anything but 0 is a lost request",
        stats.imbalance,
    )
    yield gauge("arrivals_per_second", "Arrival rate of late", router.arrivals_per_s)
    entered = router.entered + stats.refused_at_door
    yield counter("requests_entered", "Requests that came", {(): entered})
    refused = {reason.value: count for reason, count in router.refused.items()}
    refused["draining"] = refused.get("draining", 0) + stats.refused_at_door
    ended = {outcome.value: count for outcome, count in router.ended.items()}
    ended["refused"] = sum(refused.values())
    yield counter("requests_ended", "How requests ended", keyed(ended), ["outcome"])
    yield counter("refusals", "Requests turned away", keyed(refused), ["reason"])


def _decision_series(stats: QueueStats) -> Iterator[Metric]:
    router = stats.router
    yield gauge("ticking", "Whether the last decision went well", stats.ticking)
    yield counter("ticks", "Decisions", {(): router.ticks})
    yield counter("tick_errors", "Decisions that raised", {(): stats.tick_errors})
    yield counter("event_errors", "Events the router could not book", {(): stats.event_errors})
    yield gauge("falling_back", "Whether decisions are first come first served", stats.falling_back)
    yield counter("late_ticks", "Decisions over their time", {(): stats.late_ticks})
    yield counter(
        "fallback_ticks", "Decisions first come first served", {(): router.fallback_ticks}
    )
    yield counter("starts", "Requests sent to a worker", {(): router.starts})
    yield counter("returns", "Starts a worker did not take", {(): router.returns})
    yield counter("price_refreshes", "Prices adopted", {(): router.price_refreshes})
    yield counter("prices_dropped", "Prices not adopted", {(): router.prices_dropped})
    changes = {"rise": router.rate_rises, "fall": router.rate_falls}
    yield counter("rate_shifts", "Changes of the arrival rate noticed", keyed(changes), ["kind"])
    age_s = router.price_age_s
    yield gauge("price_age_seconds", "Age of the prices in use; absent before the first", age_s)


def _prefill_series(router: RouterStats) -> Iterator[Metric]:
    """The prefill workers, and what is decided about them."""
    yield counter("prefills", "Prompts to be sent to a prefill worker", {(): router.prefills})
    yield counter("holds_passed", "Prefills held too long and redone", {(): router.holds_passed})
    yield counter(
        "whole_on_decode",
        "Requests not to be split whose prompt a decode worker computed",
        {(): router.whole_on_decode},
    )
    for name, text in (
        ("legs", "Prompts sent and not answered"),
        ("leg_tokens", "Tokens of prompts sent and not answered"),
        ("kv_tokens", "KV tokens charged to it"),
        ("orphaned_kv_tokens", "KV tokens nobody fetches, charged until the lease ends"),
        ("tokens_per_s", "Speed as learned"),
    ):
        values = {one.worker_id: float(getattr(one, name)) for one in router.prefillers}
        yield per_worker(f"prefill_worker_{seconds_spelled(name)}", text, values)


def _worker_series(
    workers: Sequence[WorkerStats], prefillers: Sequence[PrefillStats]
) -> Iterator[Metric]:
    price = GaugeMetricFamily(
        "bidgate_shadow_price",
        "Reward one more unit would earn: a batch slot or a KV token for one iteration",
        labels=["worker", "resource"],
    )
    for worker in workers:
        price.add_metric([worker.worker_id, "batch"], worker.price_batch)
        price.add_metric([worker.worker_id, "kv"], worker.price_kv)
    state = GaugeMetricFamily(
        "bidgate_worker_state", "1 for the state a worker is in", labels=["worker", "state"]
    )
    states = [(one.worker_id, one.state) for one in workers]
    states += [(one.worker_id, one.state) for one in prefillers]
    for name, is_in in states:
        for one in WorkerState:
            state.add_metric([name, one.value], float(is_in is one))
    yield from (price, state)
    for field, text in (
        ("startable", "Whether a request could start now"),
        ("active", "Sequences of our own requests"),
        ("foreign", "Sequences of other clients, as reported"),
        ("batch_limit", "Batch slots"),
        ("kv_tokens", "KV tokens our own requests hold"),
        ("kv_capacity_tokens", "KV tokens there are"),
        ("iteration_s", "Time of one decode iteration, as the engine tells it"),
        ("token_s", "What a batch slot was seen to take for a token, prefills included"),
    ):
        told = ((worker.worker_id, getattr(worker, field)) for worker in workers)
        values = {name: float(value) for name, value in told if value is not None}
        yield per_worker(f"worker_{seconds_spelled(field)}", text, values)


def _worth_series(worths: Iterable[ReplicaWorth]) -> Iterator[Metric]:
    """What one more worker would add; classes are bounded by control."""
    iteration = GaugeMetricFamily(
        "bidgate_replica_worth",
        "At most how much reward per decode iteration one more worker of a class would add",
        labels=["worker_class"],
    )
    second = GaugeMetricFamily(
        "bidgate_replica_worth_per_second",
        "The same per second, at the pace of such a worker",
        labels=["worker_class"],
    )
    for worth in worths:
        iteration.add_metric([worth.worker_class], worth.per_iteration)
        second.add_metric([worth.worker_class], worth.per_s)
    yield from (iteration, second)


def _affinity_series(affinity: AffinityStats) -> Iterator[Metric]:
    """Prefix caches: what the reward for them gained, and what the engines found."""
    prompts = affinity.prompt_tokens
    yield counter(
        "affinity_prompt_tokens", "Started prompt tokens that might be cached", {(): prompts}
    )
    hits = {"with": affinity.hit_tokens, "without": affinity.hit_tokens_unswayed}
    yield counter(
        "affinity_hit_tokens",
        "Of these, believed cached where started, or where they had gone without the reward",
        keyed(hits),
        ["affinity"],
    )
    rate = GaugeMetricFamily(
        "bidgate_affinity_hit_rate", "The same as a share since the start", labels=["affinity"]
    )
    for name, tokens in hits.items():
        rate.add_metric([name], tokens / prompts if prompts else 0.0)
    yield rate
    for name, text, counts in (
        ("queries", "Prompt tokens its engine looked up in its prefix cache", affinity.queries),
        ("hits", "Of these, found", affinity.hits),
    ):
        yield counter(f"worker_prefix_{name}", text, keyed(counts), ["worker"])
    for name, text, values in (
        ("hit_rate", "Prefix cache hits over queries of late, by its engine", affinity.observed),
        ("guessed_rate", "The same as guessed here, uncorrected", affinity.guessed),
        ("correction", "What guesses are multiplied by", affinity.correction),
        ("held_tokens", "Prompt tokens believed to be in its prefix cache", affinity.held_tokens),
    ):
        yield per_worker(f"worker_prefix_{name}", text, values)
    yield per_worker(
        "worker_prefill_tokens_per_second",
        "Pace at which its engine computes prompts, as learned",
        affinity.prefill_tokens_per_s,
    )


def _tenant_series(tenants: Iterable[TenantStats]) -> Iterator[Metric]:
    """Only tenants that the settings name have series of their own."""
    tenants = tuple(tenants)
    for name, field, text in (
        ("waiting", "waiting", "Requests waiting for a start"),
        ("share", "share", "Part of all recent use, 0 to 1"),
        ("discount", "discount", "What its rewards are multiplied by; below 1 is over its share"),
    ):
        family = GaugeMetricFamily(f"bidgate_tenant_{name}", text, labels=["tenant"])
        for tenant in tenants:
            family.add_metric([tenant.tenant], float(getattr(tenant, field)))
        yield family
    tokens = {tenant.tenant: tenant.decode_tokens for tenant in tenants}
    yield counter("tenant_decode_tokens", "Output tokens served", keyed(tokens), ["tenant"])


def _watch_series(watches: Iterable[WatchStats]) -> Iterator[Metric]:
    watches = tuple(watches)
    stale = {watch.worker_id: float(watch.metrics_stale) for watch in watches}
    yield per_worker("worker_metrics_stale", "Up, and its metrics missing or too old", stale)
    for name, text in (
        ("scrapes_failed", "Failed scrapes"),
        ("health_failures", "Failed health checks"),
        ("times_lost", "Times it went down"),
        ("stalls", "Times its engine stood still with requests running"),
        ("restarts", "Times it was restarted"),
    ):
        counts = {watch.worker_id: getattr(watch, name) for watch in watches}
        yield counter(f"worker_{name}", text, keyed(counts), ["worker"])
