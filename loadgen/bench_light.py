"""What the router adds when nothing is scarce: queue time and time to first token, light load.

Two equal Poisson streams of short requests run side by side on one idle cluster: one through the
router, one straight to a worker. The router reports its queue time per request; the difference of
the medians of the time to first token is everything it adds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadgen.arrivals import Poisson
from loadgen.cluster import ClusterSpec, running_cluster
from loadgen.cpu import processors
from loadgen.demo import warm_up_workload
from loadgen.outcomes import End, OutcomeRecord
from loadgen.replay import Replay, ReplaySettings
from loadgen.summary import stats
from loadgen.traces import open_trace
from loadgen.workload import Prediction, WorkloadSpec, build_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue
    from loadgen.trace_record import TraceRequest

LIGHT_TRACE = "fixed:32x4"
MAX_TOKENS_CAP = 64
DRAIN_S = 10.0
QUEUE_GOAL_P50_S = 0.002
ROUTED, DIRECT = "routed", "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class LightLoadSpec:
    """One measurement.

    Attributes:
        cluster: what is started.
        policy: the router's policy.
        rate_per_s: arrival rate of each of the two streams.
        duration_s: how long they last.
        seed: of both; their arrivals differ.
    """

    cluster: ClusterSpec
    policy: str = "online_lp"
    rate_per_s: float = 10.0
    duration_s: float = 20.0
    seed: int = 0


async def measure_light_load(spec: LightLoadSpec) -> list[OutcomeRecord]:
    """Run both streams on a fresh cluster; records carry the policy "routed" or "direct"."""
    async with running_cluster(spec.cluster, spec.policy) as cluster:
        routed = ReplaySettings(
            url=cluster.router_url, policy=ROUTED, max_tokens_cap=MAX_TOKENS_CAP, drain_s=DRAIN_S
        )
        direct = replace(routed, url=cluster.worker_urls[0], policy=DIRECT)
        for settings in (routed, direct):
            await Replay(warm_up_workload(), settings).run()
        both = await asyncio.gather(
            Replay(_light_workload(spec, spec.seed), routed).run(),
            Replay(_light_workload(spec, spec.seed + 1), direct).run(),
        )
    return [record for records in both for record in records]


def light_load_summary(
    spec: LightLoadSpec, records: Sequence[OutcomeRecord], command: str
) -> dict[str, JsonValue]:
    """Say what the router added, in seconds, and whether the goal is met."""
    routed = [r for r in records if r.policy == ROUTED and r.outcome is End.COMPLETED]
    direct = [r for r in records if r.policy == DIRECT and r.outcome is End.COMPLETED]
    queue_s = stats([r.queue_s for r in routed if r.queue_s is not None])
    ttft_routed_s = stats([r.ttft_s for r in routed if r.ttft_s is not None])
    ttft_direct_s = stats([r.ttft_s for r in direct if r.ttft_s is not None])
    p50_s = queue_s["p50"]
    return {
        "command": command,
        "policy": spec.policy,
        "workers": spec.cluster.workers,
        "batch_limit": spec.cluster.batch_limit,
        "rate_per_s_of_each_stream": spec.rate_per_s,
        "duration_s": spec.duration_s,
        "trace": LIGHT_TRACE,
        "seed": spec.seed,
        "processors": processors(),
        "entered": len(records),
        "completed": len(routed) + len(direct),
        "queue_s": queue_s,
        "ttft_routed_s": ttft_routed_s,
        "ttft_direct_s": ttft_direct_s,
        "added_ttft_s": _difference(ttft_routed_s, ttft_direct_s),
        "goal_queue_p50_s": QUEUE_GOAL_P50_S,
        "goal_met": isinstance(p50_s, float) and p50_s < QUEUE_GOAL_P50_S,
    }


def _difference(routed: dict[str, JsonValue], direct: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Subtract quantile from quantile: of the distributions, not of single requests."""
    found: dict[str, JsonValue] = {}
    for name, value in routed.items():
        base = direct.get(name)
        both = isinstance(value, float) and isinstance(base, float)
        found[name] = value - base if both else None  # type: ignore[operator]
    return found


def _light_workload(spec: LightLoadSpec, seed: int) -> list[TraceRequest]:
    return build_workload(
        WorkloadSpec(
            trace=open_trace(LIGHT_TRACE),
            arrivals=Poisson(),
            rate_per_s=spec.rate_per_s,
            duration_s=spec.duration_s,
            prediction=Prediction.EXACT,
            seed=seed,
        )
    )
