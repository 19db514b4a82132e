"""What is kept of a simulation: one flat set of named numbers, and series where asked.

Latencies are in seconds over all requests that were served or refused: a refused request counts
with its whole wait, which is less than what serving it would have taken. Requests lost with a
failed worker have no latency; their share stands beside. Throughput is counted until the last
arrival, so that the time in which a run empties does not dilute it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from loadgen.outcomes import End
from loadgen.summary import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.simulation_records import SimulatedRequest, SimulationResult

P999 = 99.9
WINDOWS = 24
"""Equal pieces of the time of arrivals, for pictures over time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers of one simulation, by name; a name is absent where there is no such number."""

    values: dict[str, float]
    series: dict[str, list[float | None]] = field(default_factory=dict)


def measure(result: SimulationResult, *, windows: bool = False) -> Measured:
    """Sum up a run, whole and by tenant ("tenant.measure")."""
    until_s = max(request.trace.arrival_s for request in result.requests)
    values = _of_requests(result.requests, until_s, result.ttft_bound_s)
    for tenant in sorted({request.trace.tenant for request in result.requests} - {""}):
        own = [request for request in result.requests if request.trace.tenant == tenant]
        found = _of_requests(own, until_s, result.ttft_bound_s)
        values |= {f"{tenant}.{name}": value for name, value in found.items()}
    workers = result.workers
    values["utilisation"] = math.fsum(w.batch_use for w in workers) / len(workers)
    values["kv_utilisation"] = math.fsum(w.kv_use for w in workers) / len(workers)
    values["preemptions"] = float(sum(worker.preemptions for worker in workers))
    queries = sum(worker.prefix_queries for worker in workers)
    if queries:
        values["hit_rate"] = sum(worker.prefix_hits for worker in workers) / queries
        shares = [worker.batch_use for worker in workers]
        values["load_spread"] = max(shares) / max(min(shares), 1e-9)
        sent = Counter(request.worker for request in result.requests if request.worker)
        values["busiest_share"] = max(sent.values()) / max(sent.total(), 1)
    values["iteration_s"] = result.iteration_s
    if result.router is not None:
        values["faults"] = float(result.router.fallback_ticks)
        guessed = result.router.affinity
        if guessed.prompt_tokens:
            values["guessed_hit_rate"] = guessed.hit_tokens / guessed.prompt_tokens
    series = {"ttft_by_window_s": ttft_by_window(result.requests, until_s)} if windows else {}
    return Measured(values=values, series=series)


def ttft_by_window(requests: Sequence[SimulatedRequest], until_s: float) -> list[float | None]:
    """Mean TTFT of the requests that arrived in each of WINDOWS equal pieces of time."""
    sums, counts = np.zeros(WINDOWS), np.zeros(WINDOWS)
    for request in requests:
        waited_s = _ttft_s(request)
        if waited_s is not None:
            window = min(WINDOWS - 1, int(request.trace.arrival_s / until_s * WINDOWS))
            sums[window] += waited_s
            counts[window] += 1
    return [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]


def tokens_until(requests: Sequence[SimulatedRequest], until_s: float) -> float:
    """Output tokens produced until a time; those of a request are spread evenly over its decode."""
    total = 0.0
    for request in requests:
        first_s, end_s, tokens = request.first_token_s, request.end_s, request.output_tokens
        if first_s is None or end_s is None or first_s > until_s or not tokens:
            continue
        span_s = end_s - first_s
        done = 1.0 if end_s <= until_s else (until_s - first_s) / span_s
        total += 1.0 + (tokens - 1) * done
    return total


def reward_until(requests: Sequence[SimulatedRequest], until_s: float) -> float:
    """Mean reward of [OLP] 3.1 with weights (0, 1, 1, 0, 0, 0) and T the given time, seconds.

    A request earns the time from its first token to T and that from its end to T, neither below 0.
    """
    earned = 0.0
    for request in requests:
        if request.outcome is End.COMPLETED and request.first_token_s is not None:
            ends_s = (request.first_token_s, request.end_s or until_s)
            earned += sum(max(until_s - end_s, 0.0) for end_s in ends_s)
    return earned / len(requests)


def _of_requests(
    requests: Sequence[SimulatedRequest], until_s: float, bound_s: float
) -> dict[str, float]:
    entered = len(requests)
    ttft_s = [wait for request in requests if (wait := _ttft_s(request)) is not None]
    e2e_s = [
        request.end_s - request.trace.arrival_s
        for request in requests
        if request.end_s is not None and request.outcome is not End.FAILED
    ]
    within = sum(
        request.outcome is End.COMPLETED
        and (request.ttft_s or 0.0) <= (request.trace.ttft_bound_s or bound_s)
        for request in requests
    )
    in_time = sum(r.outcome is End.COMPLETED and (r.end_s or 0.0) <= until_s for r in requests)
    values = {
        "requests": float(entered),
        "share_within": within / entered,
        "share_refused": sum(r.outcome is End.REFUSED for r in requests) / entered,
        "share_failed": sum(r.outcome is End.FAILED for r in requests) / entered,
        "reward_s": reward_until(requests, until_s),
        "tokens_per_s": tokens_until(requests, until_s) / until_s,
        "requests_per_s": in_time / until_s,
        "arrivals_per_s": entered / until_s,
    }
    for name, samples in (("ttft", ttft_s), ("e2e", e2e_s)):
        for statistic, value in stats(samples).items():
            if isinstance(value, float):
                values[f"{name}_{statistic}_s"] = value
    if ttft_s:
        values["ttft_p999_s"] = float(np.percentile(ttft_s, P999))
    return values


def _ttft_s(request: SimulatedRequest) -> float | None:
    """Time to first token; of a refused request its wait; None for one lost with its worker."""
    if request.outcome is End.FAILED:
        return None
    if request.ttft_s is not None:
        return request.ttft_s
    return None if request.end_s is None else request.end_s - request.trace.arrival_s
