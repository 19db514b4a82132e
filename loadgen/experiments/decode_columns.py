"""What a column sets aside: the mean of the length distribution, or a quantile as a margin.

A request that outlives its column takes KV memory nobody kept for it, and the engine preempts. A
quantile keeps more and starts less. The load is bound by KV memory, with the iteration times of an
A100, so that a preemption costs the time of its recompute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import KV_UTILISATION, PREEMPTIONS, SECOND_TABLE, UTILISATION
from loadgen.experiments.document import Chart, Claim, Document, Panel, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale, evidence
from loadgen.experiments.fleets import LMSYS_HORIZON, a100_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.knowledge import LEVELS
from loadgen.experiments.lines import (
    Curve,
    Line,
    Results,
    TableSpec,
    cases_of,
    line,
    lines_under,
    series,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import RuleBook
from service.control.config import ControlConfig, PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "columns"
QUANTILES, QUANTILES_FULL = (0.7, 0.9), (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MEAN_COLUMN = "mean of the distribution (default)"
INFORMATION = ("exact", "within 20 %", "none")
WORKERS, BATCH_LIMIT, KV_TOKENS = 2, 32, 5_400
"""Few workers, so that a few hundred requests are many generations of them."""
KV_LOAD = 1.05
SLACK = 0.01
MEAN, TOKENS = "ttft_mean_s", "tokens_per_s"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """One way to know lengths: the mean column first, then the quantiles, then the push baseline.

    Attributes:
        title: how lengths are known.
        columns: of the shipped policy, by quantile; the mean comes first.
        pushed: least outstanding, which sets nothing aside.
    """

    title: str
    columns: tuple[Line, ...]
    pushed: Line

    @property
    def lines(self) -> tuple[Line, ...]:
        """All of them."""
        return (*self.columns, self.pushed)


def plan(scale: Scale) -> Plan:
    """The shipped policy with every column under every way to know lengths."""
    base = ControlConfig(horizon_iterations=LMSYS_HORIZON, queue_max=100_000)
    book = RuleBook(base)
    case = Case(
        load=Load(kv_load=KV_LOAD, requests=scale.fewer),
        workers=a100_fleet(WORKERS, BATCH_LIMIT, KV_TOKENS),
        rule=book.forward(),
    )
    quantiles = QUANTILES_FULL if scale.full else QUANTILES
    rules = [book.forward(label=MEAN_COLUMN)]
    rules += [
        RuleBook(replace(base, decode_quantile=level)).forward(label=f"quantile {level:g}")
        for level in quantiles
    ]
    found = []
    for title in INFORMATION:
        prediction, width = LEVELS[title]
        load = replace(case.load, prediction=prediction, noise_width=width)
        told = replace(case, load=load)
        found.append(
            Knowledge(
                title,
                lines_under(told, rules, scale.seeds),
                line(
                    replace(told, rule=book.plain(PolicyName.LEAST_OUTSTANDING)),
                    scale.seeds,
                ),
            )
        )
    return Plan(cases_of(found), partial(_report, scale, tuple(found)))


def column_claim(item: Knowledge, results: Results) -> Claim:
    """Judge whether some quantile preempts less than the mean and costs nothing."""
    mean = item.columns[0]
    few = mean.mean(PREEMPTIONS.key, results)
    fewer = [one for one in item.columns[1:] if one.mean(PREEMPTIONS.key, results) < few]
    free = [
        one
        for one in fewer
        if one.mean(MEAN, results) <= (1 + SLACK) * mean.mean(MEAN, results)
        and one.mean(TOKENS, results) >= (1 - SLACK) * mean.mean(TOKENS, results)
    ]
    found = Verdict.CONDITIONS if fewer else Verdict.NOT_REPRODUCED
    told = "; ".join(
        f"{one.label}: {number(one.mean(PREEMPTIONS.key, results))} preemptions, mean TTFT "
        f"{number(one.mean(MEAN, results))} s, {number(one.mean(TOKENS, results))} tokens/s, "
        f"{100 * one.mean(KV_UTILISATION.key, results):.1f} % of KV in use"
        for one in item.lines
    )
    return Claim(
        source=f"ours, columns, lengths known: {item.title}",
        statement="A quantile of the length in place of its mean preempts less, at no cost in "
        "mean TTFT and tokens/s (1 %).",
        verdict=Verdict.CONFIRMED if free else found,
        evidence=f"{told}.",
        chart=NAME,
    )


def _report(scale: Scale, found: Sequence[Knowledge], results: Results) -> Document:
    claims = tuple(column_claim(item, results) for item in found)
    return Document(
        title="What a column sets aside: mean or quantile",
        asked="Should a request be expected to use the mean of its length distribution, or a "
        "quantile as a margin against preemption?",
        answers=evidence(claims),
        setting={
            "fleet": f"{WORKERS} workers, Llama-3-8B on A100, B = {BATCH_LIMIT}, M = {KV_TOKENS:,} "
            "tokens, prompts computed by the workers; a preempted request is computed again",
            "load": f"LMSYS-like lengths, Poisson, {KV_LOAD:g} of the KV memory (token-iterations "
            "over capacity at the pace of a full batch, so about 0.97 of what can be had), "
            f"{scale.fewer} requests",
            "exact, within 20 %": "the router is told the length, or one within 20 %; a quantile "
            "then is that of how wrong hints were",
            "none": "no hint and one group: the distribution of all traffic by prompt length",
            "option": "control.decode_quantile, --decode-quantile of serve and simulate; 0 is the "
            "mean",
        },
        seeds=scale.seeds,
        tables=tuple(
            tabulate(
                item.lines,
                TableSpec(
                    f"Lengths known: {item.title}",
                    (*SECOND_TABLE, UTILISATION, KV_UTILISATION),
                    MEAN_COLUMN,
                ),
                results,
            )
            for item in found
        ),
        charts=(_chart(found, results),),
        claims=claims,
    )


def _chart(found: Sequence[Knowledge], results: Results) -> Chart:
    curves = [
        Curve(
            item.title,
            ("mean", *(one.label.removeprefix("quantile ") for one in item.columns[1:])),
            item.columns,
        )
        for item in found
    ]
    shown = (
        (PREEMPTIONS.key, "preemptions", "", 1.0),
        (MEAN, "mean TTFT", "s", 1.0),
        (KV_UTILISATION.key, "KV memory in use", "%", 100.0),
    )
    return Chart(
        NAME,
        "The mean, or a quantile, of the length distribution",
        tuple(
            Panel(
                kind="lines",
                title=title,
                x_label="mean, or quantile, of the length",
                y_label=f"{title}, {unit}" if unit else title,
                series=tuple(series(curve, key, results, factor) for curve in curves),
            )
            for key, title, unit, factor in shown
        ),
    )


EXPERIMENT = Experiment(
    name=NAME, summary="mean or quantile of the length in a column: preemptions", plan=plan
)
