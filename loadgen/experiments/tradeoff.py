"""Figure 3: what the weights do, and the front of mean against p99 that sweeping them traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import panels
from loadgen.experiments.cases import Case
from loadgen.experiments.columns import PERIOD_TABLE
from loadgen.experiments.document import Chart, Claim, Document, Panel, Series, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import (
    LMSYS_HORIZON,
    PER_PERIOD,
    PERIOD_S,
    period_control,
    unit_fleet,
)
from loadgen.experiments.judge import number
from loadgen.experiments.lines import (
    Line,
    Results,
    TableSpec,
    all_cases,
    front,
    lines_under,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import (
    FORWARD,
    HINDSIGHT,
    PUBLISHED,
    ROUND_ROBIN,
    SHORTEST_FIRST,
    RuleBook,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.rules import Rule

RATE = 0.5
TAIL_SHARES = (0.0, 0.1, 0.3, 1.0, 3.0)
TAIL_SHARES_FULL = (0.0, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 10.0)
"""Tail weights over the horizon: at 1 a bound met is worth as much as a whole look-ahead saved."""
AGE_BOUNDS_S = (1.0, 2.0, 4.0, 10.0, 0.0)
AGE_BOUNDS_FULL_S = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 0.0)
"""0 stands for no bound."""


@dataclass(frozen=True, slots=True)
class Front:
    """A sweep: its name, and a line at every step."""

    label: str
    lines: tuple[Line, ...]


def plan(scale: Scale) -> Plan:
    """Sweep the weights and the age bound at the slight overload."""
    case = base_case(scale)
    book = RuleBook(period_control())
    extremes = extreme_lines(case, scale)
    fronts = (
        Front("online_lp published: tail weight", _weight_lines(case, scale, published=True)),
        Front("online_lp forward: tail weight", _weight_lines(case, scale, published=False)),
        Front("online_lp forward: age bound", _age_lines(case, scale, FORWARD)),
        Front("central_shortest_first: age bound", _age_lines(case, scale, SHORTEST_FIRST)),
    )
    points = lines_under(case, [*book.heuristics(), *beside(book)], scale.seeds)
    lines = [*extremes, *points, *(item for front in fronts for item in front.lines)]
    return Plan(all_cases(lines), partial(_report, scale, extremes, points, fronts))


def beside(book: RuleBook) -> list[Rule]:
    """The strong baselines at this load: first come, shortest first, zero prices, the bound."""
    zero = book.zero_prices(panels.weights(panels.AVERAGE_ONLY))
    return [book.first_come(), book.shortest_first(), zero, book.hindsight()]


def base_case(scale: Scale) -> Case:
    """The paper's overloaded rate, exact prediction."""
    book = RuleBook(period_control())
    return Case(
        load=Load(load=panels.nominal_load(RATE), requests=scale.fewer),
        workers=unit_fleet(panels.WORKERS, panels.BATCH_LIMIT, panels.KV_TOKENS),
        rule=book.forward(),
        ttft_bound_s=panels.TTFT_BOUND_PERIODS * PERIOD_S,
    )


def extreme_lines(case: Case, scale: Scale) -> tuple[Line, ...]:
    """Figure 3's two weight vectors, under the paper's policy and ours."""
    book = RuleBook(period_control())
    rules = []
    for name, text in (("latency", panels.AVERAGE_ONLY), ("tail", panels.TAIL_ONLY)):
        chosen = panels.weights(text)
        rules += [
            book.published(chosen, f"{PUBLISHED}, {name} weights ({text})"),
            book.forward(chosen, f"{FORWARD}, {name} weights ({text})"),
        ]
    return lines_under(case, rules, scale.seeds)


def _weight_lines(case: Case, scale: Scale, *, published: bool) -> tuple[Line, ...]:
    book = RuleBook(period_control())
    make = book.published if published else book.forward
    name = "published" if published else "forward"
    shares = TAIL_SHARES_FULL if scale.full else TAIL_SHARES
    rules = [
        make(
            replace(
                panels.weights(panels.AVERAGE_ONLY),
                tail_e2e=share * LMSYS_HORIZON,
                tail_ttft=share * LMSYS_HORIZON,
            ),
            f"{name}, ζ = {share:g} H",
        )
        for share in shares
    ]
    return lines_under(case, rules, scale.seeds)


def _age_lines(case: Case, scale: Scale, policy: str) -> tuple[Line, ...]:
    rules = []
    for bound_s in AGE_BOUNDS_FULL_S if scale.full else AGE_BOUNDS_S:
        book = RuleBook(replace(period_control(), age_bound_s=bound_s))
        name = f"age {bound_s * PER_PERIOD:g}" if bound_s else "no age bound"
        rule = book.forward() if policy == FORWARD else book.shortest_first()
        short = "forward" if policy == FORWARD else "shortest first"
        rules.append(replace(rule, label=f"{short}, {name}"))
    return lines_under(case, rules, scale.seeds)


def _report(
    scale: Scale,
    extremes: Sequence[Line],
    points: Sequence[Line],
    fronts: Sequence[Front],
    results: Results,
) -> Document:
    lines = [*points, *extremes, *(item for front in fronts for item in front.lines)]
    claim = figure_3_claim(extremes[0], extremes[2], results)
    ours = figure_3_claim(extremes[1], extremes[3], results)
    spec = TableSpec("Every point, against round robin", PERIOD_TABLE, ROUND_ROBIN)
    return Document(
        title="Trade-off control: figure 3 and the whole front",
        asked="Do latency weights buy a low mean at the price of the tail, and tail weights the "
        "reverse? Which pairs of mean and p99 can be had at all?",
        answers=(
            f"The paper's policy: {claim.evidence}",
            f"Ours: {ours.evidence}",
            _best_point(fronts, results),
        ),
        setting={
            "fleet and bounds": "as in real-data",
            "rate": f"λ = {RATE} per period, Poisson, exact prediction",
            "requests": str(scale.fewer),
            "sweep of weights": "(0, 1, 1, 0, ζ, ζ), ζ in units of the horizon H = 2,048",
        },
        seeds=scale.seeds,
        tables=(tabulate(lines, spec, results),),
        charts=(_front_chart(points, fronts, results),),
        claims=(
            claim,
            replace(ours, source="ours, as figure 3", statement="The same with our variant."),
        ),
    )


def figure_3_claim(latency: Line, tail: Line, results: Results) -> Claim:
    """Judge both halves of figure 3 on one policy."""
    parts = []
    halves = []
    for measure, better in (("TTFT", "ttft"), ("E2E", "e2e")):
        mean = [item.mean(f"{better}_mean_s", results) * PER_PERIOD for item in (latency, tail)]
        p99 = [item.mean(f"{better}_p99_s", results) * PER_PERIOD for item in (latency, tail)]
        halves += [mean[0] < mean[1], p99[1] < p99[0]]
        parts.append(
            f"mean {measure} {number(mean[0])} with latency weights, {number(mean[1])} with tail "
            f"weights; p99 {measure} {number(p99[0])} and {number(p99[1])}"
        )
    refused = tail.mean("share_refused", results)
    if refused:
        parts.append(f"tail weights leave {100 * refused:.1f} % of the requests unserved")
    good = sum(halves)
    found = Verdict.CONFIRMED if good == len(halves) and not refused else Verdict.CONDITIONS
    return Claim(
        source="Figure 3",
        statement="Latency weights (0,1,1,0,0,0) lower mean TTFT and E2E, tail weights "
        "(0,0,0,0,1,1) lower their tails.",
        verdict=found if good >= len(halves) / 2 else Verdict.NOT_REPRODUCED,
        evidence="; ".join(parts) + ".",
        chart="figure-03",
    )


def _best_point(fronts: Sequence[Front], results: Results) -> str:
    """Name what the age bounds give at the two ends, in one sentence a sweep."""
    told = []
    for sweep in fronts:
        ends = [
            f"{item.label.partition(', ')[2]}: mean "
            f"{number(item.mean('ttft_mean_s', results) * PER_PERIOD)}, p99 "
            f"{number(item.mean('ttft_p99_s', results) * PER_PERIOD)}"
            for item in (sweep.lines[0], sweep.lines[-1])
        ]
        told.append(f"{sweep.label} ({'; '.join(ends)})")
    return f"TTFT at the ends of the sweeps: {', '.join(told)}."


def _front_chart(points: Sequence[Line], fronts: Sequence[Front], results: Results) -> Chart:
    drawn = []
    for measure, title in (("ttft", "time to first token"), ("e2e", "end-to-end time")):
        drawn.append(
            Panel(
                kind="points",
                title=title,
                x_label="mean, periods",
                y_label="p99, periods",
                series=(
                    *(
                        _xy(item.label, (item,), measure, results)
                        for item in points
                        if item.label != HINDSIGHT
                    ),
                    *(_xy(front.label, front.lines, measure, results) for front in fronts),
                ),
            )
        )
    return Chart("figure-03", "Mean against p99 at λ = 0.5", tuple(drawn))


def _xy(label: str, lines: Sequence[Line], measure: str, results: Results) -> Series:
    return front(
        label,
        lines,
        lambda item: item.mean(f"{measure}_mean_s", results) * PER_PERIOD,
        lambda item: item.spread(f"{measure}_p99_s", results, PER_PERIOD),
    )


EXPERIMENT = Experiment(
    name="trade-off", summary="figure 3 and the front of mean against p99", plan=plan
)
