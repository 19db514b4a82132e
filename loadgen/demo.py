"""The demo: the same requests against one policy after another, on a cluster of mock workers.

Each policy gets fresh processes (mock workers and the router, real HTTP on loopback) and the same
workload, so that nothing but the policy differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadgen.arrivals import Poisson, load_to_rate
from loadgen.cluster import ClusterSpec, running_cluster
from loadgen.cpu import CpuMeter, processors
from loadgen.live import run_with_progress
from loadgen.outcomes import OUTCOMES_FILE, OutcomeRecord, write_outcomes
from loadgen.replay import Replay, ReplaySettings
from loadgen.report import CPU_KEY, write_report
from loadgen.summary import RunContext
from loadgen.trace_record import TraceRequest
from loadgen.traces import Trace
from loadgen.workload import Prediction, WorkloadSpec, build_workload, mean_lengths
from service.control.config import PolicyName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.progress import Progress

    from loadgen.summary import JsonValue

MAX_TOKENS_CAP = 1024
"""max_tokens of every request: the router must not learn an answer's length from it."""
WARM_UP_REQUESTS = 16
WARM_UP_GAP_S = 0.05
WARM_UP_TOKENS = 16
WARM_UP_DRAIN_S = 10.0
CAVEATS: tuple[str, ...] = (
    "Workers are models: they keep the iteration times of an A100 but compute nothing. Real "
    "engines add effects that this page cannot show.",
    "A run of half a minute starts empty and ends empty, so it says little about a queue that "
    "lasts for hours.",
    "round_robin and least_outstanding send each request at once into a worker's own queue, as "
    "routers do today. Part of online_lp's gain is holding requests back until a worker can start "
    "them, part is letting short ones go first; bidgate-load experiments takes them apart.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSpec:
    """One demo.

    Attributes:
        cluster: what is started for each policy.
        trace: where lengths come from.
        policies: in the order in which they run.
        load: offered decode work over the batch capacity of all workers.
        duration_s: about how long requests arrive; see build_demo_workload.
        drain_s: how long answers are waited for after that.
        prediction: how well the router is told the decode lengths.
        ttft_bound_s: the bound on time to first token that is reported on.
        seed: of lengths, arrivals and forecast noise.
    """

    cluster: ClusterSpec
    trace: Trace
    policies: Sequence[PolicyName]
    load: float
    duration_s: float
    drain_s: float
    prediction: Prediction
    ttft_bound_s: float
    seed: int

    def rate_per_s(self) -> float:
        """Arrival rate that offers the load."""
        cluster = self.cluster
        _, decode_tokens = mean_lengths(self.trace, self.seed)
        return load_to_rate(
            self.load, decode_tokens, cluster.workers, cluster.batch_limit, self.iteration_s()
        )

    def iteration_s(self) -> float:
        """Seconds of a decode iteration at full batch, each request half decoded."""
        prompt_tokens, decode_tokens = mean_lengths(self.trace, self.seed)
        return self.cluster.iteration_s(prompt_tokens + decode_tokens / 2)

    def capacity_tokens_per_s(self) -> float:
        """Output tokens per second of all workers at full batch, without prefill."""
        return self.cluster.workers * self.cluster.batch_limit / self.iteration_s()


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What one policy left: its records, how many were sent, and the shares of CPU used.

    Attributes:
        cpu_share: of all processors, by this run.
        others_share: by everybody else meanwhile.
    """

    records: list[OutcomeRecord]
    sent: int
    cpu_share: float | None
    others_share: float | None = None


async def run_policies(
    spec: DemoSpec, requests: Sequence[TraceRequest], progress: Progress
) -> dict[str, PolicyRun]:
    """Run every policy in turn on fresh processes.

    Raises:
        ClusterError: when a process does not start or a port is taken.
    """
    return {
        policy.value: await run_policy(spec, policy, requests, progress) for policy in spec.policies
    }


def report_demo(
    spec: DemoSpec,
    requests: Sequence[TraceRequest],
    runs: Mapping[str, PolicyRun],
    command: str,
    out_dir: Path,
) -> dict[str, JsonValue]:
    """Write records, summary, picture and page; returns the summary."""
    records = [record for run in runs.values() for record in run.records]
    write_outcomes(records, out_dir / OUTCOMES_FILE)
    context = RunContext(
        command=command,
        ttft_bound_s=spec.ttft_bound_s,
        sent={name: run.sent for name, run in runs.items()},
        setting=demo_setting(spec, requests, runs),
    )
    return write_report(records, context, out_dir)


def build_demo_workload(spec: DemoSpec) -> list[TraceRequest]:
    """Make the one list of requests that every policy gets.

    A few hundred lengths can miss their mean by a tenth, which near capacity decides everything.
    So the arrival times are stretched until this very sample offers the load that was asked.
    """
    requests = build_workload(
        WorkloadSpec(
            trace=spec.trace,
            arrivals=Poisson(),
            rate_per_s=spec.rate_per_s(),
            duration_s=spec.duration_s,
            prediction=spec.prediction,
            decode_tokens_max=MAX_TOKENS_CAP,
            seed=spec.seed,
        )
    )
    offered = sum(request.decode_tokens for request in requests) / spec.duration_s
    stretch = offered / (spec.load * spec.capacity_tokens_per_s())
    return [replace(request, arrival_s=request.arrival_s * stretch) for request in requests]


async def run_policy(
    spec: DemoSpec, policy: PolicyName, requests: Sequence[TraceRequest], progress: Progress
) -> PolicyRun:
    """Send the workload to a fresh cluster under one policy."""
    async with running_cluster(spec.cluster, policy.value) as cluster:
        settings = ReplaySettings(
            url=cluster.router_url,
            policy=policy.value,
            max_tokens_cap=MAX_TOKENS_CAP,
            drain_s=spec.drain_s,
        )
        await Replay(warm_up_workload(), replace(settings, drain_s=WARM_UP_DRAIN_S)).run()
        meter = CpuMeter.start([child.process.pid for child in cluster.children])
        replay = Replay(requests, settings)
        records = await run_with_progress(replay, len(requests), policy.value, progress)
        return PolicyRun(records, replay.sent, meter.share(), meter.others_share())


def warm_up_workload() -> list[TraceRequest]:
    """A few short requests that open connections and load code, so that none is measured cold."""
    return [
        TraceRequest(index * WARM_UP_GAP_S, WARM_UP_TOKENS, WARM_UP_TOKENS, WARM_UP_TOKENS)
        for index in range(WARM_UP_REQUESTS)
    ]


def demo_setting(
    spec: DemoSpec, requests: Sequence[TraceRequest], runs: Mapping[str, PolicyRun]
) -> dict[str, JsonValue]:
    """Tell everything a reader needs to judge the run; goes into summary.json and the page."""
    cluster = spec.cluster
    decode_tokens = sum(request.decode_tokens for request in requests)
    return {
        "title": "bidgate demo: policies compared",
        "asked": (
            "The same requests, sent at the same times, to the same workers: "
            "how long until the first token, and until the last, under each policy?"
        ),
        "workers": cluster.workers,
        "batch_limit": cluster.batch_limit,
        "worker_profile": cluster.profile,
        "worker_time_scale": cluster.time_scale,
        "iteration_at_full_batch_s": spec.iteration_s(),
        "capacity_in_output_tokens_per_s": spec.capacity_tokens_per_s(),
        "trace": spec.trace.name,
        "arrivals": "Poisson, open loop",
        "load": spec.load,
        "requests": len(requests),
        "mean_prompt_tokens": sum(r.prompt_tokens for r in requests) / len(requests),
        "mean_decode_tokens": decode_tokens / len(requests),
        "last_arrival_s": requests[-1].arrival_s,
        "prediction_of_decode_length": spec.prediction.value,
        "seed": spec.seed,
        "processors": processors(),
        CPU_KEY: {name: run.cpu_share for name, run in runs.items()},
        "caveats": list(CAVEATS),
    }


def title(spec: DemoSpec) -> str:
    """Name the run in one line."""
    cluster = spec.cluster
    return (
        f"{cluster.workers} mock workers x batch {cluster.batch_limit}, "
        f"{spec.trace.name} lengths, load {spec.load:g}"
    )
