"""How far the paper's prices may move in a step: too little prices nothing, too much spoils order.

The paper names neither step size nor number of steps. What this experiment finds best is what
every other experiment gives to the published policy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import panels
from loadgen.experiments.columns import PERIOD_TABLE
from loadgen.experiments.document import Chart, Claim, Document, Panel, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale, evidence
from loadgen.experiments.fleets import PER_PERIOD, period_control
from loadgen.experiments.judge import number
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
from loadgen.experiments.rules import (
    LARGE_ALPHA,
    LARGE_ALPHA_STEP,
    PUBLISHED,
    PUBLISHED_STEP,
    PUBLISHED_STEPS,
    Rule,
    RuleBook,
)
from loadgen.experiments.tradeoff import RATE, base_case, beside

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "price-step"
STEP_SIZES = (0.00025, 0.0025, 0.025)
WEIGHTS = (
    panels.AVERAGE_ONLY,
    panels.TAIL,
    panels.QUERIES_AND_TAIL,
    panels.THROUGHPUT_ONLY,
)
ZERO = "0"


def plan(scale: Scale) -> Plan:
    """Zero prices, then one step size after the other, under two weight vectors."""
    case = base_case(scale)
    book = RuleBook(period_control())
    curves = []
    for text in WEIGHTS:
        chosen = panels.weights(text)
        steps = {ZERO: book.zero_prices(chosen)}
        for step_size in STEP_SIZES:
            steps[f"{step_size:g}"] = _with_step(book.published(chosen), step_size)
        lines = tuple(
            line(replace(case, rule=rule), scale.fewer_seeds, f"({text}), step {step}")
            for step, rule in steps.items()
        )
        curves.append(Curve(f"weights ({text})", tuple(steps), lines))
    others = lines_under(case, beside(book), scale.fewer_seeds)
    cases = (*cases_of(curves), *all_cases(others))
    return Plan(cases, partial(_report, scale, tuple(curves), others))


def _with_step(rule: Rule, step_size: float) -> Rule:
    prices = replace(rule.control.prices, step_size=step_size)
    return replace(rule, control=replace(rule.control, prices=prices))


def _report(
    scale: Scale, curves: Sequence[Curve], others: Sequence[Line], results: Results
) -> Document:
    claims = tuple(price_claim(curve, results) for curve in curves)
    lines = [*others, *(item for curve in curves for item in curve.lines)]
    return Document(
        title="The step size of the paper's prices",
        asked="Do learned prices help the paper's policy at all, and how does that hang on the "
        "step size, which the paper does not give?",
        answers=evidence(claims),
        setting={
            "fleet and bounds": "as in real-data",
            "rate": f"λ = {RATE} per period, Poisson, exact prediction, {scale.fewer} requests",
            "prices": f"K = {PUBLISHED_STEPS} step of 64 columns in every period; step size in "
            "normalised reward per normalised resource; 0 is the policy with zero prices",
            "elsewhere": f"{PUBLISHED} has step size {PUBLISHED_STEP:g}, or "
            f"{LARGE_ALPHA_STEP:g} where alpha is at least {LARGE_ALPHA:g}, in all others",
        },
        seeds=scale.fewer_seeds,
        tables=(tabulate(lines, TableSpec("Every point", PERIOD_TABLE), results),),
        charts=(
            Chart(
                NAME,
                "TTFT against step size",
                tuple(
                    Panel(
                        kind="lines",
                        title=title,
                        x_label="step size, normalised reward per normalised resource",
                        y_label=f"{title}, periods",
                        series=tuple(series(c, key, results, PER_PERIOD) for c in curves),
                    )
                    for key, title in (("ttft_mean_s", "mean TTFT"), ("ttft_p99_s", "p99 TTFT"))
                ),
            ),
        ),
        claims=claims,
    )


def price_claim(curve: Curve, results: Results) -> Claim:
    """Judge whether some step size beats zero prices in mean TTFT."""
    means = [item.mean("ttft_mean_s", results) * PER_PERIOD for item in curve.lines]
    best, worst = min(means[1:]), max(means[1:])
    found = Verdict.NOT_REPRODUCED
    if best < 0.95 * means[0]:
        found = Verdict.CONFIRMED if worst < means[0] else Verdict.CONDITIONS
    told = ", ".join(f"{number(mean)} at {x}" for x, mean in zip(curve.x, means, strict=True))
    return Claim(
        source=f"Prices help, {curve.label}",
        statement="Learned shadow prices lower the mean TTFT of the paper's policy against zero "
        "prices (by 5 % or more).",
        verdict=found,
        evidence=f"mean TTFT {told} (periods, by step size).",
        chart=NAME,
    )


EXPERIMENT = Experiment(
    name=NAME, summary="the step size of the paper's prices, and zero prices", plan=plan
)
