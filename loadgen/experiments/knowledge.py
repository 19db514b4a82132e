"""What imperfect knowledge costs: stale telemetry, a wrong pace, no or bad predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import PERIOD_TABLE, SECOND_TABLE
from loadgen.experiments.document import Chart, Document, Panel
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import (
    LMSYS_HORIZON,
    PERIOD_S,
    a100_fleet,
    period_control,
    unit_fleet,
    with_pace_error,
)
from loadgen.experiments.judge import number
from loadgen.experiments.lines import (
    Curve,
    Line,
    Results,
    TableSpec,
    all_cases,
    line,
    series,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import Rule, RuleBook
from loadgen.simulation_config import Telemetry
from loadgen.workload import Prediction
from service.control.config import ControlConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_LIMIT, KV_TOKENS = 25, 10_000
STALE_S = (0.0, 1.0, 3.0, 10.0)
STALE_FULL_S = (0.0, 0.3, 1.0, 3.0, 5.0, 10.0)
SCRAPE_S = 0.25
PACE_ERRORS = (0.7, 1.0, 1.3)
PACE_ERRORS_FULL = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 2.0)
LEVELS = {
    "exact": (Prediction.EXACT, 0.2),
    "within 20 %": (Prediction.NOISY, 0.2),
    "within 50 %": (Prediction.NOISY, 0.5),
    "within 90 %": (Prediction.NOISY, 0.9),
    "none": (Prediction.NONE, 0.2),
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Curves along one axis."""

    axis: str
    curves: tuple[Curve, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every point of every curve."""
        return tuple(item for curve in self.curves for item in curve.lines)


def staleness_plan(scale: Scale) -> Plan:
    """Reports come at intervals of their age; then the router is told a wrong pace."""
    book = RuleBook(ControlConfig(horizon_iterations=LMSYS_HORIZON, queue_max=100_000))
    rules = [*book.heuristics()[2:3], *book.strong()]
    if scale.full:
        rules.append(book.heuristics()[0])
    case = Case(
        load=Load(load=1.0, requests=scale.fewer),
        workers=with_pace_error(a100_fleet(4, BATCH_LIMIT, KV_TOKENS), 1.0),
        rule=rules[0],
        ttft_bound_s=1.0,
    )
    ages = STALE_FULL_S if scale.full else STALE_S
    stale = {f"{age:g} s": replace(case, telemetry=_stale(age)) for age in ages}
    errors = PACE_ERRORS_FULL if scale.full else PACE_ERRORS
    paces = {
        f"x{error:g}": replace(
            case,
            workers=with_pace_error(case.workers, error),
            telemetry=Telemetry(report_bias=error),
        )
        for error in errors
    }
    sweeps = (
        _sweep("age of telemetry", stale, rules, scale),
        _sweep("iteration time told to the router", paces, rules, scale),
    )
    cases = [item for sweep in sweeps for item in all_cases(sweep.lines)]
    return Plan(tuple(cases), partial(_staleness_report, scale, sweeps))


def _stale(age_s: float) -> Telemetry:
    """Scraped every age_s (at least every SCRAPE_S), and seen age_s later."""
    return Telemetry(scrape_interval_s=max(SCRAPE_S, age_s), scrape_latency_s=age_s)


def _sweep(axis: str, settings: dict[str, Case], rules: Sequence[Rule], scale: Scale) -> Sweep:
    names = tuple(settings)
    curves = tuple(
        Curve(
            rule.label,
            names,
            tuple(
                line(replace(case, rule=rule), scale.fewer_seeds, f"{rule.label}: {name}")
                for name, case in settings.items()
            ),
        )
        for rule in rules
    )
    return Sweep(axis, curves)


def _staleness_report(scale: Scale, sweeps: Sequence[Sweep], results: Results) -> Document:
    return Document(
        title="Stale telemetry and a wrong pace",
        asked="How much worse does a policy decide when the workers' reports are old, or when it "
        "is told a wrong iteration time?",
        answers=tuple(sentence for sweep in sweeps for sentence in _ends(sweep, results)),
        setting={
            "fleet": f"4 workers, Llama-3-8B on A100, B = {BATCH_LIMIT}, M = {KV_TOKENS:,}, "
            "prompts computed by the workers",
            "load": f"LMSYS-like lengths, Poisson, load 1.0, exact prediction, {scale.fewer} "
            "requests",
            "age": f"a report is seen this long after it was true; scrapes at intervals of the "
            f"age, at least {SCRAPE_S:g} s; tokens of the router's own streams are seen at once",
            "wrong pace": "both the first guess and every report are this many times the truth",
        },
        seeds=scale.fewer_seeds,
        tables=tuple(
            tabulate(sweep.lines, TableSpec(sweep.axis, SECOND_TABLE), results) for sweep in sweeps
        ),
        charts=(_chart("staleness", "Mean TTFT", sweeps, results),),
    )


def prediction_plan(scale: Scale) -> Plan:
    """From exact lengths to none; without one the router learns the distribution itself."""
    book = RuleBook(period_control())
    rules = [*book.heuristics()[::2], *book.strong()]
    case = Case(
        load=Load(load=1.05, requests=scale.fewer),
        workers=unit_fleet(4, BATCH_LIMIT, KV_TOKENS),
        rule=rules[0],
        ttft_bound_s=49 * PERIOD_S,
    )
    settings = {
        name: replace(case, load=replace(case.load, prediction=kind, noise_width=width))
        for name, (kind, width) in LEVELS.items()
    }
    sweep = _sweep("prediction of the answer's length", settings, rules, scale)
    return Plan(all_cases(sweep.lines), partial(_prediction_report, scale, sweep))


def _prediction_report(scale: Scale, sweep: Sweep, results: Results) -> Document:
    return Document(
        title="From exact prediction to none",
        asked="How good must length predictions be?",
        answers=_ends(sweep, results),
        setting={
            "fleet": f"4 workers, B = {BATCH_LIMIT}, M = {KV_TOKENS:,}, decode only",
            "load": f"LMSYS-like lengths, Poisson, load 1.05, {scale.fewer} requests",
            "within w": "forecast uniform in 1 - w to 1 + w times the length",
            "none": "no forecast: the router pools the lengths it has seen; all requests are one "
            "group, so it knows nothing about the single request",
        },
        seeds=scale.fewer_seeds,
        tables=(tabulate(sweep.lines, TableSpec(sweep.axis, PERIOD_TABLE), results),),
        charts=(_chart("prediction", "TTFT", (sweep,), results, p99=True),),
    )


def _ends(sweep: Sweep, results: Results) -> tuple[str, ...]:
    """One sentence: mean TTFT of every rule at the two ends of the axis."""
    told = []
    for curve in sweep.curves:
        first, last = (
            number(item.mean("ttft_mean_s", results)) for item in (curve.lines[0], curve.lines[-1])
        )
        told.append(f"{curve.label} {first} and {last}")
    x = sweep.curves[0].x
    return (f"{sweep.axis}, mean TTFT in seconds at {x[0]} and at {x[-1]}: {'; '.join(told)}.",)


def _chart(
    name: str, title: str, sweeps: Sequence[Sweep], results: Results, *, p99: bool = False
) -> Chart:
    measures = (("ttft_mean_s", "mean TTFT"), ("ttft_p99_s", "p99 TTFT"))
    return Chart(
        name,
        title,
        tuple(
            Panel(
                kind="lines",
                title=label,
                x_label=sweep.axis,
                y_label=f"{label}, s",
                series=tuple(series(curve, key, results) for curve in sweep.curves),
            )
            for sweep in sweeps
            for key, label in (measures if p99 else measures[:1])
        ),
    )


STALENESS = Experiment(
    name="staleness", summary="telemetry 0 to 10 s old, a wrong pace", plan=staleness_plan
)
PREDICTION = Experiment(
    name="prediction", summary="length prediction from exact to none", plan=prediction_plan
)
