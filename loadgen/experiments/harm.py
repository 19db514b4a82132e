"""Do no harm: everything that a live service gets wrong, and whether the router then does worse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import TAIL_TABLE
from loadgen.experiments.document import Claim, Document, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale, evidence
from loadgen.experiments.fleets import a100_fleet, with_pace_error
from loadgen.experiments.lines import Line, Results, TableSpec, cases_of, lines_under, tabulate
from loadgen.experiments.loads import Load
from loadgen.experiments.recorded import RECORDINGS, find_recordings
from loadgen.experiments.rules import FORWARD, RuleBook
from loadgen.simulation_config import Telemetry
from loadgen.workload import Prediction
from service.control.config import ControlConfig, PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "harm"
LOADS, LOADS_FULL = (1.06,), (0.7, 0.95, 1.06)
BATCH_LIMIT = 32
LATENCY_SLACK, TOKENS_SLACK = 1.05, 0.99
MEAN, P99, TOKENS = "ttft_mean_s", "ttft_p99_s", "tokens_per_s"


@dataclass(frozen=True, slots=True)
class Hardship:
    """One thing that is wrong, at one load: the pushing baselines, then the shipped policy."""

    title: str
    lines: tuple[Line, ...]


def plan(scale: Scale) -> Plan:
    """Put the pushing baselines and ours under every hardship."""
    book = RuleBook(ControlConfig(queue_max=100_000, max_wait_s=600.0))
    rules = (
        book.plain(PolicyName.LEAST_OUTSTANDING),
        book.true_jsq(),
        book.first_come(),
        book.forward(),
    )
    found, skipped = _hardships(scale, Case(load=Load(), workers=(), rule=rules[0]))
    hardships = tuple(
        Hardship(
            f"{title}, load {load:g}",
            lines_under(replace(case, load=replace(case.load, load=load)), rules, scale.seeds),
        )
        for title, case in found.items()
        for load in (LOADS_FULL if scale.full else LOADS)
    )
    return Plan(cases_of(hardships), partial(_report, scale, hardships, skipped))


def _hardships(scale: Scale, case: Case) -> tuple[dict[str, Case], tuple[str, ...]]:
    """Cases by what is wrong in them; and the recordings that are not there."""
    fleet = with_pace_error(a100_fleet(4, BATCH_LIMIT), 1.0)
    usual = replace(case, workers=fleet, load=Load(requests=scale.requests))
    found = {
        f"iteration time told x{error:g}": replace(
            usual,
            workers=with_pace_error(fleet, error),
            telemetry=Telemetry(report_bias=error),
        )
        for error in (0.7, 1.3)
    }
    noisy = replace(usual.load, prediction=Prediction.NOISY, noise_width=0.5)
    nothing = replace(usual.load, prediction=Prediction.NONE)
    found["lengths within 50 %"] = replace(usual, load=noisy)
    found["lengths unknown"] = replace(usual, load=nothing)
    recorded, skipped = find_recordings(scale.data, (RECORDINGS[0], RECORDINGS[2]))
    for title, trace in recorded.items():
        for words, prediction in (("exact", Prediction.EXACT), ("unknown", Prediction.NONE)):
            load = replace(usual.load, trace=trace, prediction=prediction)
            found[f"{title}, lengths {words}"] = replace(usual, load=load)
    return found, skipped


def _report(
    scale: Scale, hardships: Sequence[Hardship], skipped: tuple[str, ...], results: Results
) -> Document:
    claims = [harm_claim(item, results) for item in hardships]
    harmless = sum(claim.verdict is Verdict.CONFIRMED for claim in claims)
    return Document(
        title="Do no harm",
        asked="When the router is told wrong things, is it ever worse than pushing requests at "
        "once?",
        answers=(
            f"Harmless in {harmless} of {len(claims)} settings.",
            *evidence(claim for claim in claims if claim.verdict is not Verdict.CONFIRMED),
        ),
        setting={
            "fleet": f"4 workers, Llama-3-8B on A100, B = {BATCH_LIMIT}, prompts computed by the "
            "workers",
            "load": f"LMSYS-like lengths or those of a recording, Poisson, {scale.requests} "
            "requests; decode work over batch capacity, so prompts come on top",
            "asked": f"mean and p99 TTFT at most x{LATENCY_SLACK:g} of the better of "
            "least_outstanding and join-the-shortest-queue with true lengths, and tokens/s at "
            f"least x{TOKENS_SLACK:g}",
            "told": "both the first guess and every report of the iteration time are off; "
            "unknown lengths are pooled, all requests are one group",
        },
        seeds=scale.seeds,
        tables=tuple(
            tabulate(item.lines, TableSpec(item.title, TAIL_TABLE, item.lines[0].label), results)
            for item in hardships
        ),
        claims=tuple(claims),
        skipped=skipped,
    )


def harm_claim(item: Hardship, results: Results) -> Claim:
    """Judge one hardship against the better of the two pushing baselines."""
    pushing, mine = item.lines[:2], item.lines[-1]
    ratios = {
        key: mine.mean(key, results) / min(other.mean(key, results) for other in pushing)
        for key in (MEAN, P99)
    }
    tokens = mine.mean(TOKENS, results) / max(other.mean(TOKENS, results) for other in pushing)
    harmless = max(ratios.values()) <= LATENCY_SLACK and tokens >= TOKENS_SLACK
    return Claim(
        source=f"ours, {item.title}",
        statement=f"{FORWARD} does no harm.",
        verdict=Verdict.CONFIRMED if harmless else Verdict.NOT_REPRODUCED,
        evidence=f"mean TTFT x{ratios[MEAN]:.2f}, p99 x{ratios[P99]:.2f}, tokens/s x{tokens:.3f} "
        "of the better of the two.",
    )


EXPERIMENT = Experiment(
    name=NAME, summary="wrong iteration times, bad or no predictions, real lengths", plan=plan
)
