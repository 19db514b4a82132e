"""The panels of the paper's comparison figures: a rate, six weights, how lengths are predicted.

Shared by the real-data figures (paper_figures.py) and the synthetic ones (synthetic.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import PERIOD_TABLE, UTILISATION
from loadgen.experiments.document import Chart, Claim, Panel, Series
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S, period_control, unit_fleet
from loadgen.experiments.judge import Comparison, Target, compare, number, verdict
from loadgen.experiments.lines import Line, Results, TableSpec, lines_under, pick, tabulate
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import (
    FORWARD,
    HINDSIGHT,
    PUBLISHED,
    ROUND_ROBIN,
    SHORTEST_FIRST,
    ZERO_PRICES,
    RuleBook,
)
from loadgen.traces import LMSYS_LIKE
from loadgen.workload import Prediction
from service.control.config import Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.document import Table
    from loadgen.experiments.experiment import Scale

STABLE, OVERLOADED = 0.4, 0.5
"""Arrivals per period."""
WORKERS = 4
BATCH_LIMIT = 24
KV_TOKENS = 10_000
MEAN_ANSWER_TOKENS = {LMSYS_LIKE: 210, "ratio:1:4": 205, "ratio:4:1": 51}
"""Of each trace; turns arrivals per period into a load."""
TTFT_BOUND_PERIODS = 49
E2E_BOUND_PERIODS = 500

TTFT_MEAN = Target("ttft_mean_s", "mean TTFT", "", PER_PERIOD)
TTFT_P95 = Target("ttft_p95_s", "p95 TTFT", "", PER_PERIOD)
TTFT_P99 = Target("ttft_p99_s", "p99 TTFT", "", PER_PERIOD)
E2E_MEAN = Target("e2e_mean_s", "mean E2E", "", PER_PERIOD)
E2E_P95 = Target("e2e_p95_s", "p95 E2E", "", PER_PERIOD)
E2E_P99 = Target("e2e_p99_s", "p99 E2E", "", PER_PERIOD)
TOKENS = Target("tokens_per_s", "tokens per period", "", PERIOD_S, better=1)
REQUESTS = Target("requests_per_s", "requests per 1,000 periods", "", 1000 * PERIOD_S, better=1)

FOCUS = {
    "average latency": (TTFT_MEAN, E2E_MEAN),
    "tail latency": (TTFT_P95, TTFT_P99, E2E_P95, E2E_P99),
    "throughput": (TOKENS, REQUESTS),
    "TTFT and tail TTFT": (TTFT_MEAN, TTFT_P95, TTFT_P99),
}
SHOWN = (TTFT_MEAN, TTFT_P95, TTFT_P99, E2E_MEAN, E2E_P95, E2E_P99, TOKENS)


def nominal_load(rate: float, trace: str = LMSYS_LIKE) -> float:
    """Decode work over slots that a rate per period means for the mean answer of a trace."""
    return rate * MEAN_ANSWER_TOKENS[trace] / (WORKERS * BATCH_LIMIT)


def weights(text: str) -> Weights:
    """Read (alpha, beta, gamma, sigma, zeta1, zeta2), fractions allowed, with the paper's bounds.

    t2' is 49 periods as in figure 13; t1' is not in the paper, 500 periods is ours.
    """
    values = [_fraction(part) for part in text.split(",")]
    names = ("throughput", "e2e", "ttft", "queries", "tail_e2e", "tail_ttft")
    return Weights(
        **dict(zip(names, values, strict=True)),
        ttft_bound_s=TTFT_BOUND_PERIODS * PERIOD_S,
        e2e_bound_s=E2E_BOUND_PERIODS * PERIOD_S,
    )


AVERAGE = "1/135,1,1,1,1/400,1/400"
AVERAGE_ONLY = "0,1,1,0,0,0"
TAIL = "1/135,1/400,1/400,1,1,1"
TAIL_ONLY = "0,0,0,0,1,1"
THROUGHPUT = "1,1/400,1/400,1,1/400,1/400"
THROUGHPUT_ONLY = "1,0,0,1,0,0"
QUERIES_AND_TAIL = "1/27,1/2048,1/2048,5,1,1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPanel:
    """One panel of one figure.

    Attributes:
        figure: its number. part: "a" or "b".
        rate: arrivals per period.
        weight_text: the six weights as the paper writes them.
        prediction: exact, or noisy within 20 per cent.
        trace: where lengths come from.
    """

    figure: int
    part: str
    rate: float
    weight_text: str
    prediction: Prediction
    trace: str

    @property
    def title(self) -> str:
        """Describe it in one line."""
        return (
            f"Figure {self.figure}({self.part}): λ = {self.rate:g}, "
            f"weights ({self.weight_text}), {self.prediction.value} prediction"
        )

    def seeds(self, scale: Scale) -> tuple[int, ...]:
        """All seeds where policies differ: a queue forms, and no other figure says the same.

        Below capacity waits are an iteration or two under any seed, and the noisy figures repeat
        the exact ones; both get fewer.
        """
        telling = self.rate > STABLE and self.prediction is Prediction.EXACT
        return scale.seeds if telling else scale.fewer_seeds

    def lines(self, seeds: Sequence[int], requests: int, *, bound: bool = True) -> tuple[Line, ...]:
        """Every policy under every seed: the four heuristics, the strong baselines, the bound."""
        book = RuleBook(period_control())
        chosen = weights(self.weight_text)
        rules = [*book.heuristics(), *book.strong(chosen), *([book.hindsight()] if bound else [])]
        case = Case(
            load=Load(
                trace=self.trace,
                load=nominal_load(self.rate, self.trace),
                requests=requests,
                prediction=self.prediction,
            ),
            workers=unit_fleet(WORKERS, BATCH_LIMIT, KV_TOKENS),
            rule=rules[0],
            ttft_bound_s=TTFT_BOUND_PERIODS * PERIOD_S,
        )
        return lines_under(case, rules, seeds)


def panel_table(panel: PaperPanel, lines: Sequence[Line], results: Results) -> Table:
    """Tabulate a panel against round robin."""
    columns = (*PERIOD_TABLE, UTILISATION)
    return tabulate(lines, TableSpec(panel.title, columns, ROUND_ROBIN), results)


def figure_chart(
    name: str, title: str, panels: Sequence[tuple[PaperPanel, Sequence[Line]]], results: Results
) -> Chart:
    """Draw every policy's measures over round robin's, one set of axes a panel."""
    return Chart(
        name,
        title,
        tuple(
            Panel(
                kind="bars",
                title=f"({panel.part}) λ = {panel.rate:g}, weights {panel.weight_text}, "
                f"{panel.prediction.value}",
                x_label="measure",
                y_label="ratio to round robin (log)",
                series=tuple(
                    _bars(item, lines, results) for item in lines[1:] if item.label != HINDSIGHT
                ),
                log_y=True,
                reference=1.0,
            )
            for panel, lines in panels
        ),
    )


def figure_claim(
    figure: int, focus: str, panels: Sequence[tuple[PaperPanel, Sequence[Line]]], results: Results
) -> Claim:
    """Judge "best of all policies in the metrics that the weights emphasise" over the panels."""
    comparisons: list[Comparison] = []
    evidence: list[str] = []
    for panel, lines in panels:
        found = [compare(pick(lines, PUBLISHED), lines[:4], t, results) for t in FOCUS[focus]]
        comparisons += found
        sentences = "; ".join(item.sentence() for item in found)
        evidence.append(f"({panel.part}) {sentences}. {_beside(lines, found[0].target, results)}")
    return Claim(
        source=f"Figure {figure}",
        statement=f"With weights for {focus} the paper's router beats Random, Round Robin, "
        "Least Outstanding and Power of Two in that metric.",
        verdict=verdict(comparisons),
        evidence=" ".join(evidence),
        chart=f"figure-{figure:02}",
    )


def _beside(lines: Sequence[Line], target: Target, results: Results) -> str:
    """The strong baselines on one measure, in one sentence."""
    values = [
        f"{name} {number(pick(lines, label).mean(target.key, results) * target.factor)}"
        for label, name in (
            (ZERO_PRICES, "the same with zero prices"),
            (SHORTEST_FIRST, "shortest first with age guard"),
            (FORWARD, "ours"),
        )
    ]
    for item in lines:
        bound = item.spread(target.key, results, target.factor)
        if item.label == HINDSIGHT and bound is not None:
            values.append(f"hindsight bound {number(bound.mean)}")
    return f"{target.title[0].upper()}{target.title[1:]} of others: {', '.join(values)}."


def _bars(item: Line, lines: Sequence[Line], results: Results) -> Series:
    ratios = [item.mean(t.key, results) / lines[0].mean(t.key, results) for t in SHOWN]
    names = [target.title.replace(" per period", "/period") for target in SHOWN]
    return Series(item.label, tuple(names), tuple(round(value, 4) for value in ratios))


def _fraction(text: str) -> float:
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)
