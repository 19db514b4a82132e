"""`bidgate-load bench ...`: measurements of the router itself."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from loadgen.bench_light import LightLoadSpec, light_load_summary, measure_light_load
from loadgen.cluster import ClusterSpec
from loadgen.comparison import seconds_text, value_at
from loadgen.live import command_line, run
from loadgen.outcomes import OUTCOMES_FILE, write_outcomes
from loadgen.summary import SUMMARY_FILE, write_json
from loadgen.tick_command import tick
from service.control.config import PolicyName

DEFAULT_OUT = Path("out/bench")
LIGHT_FOLDER = "light-load"
TICK_FOLDER = "tick"


def every_bench(*, out: Path = DEFAULT_OUT) -> int:
    """Run every benchmark, one after the other.

    Parameters
    ----------
    out
        Directory; each benchmark gets a folder in it.
    """
    return max(light_load(out=out / LIGHT_FOLDER), tick(out=out / TICK_FOLDER))


def light_load(
    *,
    out: Path = DEFAULT_OUT / LIGHT_FOLDER,
    policy: PolicyName = PolicyName.ONLINE_LP,
    workers: int = 4,
    batch_limit: int = 16,
    rate: float = 10.0,
    duration_s: float = 20.0,
    seed: int = 0,
) -> int:
    """Measure what the router adds when nothing is scarce; the goal is a queue p50 below 2 ms.

    Parameters
    ----------
    out
        Directory for summary.json, outcomes.jsonl and logs.
    policy
        The router's policy.
    workers
        Mock workers to start.
    batch_limit
        Requests in one worker's batch.
    rate
        Requests per second, through the router and as many straight to a worker.
    duration_s
        How long.
    seed
        Of the arrivals.
    """
    cluster = ClusterSpec(
        workers=workers,
        batch_limit=batch_limit,
        profile="llama-3-8b-a100",
        time_scale=1.0,
        log_dir=out / "logs",
    )
    spec = LightLoadSpec(
        cluster=cluster, policy=policy.value, rate_per_s=rate, duration_s=duration_s, seed=seed
    )
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status(f"light load for {duration_s:g} s"):
        records = run(measure_light_load(spec))
    write_outcomes(records, out / OUTCOMES_FILE)
    summary = light_load_summary(spec, records, command_line())
    write_json(summary, out / SUMMARY_FILE)
    for title, key in (
        ("time in the central queue", "queue_s"),
        ("TTFT through the router", "ttft_routed_s"),
        ("TTFT straight to a worker", "ttft_direct_s"),
        ("added to TTFT", "added_ttft_s"),
    ):
        shown = (value_at(summary[key], (name,)) for name in ("p50", "p99"))
        p50, p99 = ("-" if value is None else seconds_text(value) for value in shown)
        console.print(f"{title:<28} p50 {p50:>9}   p99 {p99:>9}")
    console.print(f"goal (queue p50 < 2 ms): {'met' if summary['goal_met'] else 'NOT met'}")
    return 0 if summary["goal_met"] else 1
