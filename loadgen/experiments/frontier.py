"""Mean against p99: what ordering and ageing can have, and where the shipped policy stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import KV_UTILISATION, PREEMPTIONS, TAIL_TABLE, UTILISATION
from loadgen.experiments.document import Chart, Claim, Document, Panel, Series, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale, evidence
from loadgen.experiments.fleets import a100_fleet, period_control, unit_fleet
from loadgen.experiments.lines import (
    Line,
    Results,
    TableSpec,
    cases_of,
    front,
    lines_under,
    pick,
    ratio,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import FORWARD, Rule, RuleBook
from service.control.config import ControlConfig, PolicyName, PriceConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.document import Table

NAME = "frontier"
BASE = PolicyName.LEAST_OUTSTANDING.value
NO_PRICES = "forward, zero prices"
FACTORS, FACTORS_FULL = (0.8, 1.2), (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5)
AGES_S, AGES_FULL_S = (2.0, 4.0), (1.0, 2.0, 3.0, 4.0, 5.0, 8.0)
MEAN, P99 = "ttft_mean_s", "ttft_p99_s"
BATCH_LIMIT = 32
LONGER, MEMORY_LONGER = 3, 2
"""Times as many requests as elsewhere: a p99 of a backlog that has grown. Where KV memory binds a
request costs three times the processor time, and preemptions show sooner."""
AMPLE_KV, TIGHT_KV = 40_000, 5_400


@dataclass(frozen=True, slots=True)
class Yardstick:
    """One load, the rules under it, and what is asked of the shipped policy.

    Attributes:
        title: the load in words.
        mean, p99: most that TTFT may be of least_outstanding's.
        singles: rules by themselves. shortest, ours: points of the two frontiers.
    """

    title: str
    mean: float
    p99: float
    singles: tuple[Line, ...]
    shortest: tuple[Line, ...]
    ours: tuple[Line, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every line once."""
        return (*self.singles, *self.shortest, *self.ours)


def plan(scale: Scale) -> Plan:
    """Put the rules under a load bound by slots, and under two bound by KV memory."""
    period, second = period_control(), ControlConfig(horizon_iterations=2048, queue_max=100_000)
    slots = Case(
        load=Load(load=1.06, requests=scale.times(LONGER)),
        workers=unit_fleet(4, BATCH_LIMIT, AMPLE_KV),
        rule=RuleBook(period).forward(),
    )
    memory = replace(
        slots,
        load=Load(kv_load=0.97, requests=scale.times(MEMORY_LONGER)),
        workers=unit_fleet(4, BATCH_LIMIT, TIGHT_KV),
    )
    real = replace(
        slots,
        load=Load(kv_load=1.05, requests=scale.times(MEMORY_LONGER)),
        workers=a100_fleet(4, BATCH_LIMIT, TIGHT_KV),
    )
    yardsticks = [
        _yardstick("bound by slots, load 1.06", (0.55, 1.0), slots, period, scale),
        _yardstick("bound by KV memory, A100 times, load 1.05", (0.40, 1.3), real, second, scale),
    ]
    if scale.full:
        title = "bound by KV memory, recompute for nothing, load 0.97"
        yardsticks.append(_yardstick(title, (0.40, 1.3), memory, period, scale))
    return Plan(cases_of(yardsticks), partial(_report, scale, tuple(yardsticks)))


def _yardstick(
    title: str, asked: tuple[float, float], case: Case, base: ControlConfig, scale: Scale
) -> Yardstick:
    book = RuleBook(base)
    singles = [
        book.plain(PolicyName.LEAST_OUTSTANDING),
        book.true_jsq(),
        book.first_come(),
        book.forward(),
        Rule(label=NO_PRICES, control=replace(base, prices=PriceConfig(zero=True))),
    ]
    aged = [
        Rule(label=f"forward, age factor {factor:g}", control=replace(base, age_factor=factor))
        for factor in (FACTORS_FULL if scale.full else FACTORS)
    ]
    shortest = [book.shortest_first(age) for age in (AGES_FULL_S if scale.full else AGES_S)]
    single, short, ours = (
        lines_under(case, rules, scale.seeds) for rules in (singles, shortest, aged)
    )
    return Yardstick(title, *asked, single, short, ours)


def _report(scale: Scale, yardsticks: Sequence[Yardstick], results: Results) -> Document:
    claims = [claim for item in yardsticks for claim in claims_of(item, results)]
    return Document(
        title="Mean against p99: the frontier",
        asked="How far can the mean TTFT fall while p99 stays bounded, and is the shipped policy "
        "on that frontier?",
        answers=evidence(claims),
        setting={
            "fleet": f"4 workers, B = {BATCH_LIMIT}, M = {AMPLE_KV:,} (slots bind) or "
            f"{TIGHT_KV:,} tokens (KV binds)",
            "times": "one iteration a period of 10 ms, decode only; or Llama-3-8B on A100, where "
            "a preempted request costs the time of its recompute. With unit times recompute costs "
            "nothing, so that a policy may preempt thousands of times and never pay",
            "load": "LMSYS-like lengths, Poisson, exact prediction, "
            f"{scale.times(LONGER)} requests (slots bind) or {scale.times(MEMORY_LONGER)} (KV "
            "binds); the KV load is token-iterations over capacity at "
            "the pace of a full batch, which is slower than the batches that fit, so 1.05 is "
            "about 0.97 of what can be had",
            "age guard": "central_shortest_first with a fixed bound; forward with age_factor times "
            "the first-come wait that nearly all recent requests would have stayed within",
        },
        seeds=scale.seeds,
        tables=tuple(_table(item, results) for item in yardsticks),
        charts=(
            Chart(
                NAME,
                "Mean against p99 of TTFT, over least outstanding",
                tuple(_panel(item, results) for item in yardsticks),
            ),
        ),
        claims=tuple(claims),
    )


def claims_of(item: Yardstick, results: Results) -> list[Claim]:
    """Judge the yardstick, and whether a fixed age guard is better in both."""
    base, mine = (pick(item.singles, label) for label in (BASE, FORWARD))
    mean, p99 = (_over(mine, base, key, results) for key in (MEAN, P99))
    preempted = mine.mean(PREEMPTIONS.key, results)
    met = mean <= item.mean and p99 <= item.p99
    beaten_by = [
        other.label
        for other in (*item.shortest, *item.singles)
        if other is not mine
        and other.mean(MEAN, results) < mine.mean(MEAN, results)
        and other.mean(P99, results) <= mine.mean(P99, results)
    ]
    return [
        Claim(
            source=f"ours, {item.title}",
            statement=f"Mean TTFT at most x{item.mean:g} of least outstanding's at p99 at most "
            f"x{item.p99:g}.",
            verdict=Verdict.CONFIRMED if met else Verdict.NOT_REPRODUCED,
            evidence=f"mean x{mean:.2f}, p99 x{p99:.2f}, {preempted:.0f} preemptions against "
            f"{base.mean(PREEMPTIONS.key, results):.0f}.",
            chart=NAME,
        ),
        Claim(
            source=f"ours, frontier, {item.title}",
            statement="No rule beside it is better in mean and p99 at once.",
            verdict=Verdict.NOT_REPRODUCED if beaten_by else Verdict.CONFIRMED,
            evidence=f"better in both: {', '.join(beaten_by) or 'none'}.",
            chart=NAME,
        ),
    ]


def _over(mine: Line, base: Line, key: str, results: Results) -> float:
    found = ratio(mine.values(key, results), base.values(key, results))
    return float("nan") if found is None else found.mean


def _table(item: Yardstick, results: Results) -> Table:
    columns = (*TAIL_TABLE, UTILISATION, KV_UTILISATION)
    return tabulate(item.lines, TableSpec(item.title, columns, BASE), results)


def _panel(item: Yardstick, results: Results) -> Panel:
    base = pick(item.singles, BASE)
    groups: list[tuple[str, tuple[Line, ...]]] = [
        (found.label, (found,)) for found in item.singles if found is not base
    ]
    groups += [("central_shortest_first, age guards", item.shortest), ("forward, age", item.ours)]
    return Panel(
        kind="points",
        title=item.title,
        x_label=f"mean TTFT over {BASE} (log)",
        y_label=f"p99 TTFT over {BASE}",
        log_x=True,
        series=tuple(_points(label, lines, base, results) for label, lines in groups),
    )


def _points(label: str, lines: Sequence[Line], base: Line, results: Results) -> Series:
    return front(
        label,
        lines,
        lambda item: _over(item, base, MEAN, results),
        lambda item: ratio(item.values(P99, results), base.values(P99, results)),
    )


EXPERIMENT = Experiment(
    name=NAME, summary="mean against p99: age bounds, every baseline", plan=plan
)
