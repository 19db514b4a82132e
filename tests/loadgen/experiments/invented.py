"""Results that nobody simulated: a number for every measure, made from the rule's label.

Reports, claims and pages are functions of results, so they can be tried on any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.experiments.measures import WINDOWS, Measured
from loadgen.experiments.reserve import FIRST_TIER
from loadgen.experiments.rules import Kind
from loadgen.experiments.tiers import BATCH_TIER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from loadgen.experiments.cases import Case

LATENCIES = ("mean", "p50", "p95", "p99", "max")


def invented(case: Case, wait_s: float) -> Measured:
    """Measures of a case whose mean wait is given; throughput falls as the wait grows."""
    values = {
        "offered_load": 1.0,
        "offered_kv_load": 0.5,
        "gap_variation": 1.0,
        "mean_prompt_tokens": 300.0,
        "mean_decode_tokens": 200.0,
        "mean_kv_iterations": 40_000.0,
        "ttft_mean_s": wait_s,
        "e2e_mean_s": 2.0 + wait_s,
        "share_within": 1.0 / (1.0 + wait_s),
        "reward_s": 100.0 / (1.0 + wait_s),
    }
    if case.rule.kind in (Kind.HINDSIGHT, Kind.REWARD_BOUND, Kind.OFFLINE):
        return Measured(values)
    for number, name in enumerate(LATENCIES):
        values[f"ttft_{name}_s"] = wait_s * (1 + number)
        values[f"e2e_{name}_s"] = 2.0 + wait_s * (1 + number)
    values |= {
        "tokens_per_s": 5000.0 / (1.0 + wait_s),
        "requests_per_s": 25.0 / (1.0 + wait_s),
        "share_refused": 0.0,
        "share_failed": 0.0,
        "preemptions": 0.0,
        "hit_rate": 0.5 / (1.0 + wait_s),
        "busiest_share": 0.25 + 0.1 * (wait_s > 1.0),
        "utilisation": 0.9,
        "kv_utilisation": 0.4,
        "faults": 0.0,
    }
    if case.load.tiers:
        for tier in (FIRST_TIER, BATCH_TIER):
            values |= {f"{tier}.{name}": value for name, value in values.items() if "." not in name}
    times: list[float | None] = [0.25 * step for step in range(8)]
    series: dict[str, list[float | None]] = {
        "ttft_by_window_s": [wait_s] * WINDOWS,
        "price_time_s": times,
        "price_of_batch": [1.0] * len(times),
        "price_of_kv": [2.0] * len(times),
        "tick_s": [0.001, 0.002],
        "refresh_s": [0.003],
    }
    return Measured(values, series)


def invented_results(
    cases: Iterable[Case], waits_s: Mapping[str, float], default_s: float = 1.0
) -> dict[Case, Measured]:
    """Results of many cases; the wait of each is looked up by its rule's label."""
    return {case: invented(case, waits_s.get(case.rule.label, default_s)) for case in cases}
