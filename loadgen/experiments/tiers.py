"""Two tiers: interactive traffic next to batch, against strict priority with a static reserve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.document import Chart, Claim, Column, Document, Panel, Series, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale, evidence
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S, period_control, unit_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.lines import (
    Line,
    Results,
    TableSpec,
    cases_of,
    front,
    line,
    lines_under,
    tabulate,
)
from loadgen.experiments.loads import LONG_ANSWERS, Load, Tier
from loadgen.experiments.reserve import FIRST_TIER
from loadgen.experiments.rules import FORWARD, Rule, RuleBook
from loadgen.traces import LMSYS_LIKE
from service.control.config import PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.document import Table
    from service.control.config import ControlConfig

NAME = "tiers"
BATCH_TIER = "batch"
MIXES = ((0.52, 0.47), (0.51, 0.78), (0.70, 0.81))
RESERVES, RESERVES_FULL = (0, 4, 8, 16), (0, 4, 8, 16, 32)
SLOTS_PER_WORKER, WORKERS, KV_TOKENS = 32, 4, 45_000
VALUE = 4.0
"""An interactive request is worth this many batch ones, where nothing else is said."""
POINTS = ((2.0, 0.9), (2.0, 0.0), (4.0, 0.0), (10.0, 0.0))
"""Value of an interactive request and throughput weight of the points on our frontier."""
NO_PRICES = "online_lp forward, zero prices"
TOKENS_SLACK, TAIL_CUT = 0.98, 0.6
BOUND_PERIODS = 49
LONGER = 1.5
"""Times as many requests as elsewhere."""
PERIODS_PER_REQUEST = 2
"""The time of arrivals is this many periods times the usual number of requests."""
P99, TOKENS = f"{FIRST_TIER}.ttft_p99_s", f"{BATCH_TIER}.tokens_per_s"
COLUMNS = (
    Column(f"{FIRST_TIER}.ttft_mean_s", "interactive TTFT mean", "periods", PER_PERIOD),
    Column(f"{FIRST_TIER}.ttft_p95_s", "interactive TTFT p95", "periods", PER_PERIOD),
    Column(P99, "interactive TTFT p99", "periods", PER_PERIOD),
    Column(f"{FIRST_TIER}.share_within", "interactive within 49", "%", 100.0, better=1),
    Column(TOKENS, "batch tokens/period", "rate", PERIOD_S, better=1),
    Column(f"{BATCH_TIER}.ttft_mean_s", "batch TTFT mean", "periods", PER_PERIOD),
    Column(f"{BATCH_TIER}.e2e_p99_s", "batch E2E p99", "periods", PER_PERIOD),
    Column("share_refused", "refused", "%", 100.0),
    Column("utilisation", "slots in use, whole run", "%", 100.0, better=0),
)


@dataclass(frozen=True, slots=True)
class Mix:
    """One pair of loads.

    Attributes:
        title: the loads in words.
        reserves: strict priority, shortest interactive request first, under each static reserve.
        in_turn: the same with interactive requests in order of arrival.
        ours: points of our frontier.
        others: policies without a reserve.
    """

    title: str
    reserves: tuple[Line, ...]
    in_turn: tuple[Line, ...]
    ours: tuple[Line, ...]
    others: tuple[Line, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """All of them."""
        return (*self.reserves, *self.in_turn, *self.ours, *self.others)


def plan(scale: Scale) -> Plan:
    """Every mix under every reserve and under the policies without one."""
    book = RuleBook(period_control(max_wait_periods=30_000))
    zero = replace(book.base, prices=replace(book.base.prices, zero=True))
    others = [
        book.plain(PolicyName.LEAST_OUTSTANDING),
        book.first_come(),
        book.shortest_first(),
        *([book.plain(PolicyName.ROUND_ROBIN), book.published()] if scale.full else []),
        Rule(label=NO_PRICES, control=zero),
    ]
    mixes = []
    for interactive, batch in MIXES:
        case = _case(scale, book, interactive, batch)
        kept_slots = RESERVES_FULL if scale.full else RESERVES
        kept_in_turn = RESERVES_FULL if scale.full else RESERVES[::2]
        reserves, in_turn = (
            lines_under(case, [book.reserve(kept, order) for kept in slots], scale.seeds)
            for slots, order in (
                (kept_slots, PolicyName.CENTRAL_SHORTEST_FIRST),
                (kept_in_turn, PolicyName.CENTRAL_FCFS),
            )
        )
        mixes.append(
            Mix(
                f"interactive {interactive:.2f} + batch {batch:.2f}",
                reserves,
                in_turn,
                tuple(_point_of_ours(case, book, scale, *point) for point in POINTS),
                lines_under(case, others, scale.seeds),
            )
        )
    return Plan(cases_of(mixes), partial(_report, scale, tuple(mixes)))


def plain_cases(scale: Scale) -> list[tuple[Case, ControlConfig]]:
    """Every mix with values as they stand, and the router's settings under it."""
    book = RuleBook(period_control(max_wait_periods=30_000))
    return [(_case(scale, book, *mix), book.base) for mix in MIXES]


def _case(scale: Scale, book: RuleBook, interactive: float, batch: float) -> Case:
    first = Tier(
        name=FIRST_TIER,
        trace=LMSYS_LIKE,
        load=interactive,
        value=VALUE,
        ttft_bound_s=BOUND_PERIODS * PERIOD_S,
    )
    return Case(
        load=Load(
            tiers=(first, Tier(name=BATCH_TIER, trace=LONG_ANSWERS, load=batch)),
            duration_s=PERIODS_PER_REQUEST * scale.times(LONGER) * PERIOD_S,
            requests=scale.times(LONGER),
        ),
        workers=unit_fleet(WORKERS, SLOTS_PER_WORKER, KV_TOKENS),
        rule=book.forward(),
    )


def point_label(value: float, throughput: float) -> str:
    """What tables call a point of our frontier."""
    label = f"{FORWARD}, value {value:g}"
    return f"{label}, throughput {throughput:g}" if throughput else label


def _point_of_ours(
    case: Case, book: RuleBook, scale: Scale, value: float, throughput: float
) -> Line:
    """Ours under a value of the interactive tier and a throughput weight."""
    label = point_label(value, throughput)
    first, second = case.load.tiers
    load = replace(case.load, tiers=(replace(first, value=value), second))
    rule = book.forward(replace(book.base.weights, throughput=throughput), label)
    return line(replace(case, load=load, rule=rule), scale.seeds)


def _report(scale: Scale, mixes: Sequence[Mix], results: Results) -> Document:
    claims = [
        claim
        for mix in mixes
        for claim in (dominance_claim(mix, results), equal_tokens_claim(mix, results))
    ]
    return Document(
        title="Two tiers: interactive next to batch",
        asked="Can prices do what a static reserve of slots does, a short interactive p99 at "
        "little cost in batch tokens, without anyone choosing the reserve?",
        answers=evidence(claims),
        setting={
            "fleet": f"{WORKERS} workers, B = {SLOTS_PER_WORKER} ({WORKERS * SLOTS_PER_WORKER} "
            f"slots), M = {KV_TOKENS:,}, decode only",
            "interactive": f"LMSYS-like lengths, value {VALUE:g} unless said otherwise, bound "
            f"{BOUND_PERIODS} periods",
            "batch": "prompts of 256, answers uniform in 200 to 1,000 tokens, value 1, no bound",
            "reserve": "strict priority of the interactive tier, shortest first or in order of "
            "arrival; batch starts only while more slots of the fleet are free than the reserve",
            "time": f"arrivals for {PERIODS_PER_REQUEST * scale.times(LONGER)} periods; batch "
            "tokens are counted in that time",
            "weights": "shipped unless said otherwise; the tiers differ in value and bound alone",
        },
        seeds=scale.seeds,
        tables=tuple(_table(mix, results) for mix in mixes),
        charts=(
            Chart(
                NAME,
                "Interactive p99 TTFT against batch tokens",
                tuple(_panel(mix, results) for mix in mixes),
            ),
        ),
        claims=tuple(claims),
    )


def dominance_claim(mix: Mix, results: Results) -> Claim:
    """Judge "no static reserve is better in both" for every point of ours."""
    beaten = [
        f"{point.label} by {item.label}"
        for point in mix.ours
        for item in (*mix.reserves, *mix.in_turn)
        if item.mean(P99, results) <= point.mean(P99, results)
        and item.mean(TOKENS, results) >= point.mean(TOKENS, results)
    ]
    dominated = {
        item.label
        for item in (*mix.reserves, *mix.in_turn)
        for point in mix.ours
        if item.mean(P99, results) >= point.mean(P99, results)
        and item.mean(TOKENS, results) <= point.mean(TOKENS, results)
    }
    found = Verdict.CONFIRMED if not beaten else Verdict.CONDITIONS
    if len(beaten) > len(dominated):
        found = Verdict.NOT_REPRODUCED
    told = "; ".join(_told(item, results) for item in (*mix.ours, *mix.reserves, *mix.in_turn))
    return Claim(
        source=f"ours, {mix.title}",
        statement="No static reserve is better than ours in interactive p99 TTFT and in batch "
        "tokens at once.",
        verdict=found,
        evidence=f"interactive p99 TTFT (periods) and batch tokens per period: {told}. Worse in "
        f"both than a point of ours: {', '.join(sorted(dominated)) or 'none'}. Points of ours "
        f"beaten in both: {', '.join(beaten) or 'none'}.",
        chart=NAME,
    )


def equal_tokens_claim(mix: Mix, results: Results) -> Claim:
    """Judge the tail at equal batch throughput, against strict priority without a reserve."""
    base = mix.reserves[0]
    least = TOKENS_SLACK * base.mean(TOKENS, results)
    equal = [item for item in mix.ours if item.mean(TOKENS, results) >= least]
    cut = min(
        (item.mean(P99, results) / base.mean(P99, results) for item in equal), default=float("inf")
    )
    return Claim(
        source=f"ours, {mix.title}, equal tokens",
        statement="At equal batch tokens (within 2 %) interactive p99 is at least 40 % below "
        "strict priority without a reserve.",
        verdict=Verdict.CONFIRMED if cut <= TAIL_CUT else Verdict.NOT_REPRODUCED,
        evidence=f"p99 x{cut:.2f} of {base.label}; with interactive requests in order of arrival "
        f"no reserve has x{mix.in_turn[0].mean(P99, results) / base.mean(P99, results):.2f}.",
        chart=NAME,
    )


def _told(item: Line, results: Results) -> str:
    p99 = item.mean(P99, results) * PER_PERIOD
    return f"{item.label}: {number(p99)} and {number(item.mean(TOKENS, results) * PERIOD_S)}"


def _table(mix: Mix, results: Results) -> Table:
    return tabulate(mix.lines, TableSpec(mix.title, COLUMNS), results)


def _panel(mix: Mix, results: Results) -> Panel:
    return Panel(
        kind="points",
        title=mix.title,
        x_label="interactive p99 TTFT, periods (log)",
        y_label="batch tokens per period",
        log_x=True,
        series=(
            _point("priority, each reserve", mix.reserves, results),
            _point("the same, in order of arrival", mix.in_turn, results),
            _point(FORWARD, mix.ours, results),
            *(_point(item.label, (item,), results) for item in mix.others),
        ),
    )


def _point(label: str, lines: Sequence[Line], results: Results) -> Series:
    return front(
        label,
        lines,
        lambda item: item.mean(P99, results) * PER_PERIOD,
        lambda item: item.spread(TOKENS, results, PERIOD_S),
    )


EXPERIMENT = Experiment(name=NAME, summary="interactive next to batch, static reserves", plan=plan)
