"""Figure 13: from tail weight to satisfied share, everything else fixed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import panels
from loadgen.experiments.columns import PERIOD_TABLE
from loadgen.experiments.document import Chart, Claim, Document, Panel, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import period_control
from loadgen.experiments.lines import (
    Curve,
    Line,
    Results,
    TableSpec,
    all_cases,
    cases_of,
    line,
    lines_under,
    series,
    tabulate,
)
from loadgen.experiments.rules import FORWARD, PUBLISHED, RuleBook
from loadgen.experiments.tradeoff import RATE, base_case, beside
from service.control.config import Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

ZETAS = (0.0, 1.0, 10.0, 100.0)
ZETAS_FULL = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RISE = 0.01
"""A change of the satisfied share smaller than this is noise."""


def plan(scale: Scale) -> Plan:
    """Figure 13: everything fixed but zeta_2."""
    case = base_case(scale)
    book = RuleBook(period_control())
    zetas = ZETAS_FULL if scale.full else ZETAS
    base = panels.weights(panels.TAIL)
    curves = []
    for name, make in ((PUBLISHED, book.published), (FORWARD, book.forward)):
        lines = tuple(
            line(
                replace(case, rule=make(_with_zeta(base, zeta), f"{name}, ζ2 = {zeta:g}")),
                scale.seeds,
            )
            for zeta in zetas
        )
        curves.append(Curve(name, zetas, lines))
    others = lines_under(case, beside(book), scale.seeds)
    cases = (*cases_of(curves), *all_cases(others))
    return Plan(cases, partial(_report, scale, tuple(curves), others))


def _with_zeta(base: Weights, zeta: float) -> Weights:
    return replace(base, tail_ttft=zeta)


def _report(
    scale: Scale, curves: Sequence[Curve], others: Sequence[Line], results: Results
) -> Document:
    claims = [figure_13_claim(curve, results) for curve in curves]
    claims[1] = replace(
        claims[1], source="ours, as figure 13", statement="The same with our variant."
    )
    lines = [*others, *(item for curve in curves for item in curve.lines)]
    return Document(
        title="From tail weight to satisfied quantile: figure 13",
        asked="Does a larger ζ2 let more requests have their first token within t2' = 49 periods?",
        answers=tuple(
            f"{curve.label}: {claim.verdict.value}; {claim.evidence}"
            for curve, claim in zip(curves, claims, strict=True)
        ),
        setting={
            "fleet and bounds": "as in real-data",
            "rate": f"λ = {RATE} per period, Poisson, exact prediction",
            "requests": str(scale.fewer),
            "weights": "(1/135, 1/400, 1/400, 1, 1, ζ2); the paper does not say which it fixed",
        },
        seeds=scale.seeds,
        tables=(tabulate(lines, TableSpec("Every point", PERIOD_TABLE), results),),
        charts=(_chart(curves, results),),
        claims=tuple(claims),
    )


def _chart(curves: Sequence[Curve], results: Results) -> Chart:
    drawn = tuple(
        replace(
            series(curve, "share_within", results), x=tuple(f"{float(zeta):g}" for zeta in curve.x)
        )
        for curve in curves
    )
    panel = Panel(
        kind="lines",
        title="λ = 0.5, exact prediction",
        x_label="tail weight ζ2",
        y_label="share of requests within t2'",
        series=drawn,
    )
    return Chart("figure-13", "Share of requests with TTFT within 49 periods", (panel,))


def figure_13_claim(curve: Curve, results: Results) -> Claim:
    """Judge "q grows with zeta_2 on average"."""
    shares = [item.mean("share_within", results) for item in curve.lines]
    rise = shares[-1] - shares[0]
    falls = sum(late < early - RISE for early, late in itertools.pairwise(shares))
    found = Verdict.NOT_REPRODUCED
    if rise > RISE:
        found = Verdict.CONDITIONS if falls else Verdict.CONFIRMED
    told = ", ".join(f"{share:.3f}" for share in shares)
    steps = ", ".join(str(x) for x in curve.x)
    return Claim(
        source="Figure 13",
        statement="The share of requests with TTFT within t2' grows with ζ2 on average.",
        verdict=found,
        evidence=f"shares {told} at ζ2 = {steps}.",
        chart="figure-13",
    )


EXPERIMENT = Experiment(
    name="tail-weight", summary="figure 13: tail weight to satisfied share", plan=plan
)
