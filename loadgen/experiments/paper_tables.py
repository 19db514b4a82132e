"""Tables 1 and 2 of the paper: relative improvement over Round Robin, steady and after a shift."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import panels
from loadgen.experiments.cases import Case
from loadgen.experiments.columns import PERIOD_TABLE, UTILISATION
from loadgen.experiments.document import Cell, Claim, Column, Document, Row, Table, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import PERIOD_S, period_control, unit_fleet
from loadgen.experiments.judge import Target, compare, percent, verdict
from loadgen.experiments.lines import (
    Line,
    Results,
    TableSpec,
    all_cases,
    lines_under,
    pick,
    spread,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import PUBLISHED, ROUND_ROBIN, Rule, RuleBook
from loadgen.workload import Prediction
from service.control.config import RateConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

STABLE, SHIFTED = panels.STABLE, 0.6
UNWATCHED = "online_lp published, no watch over the rate"
TARGETS = (
    panels.E2E_MEAN,
    panels.E2E_P99,
    panels.TTFT_MEAN,
    panels.TTFT_P95,
    panels.TTFT_P99,
    panels.TOKENS,
    panels.REQUESTS,
)


def table_1_plan(scale: Scale) -> Plan:
    """The weights of figure 2(b) at the stable rate, noisy prediction."""
    book = RuleBook(period_control())
    chosen = panels.weights(panels.QUERIES_AND_TAIL)
    rules = [*book.heuristics(), *book.strong(chosen)]
    lines = _lines(rules, "poisson", STABLE, scale)
    return Plan(all_cases(lines), partial(_table_1, scale, lines))


def table_2_plan(scale: Scale) -> Plan:
    """The rate rises from 0.4 to 0.6 when half of the time is over; nobody tells the router."""
    book = RuleBook(period_control())
    chosen = panels.weights(panels.QUERIES_AND_TAIL)
    published = book.published(chosen)
    unwatched = Rule(
        label=UNWATCHED,
        control=replace(published.control, rate=RateConfig(significance=0.0)),
    )
    rules = [*book.heuristics(), *book.strong(chosen), unwatched]
    # Before stretching the first rate is 1 per second, and half of the time is over when 1 of
    # 1 + SHIFTED / STABLE parts of the requests have come.
    middle_s = scale.fewer / (1 + SHIFTED / STABLE)
    shift = f"piecewise:0=1,{middle_s:g}={SHIFTED / STABLE:g}"
    lines = _lines(rules, shift, (STABLE + SHIFTED) / 2, scale)
    return Plan(all_cases(lines), partial(_table_2, scale, lines))


def improvements(lines: Sequence[Line], targets: Sequence[Target], results: Results) -> Table:
    """Relative improvement over the first line in per cent, seed by seed; above 0 is better."""
    base = lines[0]
    rows = []
    for item in lines[1:]:
        cells = []
        for target in targets:
            pairs = zip(
                item.values(target.key, results), base.values(target.key, results), strict=True
            )
            gains = [
                100 * target.better * (mine / other - 1) if mine is not None and other else None
                for mine, other in pairs
            ]
            cells.append(Cell(spread(gains)))
        rows.append(Row(item.label, tuple(cells)))
    return Table(
        title="Improvement over round robin, per cent (negative: worse)",
        columns=tuple(Column(t.key, t.title, "%", better=1) for t in targets),
        rows=tuple(rows),
    )


def _lines(rules: Sequence[Rule], arrivals: str, rate: float, scale: Scale) -> tuple[Line, ...]:
    case = Case(
        load=Load(
            arrivals=arrivals,
            load=panels.nominal_load(rate),
            requests=scale.fewer,
            prediction=Prediction.NOISY,
        ),
        workers=unit_fleet(panels.WORKERS, panels.BATCH_LIMIT, panels.KV_TOKENS),
        rule=rules[0],
        ttft_bound_s=panels.TTFT_BOUND_PERIODS * PERIOD_S,
    )
    return lines_under(case, rules, scale.seeds)


def _table_1(scale: Scale, lines: Sequence[Line], results: Results) -> Document:
    claim = _judged("Table 1", lines, results)
    return replace(
        _document(scale, lines, results),
        title="Table 1: noisy prediction",
        asked="With lengths known within 20 per cent, how much better than Round Robin?",
        answers=(f"{claim.verdict.value}: {claim.evidence}",),
        claims=(claim,),
    )


def _table_2(scale: Scale, lines: Sequence[Line], results: Results) -> Document:
    claim = _judged("Table 2", lines, results)
    window = window_claim(lines, results)
    document = _document(scale, lines, results)
    return replace(
        document,
        title="Table 2: the arrival rate jumps",
        asked="The rate rises from 0.4 to 0.6 per period at half time and nobody tells the "
        "router: how much better than Round Robin, and does dropping stale history help?",
        answers=(f"{claim.verdict.value}: {claim.evidence}", window.evidence),
        claims=(claim, window),
        setting=document.setting
        | {
            "shift": "Poisson 0.4 until half of the time, then 0.6 "
            f"(loads {panels.nominal_load(STABLE):.2f} and {panels.nominal_load(SHIFTED):.2f})",
            "stale history": "dropped when the watch over the arrival rate notices a rise",
        },
    )


def _judged(source: str, lines: Sequence[Line], results: Results) -> Claim:
    subject = pick(lines, PUBLISHED)
    targets = panels.FOCUS["TTFT and tail TTFT"]
    found = [compare(subject, lines[:4], target, results) for target in targets]
    base = lines[0]
    told = ", ".join(
        f"{t.title} {percent(1 - subject.mean(t.key, results) / base.mean(t.key, results))}"
        for t in targets
    )
    return Claim(
        source=source,
        statement="The paper's router improves TTFT and its tail over Round Robin more than the "
        "other baselines do.",
        verdict=verdict(found),
        evidence=f"improvement over round robin: {told}; "
        + "; ".join(item.sentence() for item in found)
        + ".",
    )


def window_claim(lines: Sequence[Line], results: Results) -> Claim:
    """Judge what dropping stale history changes."""
    whole, windowed = pick(lines, UNWATCHED), pick(lines, PUBLISHED)
    found = [compare(windowed, [whole], target, results) for target in TARGETS]
    better = sum(item.gain > 0 for item in found)
    result = Verdict.CONFIRMED if better > len(found) / 2 else Verdict.NOT_REPRODUCED
    if any(item.loses for item in found) and result is Verdict.CONFIRMED:
        result = Verdict.CONDITIONS
    told = "; ".join(item.sentence() for item in found[:5])
    return Claim(
        source="Table 2, rolling window",
        statement="Dropping stale history after a rate shift helps.",
        verdict=result,
        evidence=f"with the watch over the rate, against without: {told}.",
    )


def _document(scale: Scale, lines: Sequence[Line], results: Results) -> Document:
    offered = [results[case].values["offered_load"] for case in lines[0].cases]
    return Document(
        title="",
        asked="",
        answers=(),
        setting={
            "fleet and bounds": "as in real-data",
            "weights": f"({panels.QUERIES_AND_TAIL}), as in figure 2(b)",
            "offered load": ", ".join(f"{load:.2f}" for load in offered),
            "prediction": "uniform in 0.8 to 1.2 times the length",
            "requests": str(scale.fewer),
            "numbers of the paper": "its tables are pictures in the text we have; only the "
            "claims in words are compared",
        },
        seeds=scale.seeds,
        tables=(
            improvements(lines, TARGETS, results),
            tabulate(
                lines, TableSpec("The values", (*PERIOD_TABLE, UTILISATION), ROUND_ROBIN), results
            ),
        ),
    )


TABLE_1 = Experiment(name="table-1", summary="table 1: noisy prediction", plan=table_1_plan)
TABLE_2 = Experiment(name="table-2", summary="table 2: rate shift at half time", plan=table_2_plan)
