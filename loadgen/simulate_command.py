"""`bidgate-load simulate`: one policy, one workload, one fleet, in virtual time.

summary.json holds the policy's summary twice: flat, for scripts, and under `policies`, where
reports look. Neither it nor outcomes.jsonl depends on the machine or on where they are written.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen import simulator
from loadgen.comparison import comparison_table
from loadgen.outcomes import OUTCOMES_FILE
from loadgen.simulate_options import FleetOptions, LoadOptions, PolicyOptions, SightOptions
from loadgen.simulation_config import SimulationConfig, full_batch_iteration_s
from loadgen.simulation_records import SimulationResult, write_simulated_outcomes
from loadgen.simulator import Hooks
from loadgen.summary import SUMMARY_FILE, RunContext, summarize, write_json
from loadgen.true_jsq import TRUE_JSQ, TrueJsq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.simulation_records import SimulatedRequest
    from loadgen.summary import JsonValue
    from loadgen.trace_record import TraceRequest

DEFAULT_OUT = Path("out/simulate")
PROGRESS_STEP = 100
"""Requests between two movements of the progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """All flags but the output directory."""

    fleet: FleetOptions
    load: LoadOptions
    policy: PolicyOptions
    sight: SightOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the flags come to.

    Attributes:
        config: fleet, router settings, telemetry.
        requests: the workload.
        setting: what a reader of the summary must know.
    """

    config: SimulationConfig
    requests: list[TraceRequest]
    setting: dict[str, JsonValue]


def simulate(
    *,
    out: Path = DEFAULT_OUT,
    fleet: FleetOptions | None = None,
    load: LoadOptions | None = None,
    policy: PolicyOptions | None = None,
    sight: SightOptions | None = None,
) -> None:
    """Run one policy over a workload and a fleet of decode models in virtual time.

    Parameters
    ----------
    out
        Directory for summary.json and outcomes.jsonl.
    """
    options = SimulateOptions(
        fleet=fleet or FleetOptions(),
        load=load or LoadOptions(),
        policy=policy or PolicyOptions(),
        sight=sight or SightOptions(),
    )
    plan = make_plan(options)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    began_s = time.perf_counter()
    result = _run(options.policy.policy, plan, Console(stderr=True))
    took_s = time.perf_counter() - began_s
    write_simulated_outcomes([result], out / OUTCOMES_FILE)
    summary = whole_summary(result, options, plan)
    write_json(summary, out / SUMMARY_FILE)
    console.print(comparison_table(summary, _title(result, plan)))
    console.print(f"\n{result.end_s:.1f} s simulated in {took_s:.1f} s")
    console.print(f"In {out}: {SUMMARY_FILE} {OUTCOMES_FILE}")


def make_plan(options: SimulateOptions) -> Plan:
    """Turn flags into a simulation.

    Raises:
        ValueError: when they do not fit together.
    """
    lengths = options.load.lengths()
    workers = options.fleet.fleet(lengths)
    rate_per_s = options.load.rate_per_s(workers, lengths)
    requests = options.load.workload(rate_per_s)
    config = SimulationConfig(
        workers=workers,
        control=options.policy.control(
            decode_only=options.fleet.decode_only, seed=options.load.seed
        ),
        telemetry=options.sight.telemetry(options.fleet.iteration_error),
        outages=options.fleet.outages(),
        patience_s=options.sight.patience_s or float("inf"),
        ttft_bound_s=options.policy.ttft_bound_s,
    )
    offered = sum(request.decode_tokens for request in requests)
    last_s = requests[-1].arrival_s
    capacity_per_s = sum(w.batch_limit / full_batch_iteration_s(w, requests) for w in workers)
    setting: dict[str, JsonValue] = {
        **{name: value for group in _groups(options) for name, value in _values(group).items()},
        "title": "bidgate-load simulate",
        "asked": f"How does {options.policy.policy} serve {len(requests)} requests?",
        "requests": len(requests),
        "requests_per_s": rate_per_s or (len(requests) / last_s if last_s > 0 else None),
        "offered_load": offered / (last_s * capacity_per_s) if last_s > 0 else None,
        "mean_prompt_tokens": sum(request.prompt_tokens for request in requests) / len(requests),
        "mean_decode_tokens": offered / len(requests),
        "full_batch_iteration_s": full_batch_iteration_s(workers[0], lengths),
    }
    return Plan(config=config, requests=requests, setting=setting)


def whole_summary(
    result: SimulationResult, options: SimulateOptions, plan: Plan
) -> dict[str, JsonValue]:
    """Make the content of summary.json."""
    context = RunContext(
        command=_command_line(options),
        ttft_bound_s=result.ttft_bound_s,
        sent={result.policy: len(result.requests)},
        setting=plan.setting,
    )
    mine = result.summary()
    summary = summarize(result.outcome_records(), context)
    return {**summary, "policies": {result.policy: mine}, **mine}


def _run(policy: str, plan: Plan, console: Console) -> SimulationResult:
    controller = None
    if policy == TRUE_JSQ:
        controller = TrueJsq({str(i): r.decode_tokens for i, r in enumerate(plan.requests)})
    with Progress(
        TextColumn(policy),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests ended"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(policy, total=len(plan.requests))
        ended = 0

        def count(_: SimulatedRequest) -> None:
            nonlocal ended
            ended += 1
            if ended % PROGRESS_STEP == 0:
                progress.update(task, completed=ended)

        return simulator.simulate(
            plan.requests, plan.config, controller, name=policy, hooks=Hooks(on_end=count)
        )


def _title(result: SimulationResult, plan: Plan) -> str:
    return (
        f"{len(plan.requests)} requests, {len(plan.config.workers)} workers, "
        f"utilisation {result.summary()['utilisation']:.0%}"
    )


def _groups(
    options: SimulateOptions,
) -> tuple[FleetOptions | LoadOptions | PolicyOptions | SightOptions, ...]:
    return options.policy, options.fleet, options.load, options.sight


def _values(
    group: FleetOptions | LoadOptions | PolicyOptions | SightOptions,
) -> dict[str, JsonValue]:
    values: dict[str, JsonValue] = {}
    for spec in fields(group):
        value = getattr(group, spec.name)
        values[spec.name] = list(value) if isinstance(value, tuple) else value
    return values


def _command_line(options: SimulateOptions) -> str:
    """Write the flags that differ from their defaults; not where the results went."""
    words: Sequence[str] = ["bidgate-load", "simulate"]
    for group in _groups(options):
        for spec in fields(group):
            value = getattr(group, spec.name)
            if value != spec.default:
                words = [*words, *_flag("--" + spec.name.replace("_", "-"), value)]
    return shlex.join(words)


def _flag(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, tuple):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]
