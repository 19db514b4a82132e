"""`bidgate-load demo`: flags of the demo. What it does is in demo.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from loadgen.cluster import ClusterSpec
from loadgen.live import command_line, progress_bar, run
from loadgen.report import tell
from loadgen.traces import open_trace
from loadgen.workload import Prediction
from service.control.config import PolicyName

LOG_FOLDER = "logs"
DEFAULT_OUT = Path("out/demo")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Flags of the demo.

    Attributes:
        policies: policies to run, in this order.
        workers: mock workers to start.
        batch_limit: requests in one worker's batch.
        profile: whose decode iteration times the workers have.
        time_scale: above 1 the workers run faster than real time.
        trace: where prompt and answer lengths come from.
        load: offered decode work over batch capacity; near 1 is the cluster's limit.
        duration_s: about how long requests arrive, per policy; stretched to offer the load.
        drain_s: how long answers are waited for after that.
        prediction: how well the router is told decode lengths (noisy: 0.8 to 1.2 times).
        ttft_bound_s: bound on time to first token that is reported on.
        router_port: port of the router; 0 takes a free one.
        seed: of lengths, arrivals and noise.
    """

    policies: Annotated[tuple[PolicyName, ...], Parameter(consume_multiple=True, negative="")] = (
        PolicyName.ROUND_ROBIN,
        PolicyName.LEAST_OUTSTANDING,
        PolicyName.ONLINE_LP,
    )
    workers: int = 4
    batch_limit: int = 8
    profile: str = "llama-3-8b-a100"
    time_scale: float = 1.0
    trace: str = "lmsys-like"
    load: float = 1.0
    duration_s: float = 30.0
    drain_s: float = 30.0
    prediction: Prediction = Prediction.NOISY
    ttft_bound_s: float = 1.0
    router_port: int = 0
    seed: int = 0


def demo(*, out: Path = DEFAULT_OUT, options: DemoOptions | None = None) -> int:
    """Compare policies on mock workers and the router, as separate processes on loopback.

    Parameters
    ----------
    out
        Directory for summary.json, outcomes.jsonl, comparison.png, report.html and logs.
    """
    from loadgen.demo import DemoSpec, build_demo_workload, report_demo, run_policies, title

    options = options or DemoOptions()
    spec = DemoSpec(
        cluster=ClusterSpec(
            workers=options.workers,
            batch_limit=options.batch_limit,
            profile=options.profile,
            time_scale=options.time_scale,
            log_dir=out / LOG_FOLDER,
            router_port=options.router_port,
        ),
        trace=open_trace(options.trace),
        policies=options.policies,
        load=options.load,
        duration_s=options.duration_s,
        drain_s=options.drain_s,
        prediction=options.prediction,
        ttft_bound_s=options.ttft_bound_s,
        seed=options.seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    requests = build_demo_workload(spec)
    console = Console()
    with progress_bar(console) as progress:
        runs = run(run_policies(spec, requests, progress))
    summary = report_demo(spec, requests, runs, command_line(), out)
    tell(summary, title(spec), out, console)
    return 0 if all(policy.sent == len(policy.records) for policy in runs.values()) else 1
