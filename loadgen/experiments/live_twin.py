"""The simulator against the live service: the same requests and policy, once in each.

The live half is the demo's: mock workers and the router as processes on loopback, real HTTP. They
agree when the distributions of TTFT do, within a stated tolerance.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from loadgen.cluster import ClusterSpec
from loadgen.demo import DemoSpec, build_demo_workload, run_policies
from loadgen.experiments.document import (
    Cell,
    Chart,
    Claim,
    Column,
    Document,
    Panel,
    Row,
    Series,
    Table,
    Verdict,
    rounded,
)
from loadgen.experiments.experiment import Experiment, Plan, Scale, evidence
from loadgen.experiments.fleets import a100_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.lines import Results, spread
from loadgen.live import progress_bar, run
from loadgen.outcomes import End
from loadgen.simulation_config import SimulationConfig, Telemetry
from loadgen.simulator import simulate
from loadgen.summary import stats
from loadgen.traces import open_trace
from loadgen.workload import Prediction
from service.control.config import ControlConfig, PolicyName
from service.mock.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from loadgen.demo import PolicyRun
    from loadgen.outcomes import OutcomeRecord
    from loadgen.trace_record import TraceRequest

    FloatArray = npt.NDArray[np.float64]

NAME = "live-twin"
PROFILE = "llama-3-8b-a100"
WORKERS, BATCH_LIMIT = 4, 8
LOAD = 1.0
DURATION_S, DURATION_FULL_S, DRAIN_S = 20.0, 60.0, 60.0
POLICIES = (PolicyName.LEAST_OUTSTANDING, PolicyName.ONLINE_LP)
NETWORK_S = 0.001
"""One way between router and worker, assumed in the simulator."""
ITERATION_S = 0.0125
"""One decode iteration of these workers: a start that misses one by a hair waits for the next, so
waits closer than this count as equal."""
DISTANCE_MAX = 0.15
"""Largest gap between the two cumulative distributions of TTFT that is left then."""
MEAN_OFF_MAX, MEAN_OFF_FLOOR_S = 0.2, 0.025
"""The means may differ by a fifth, or by 25 ms where that is more."""
OTHERS_MAX = 0.1
"""The live half says nothing when others used more of the processors than this,"""
OWN_MAX = 0.7
"""or when its own processes used so much that they waited for each other,"""
LATE_MAX_S = 0.005
"""or when one request in a hundred was sent this much later than its time."""
CURVE_POINTS = 41


@dataclass(frozen=True, slots=True)
class Twin:
    """One policy, live and simulated; TTFT in seconds.

    Attributes:
        cpu_share: share of the machine's processors that the live processes used.
        others_share: share that everybody else used meanwhile.
        late_p99_s: how late requests were sent, 99th percentile.
    """

    policy: str
    live: tuple[float, ...]
    simulated: tuple[float, ...]
    cpu_share: float | None
    others_share: float | None
    late_p99_s: float

    @property
    def too_busy(self) -> bool:
        """Whether the machine had too much else to do for the live half to mean anything."""
        return (
            (self.others_share or 0.0) > OTHERS_MAX
            or (self.cpu_share or 0.0) > OWN_MAX
            or self.late_p99_s > LATE_MAX_S
        )

    @property
    def distance(self) -> float:
        """Distance of the two distributions."""
        return distance(self.live, self.simulated, ITERATION_S)

    @property
    def agrees(self) -> bool:
        """Whether both tolerances are kept."""
        live_s, simulated_s = float(np.mean(self.live)), float(np.mean(self.simulated))
        allowed_s = max(MEAN_OFF_MAX * simulated_s, MEAN_OFF_FLOOR_S)
        return self.distance <= DISTANCE_MAX and abs(live_s - simulated_s) <= allowed_s


def distance(first: Sequence[float], second: Sequence[float], slack: float) -> float:
    """Largest gap between two cumulative distributions, values within the slack taken as equal.

    Without slack it is the distance of Kolmogorov and Smirnov; with it, of the kind of Levy's.

    Returns:
        The larger of sup F(t) - G(t + slack) and sup G(t) - F(t + slack), at least 0.
    """
    one, other = np.sort(first), np.sort(second)
    return max(0.0, _overshoot(one, other, slack), _overshoot(other, one, slack))


def _overshoot(upper: FloatArray, lower: FloatArray, slack: float) -> float:
    share = np.searchsorted(upper, upper, side="right") / upper.size
    beyond = np.searchsorted(lower, upper + slack, side="right") / lower.size
    return float((share - beyond).max())


def plan(scale: Scale) -> Plan:
    """There is nothing to simulate beforehand: both halves run when the report is made."""
    return Plan((), partial(_report, scale))


def compare_twins(spec: DemoSpec) -> list[Twin]:
    """Run every policy of the spec live, then in virtual time.

    Raises:
        ClusterError: when a process does not start.
    """
    requests = build_demo_workload(spec)
    with progress_bar(Console(stderr=True)) as progress:
        runs = run(run_policies(spec, requests, progress))
    return [_twin(PolicyName(name), found, spec, requests) for name, found in runs.items()]


def simulated_twin(
    policy: PolicyName, spec: DemoSpec, requests: Sequence[TraceRequest]
) -> list[OutcomeRecord]:
    """Play the live run's requests in virtual time, with the service's own default settings."""
    cluster = spec.cluster
    fleet = a100_fleet(cluster.workers, cluster.batch_limit, profile=PROFILES[cluster.profile])
    config = SimulationConfig(
        workers=tuple(replace(w, iteration_factor=1.0 / cluster.time_scale) for w in fleet),
        control=ControlConfig(policy=policy),
        telemetry=Telemetry(network_s=NETWORK_S),
    )
    return simulate(requests, config).outcome_records()


def twin_spec(log_dir: Path, duration_s: float, seed: int) -> DemoSpec:
    """Describe the run that both halves make."""
    return DemoSpec(
        cluster=ClusterSpec(
            workers=WORKERS,
            batch_limit=BATCH_LIMIT,
            profile=PROFILE,
            time_scale=1.0,
            log_dir=log_dir,
        ),
        trace=open_trace("lmsys-like"),
        policies=POLICIES,
        load=LOAD,
        duration_s=duration_s,
        drain_s=DRAIN_S,
        prediction=Prediction.NOISY,
        ttft_bound_s=1.0,
        seed=seed,
    )


def _twin(
    policy: PolicyName, found: PolicyRun, spec: DemoSpec, requests: Sequence[TraceRequest]
) -> Twin:
    simulated = simulated_twin(policy, spec, requests)
    late_s = [record.sent_s - record.arrival_s for record in found.records]
    return Twin(
        policy.value,
        _ttft_s(found.records),
        _ttft_s(simulated),
        found.cpu_share,
        found.others_share,
        float(np.quantile(late_s, 0.99)),
    )


def _ttft_s(records: Sequence[OutcomeRecord]) -> tuple[float, ...]:
    return tuple(
        record.ttft_s
        for record in records
        if record.outcome is End.COMPLETED and record.ttft_s is not None
    )


def _report(scale: Scale, _: Results) -> Document:
    duration_s = DURATION_FULL_S if scale.full else DURATION_S
    with tempfile.TemporaryDirectory(prefix="bidgate-twin-") as folder:
        twins = compare_twins(twin_spec(Path(folder), duration_s, scale.seeds[0]))
    claims = tuple(twin_claim(twin) for twin in twins)
    return Document(
        title="The simulator against the live service",
        asked="Do the same requests under the same policy wait as long in the simulator as in the "
        "live service in front of mock workers?",
        answers=evidence(claims),
        setting={
            "live": f"{WORKERS} mock workers ({PROFILE}, B = {BATCH_LIMIT}) and the router as "
            "processes on loopback, streams over HTTP",
            "simulated": f"the same fleet, {1e3 * NETWORK_S:g} ms one way, shipped settings",
            "load": f"LMSYS-like lengths, load {LOAD:g}, {duration_s:g} s, forecasts within 20 %",
            "tolerance": f"means within {100 * MEAN_OFF_MAX:.0f} % or "
            f"{1e3 * MEAN_OFF_FLOOR_S:.0f} ms; distance at most {DISTANCE_MAX:g}: of the requests, "
            "the share by which one half may be ahead of the other at any time, where waits that "
            f"differ by less than an iteration ({1e3 * ITERATION_S:g} ms) count as equal",
            "wall clock": "two runs give two results, and a busy machine makes the live half "
            f"slower: where twins differ while others use more than {100 * OTHERS_MAX:.0f} % of "
            f"the processors or the run itself more than {100 * OWN_MAX:.0f} %, or p99 of how late "
            f"requests are sent is above {1e3 * LATE_MAX_S:g} ms, nothing is concluded",
        },
        seeds=scale.seeds[:1],
        tables=(_table(twins),),
        charts=(Chart(NAME, "Share of requests with a first token by then", _panels(twins)),),
        claims=claims,
    )


def twin_claim(twin: Twin) -> Claim:
    """Judge whether one policy's twins agree."""
    share = "" if twin.cpu_share is None else f", {100 * twin.cpu_share:.0f} % of the processors"
    others = "" if twin.others_share is None else f" {100 * twin.others_share:.0f} %"
    verdict = Verdict.CONFIRMED
    if not twin.agrees:
        verdict = Verdict.SKIPPED if twin.too_busy else Verdict.NOT_REPRODUCED
    busy = (
        " Too busy a machine for a verdict: repeat it on one with nothing else to do "
        f"(`bidgate-load experiments {NAME}`)."
        if verdict is Verdict.SKIPPED
        else ""
    )
    return Claim(
        source=f"ours, twin of {twin.policy}",
        statement="Simulator and live service give the same distribution of TTFT within the "
        "tolerance.",
        verdict=verdict,
        evidence=f"mean TTFT live {number(float(np.mean(twin.live)))} s ({len(twin.live)} "
        f"requests{share}), simulated {number(float(np.mean(twin.simulated)))} s; distance "
        f"{twin.distance:.3f}. Others used{others} of the processors, requests were sent up to "
        f"{1e3 * twin.late_p99_s:.1f} ms late (p99).{busy}",
        chart=NAME,
    )


def _table(twins: Sequence[Twin]) -> Table:
    names = ("mean", "p50", "p95", "p99", "max")
    rows = []
    for twin in twins:
        for where, samples in (("live", twin.live), ("simulated", twin.simulated)):
            found = stats(samples)
            values = [found[name] for name in names]
            cells = [Cell(spread([v if isinstance(v, float) else None])) for v in values]
            rows.append(Row(f"{twin.policy}, {where}", tuple(cells)))
    return Table("TTFT", tuple(Column(name, name, "s") for name in names), tuple(rows))


def _panels(twins: Sequence[Twin]) -> tuple[Panel, ...]:
    shares = np.linspace(0.0, 1.0, CURVE_POINTS)
    y = tuple(rounded(float(share)) for share in shares)
    return tuple(
        Panel(
            kind="lines",
            title=twin.policy,
            x_label="TTFT, s (log)",
            y_label="share of requests",
            log_x=True,
            series=tuple(
                Series(label, tuple(rounded(float(v)) for v in np.quantile(samples, shares)), y)
                for label, samples in (("live", twin.live), ("simulated", twin.simulated))
            ),
        )
        for twin in twins
    )


EXPERIMENT = Experiment(
    name=NAME, summary="the simulator against the live service", plan=plan, clocked=True
)
