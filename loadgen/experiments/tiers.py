"""Two tiers: interactive traffic next to batch, against strict priority with a static reserve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.document import Chart, Claim, Column, Document, Panel, Series, Verdict
from loadgen.experiments.experiment import (
    Experiment,
    Line,
    Plan,
    Results,
    Scale,
    TableSpec,
    all_cases,
    faults,
    line,
    tabulate,
)
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S, period_control, unit_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.loads import LONG_ANSWERS, Load, Tier
from loadgen.experiments.reserve import FIRST_TIER
from loadgen.experiments.rules import FORWARD, RuleBook
from loadgen.traces import LMSYS_LIKE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.document import Table

NAME = "tiers"
BATCH_TIER = "batch"
MIXES = ((0.52, 0.47), (0.51, 0.78), (0.70, 0.81))
RESERVES = (0, 4, 8, 16, 32)
SLOTS_PER_WORKER, WORKERS, KV_TOKENS = 32, 4, 45_000
VALUE = 10.0
"""An interactive request is worth this many batch ones."""
BOUND_PERIODS = 49
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
    """One pair of loads: the reserves and the other policies."""

    title: str
    reserves: tuple[Line, ...]
    others: tuple[Line, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """All of them."""
        return (*self.reserves, *self.others)


def plan(scale: Scale) -> Plan:
    """Every mix under every reserve and under the policies without one."""
    book = RuleBook(period_control(max_wait_periods=30_000))
    others = [
        *book.heuristics()[::2],
        book.first_come(),
        book.shortest_first(),
        book.zero_prices(),
        book.published(),
        book.forward(),
    ]
    mixes = []
    for interactive, batch in MIXES:
        case = Case(
            load=Load(
                tiers=(
                    Tier(
                        name=FIRST_TIER,
                        trace=LMSYS_LIKE,
                        load=interactive,
                        value=VALUE,
                        ttft_bound_s=BOUND_PERIODS * PERIOD_S,
                    ),
                    Tier(name=BATCH_TIER, trace=LONG_ANSWERS, load=batch),
                ),
                duration_s=PERIODS_PER_REQUEST * scale.requests * PERIOD_S,
                requests=scale.requests,
            ),
            workers=unit_fleet(WORKERS, SLOTS_PER_WORKER, KV_TOKENS),
            rule=book.forward(),
        )
        mixes.append(
            Mix(
                f"interactive {interactive:.2f} + batch {batch:.2f}",
                tuple(line(replace(case, rule=book.reserve(r)), scale.seeds) for r in RESERVES),
                tuple(line(replace(case, rule=rule), scale.seeds) for rule in others),
            )
        )
    cases = [case for mix in mixes for case in all_cases(mix.lines)]
    return Plan(tuple(cases), partial(_report, scale, tuple(mixes)))


def _report(scale: Scale, mixes: Sequence[Mix], results: Results) -> Document:
    claims = [dominance_claim(mix, results) for mix in mixes]
    return Document(
        name=NAME,
        title="Two tiers: interactive next to batch",
        asked="Can prices do what a static reserve of slots does, a short interactive p99 at "
        "little cost in batch tokens, without anyone choosing the reserve?",
        answers=tuple(f"{claim.source}: {claim.evidence}" for claim in claims),
        setting={
            "fleet": f"{WORKERS} workers, B = {SLOTS_PER_WORKER} ({WORKERS * SLOTS_PER_WORKER} "
            f"slots), M = {KV_TOKENS:,}, decode only",
            "interactive": f"LMSYS-like lengths, value {VALUE:g}, bound {BOUND_PERIODS} periods",
            "batch": "prompts of 256, answers uniform in 200 to 1,000 tokens, value 1, no bound",
            "reserve": "strict priority of the interactive tier, shortest first; batch starts only "
            "while more slots of the fleet are free than the reserve",
            "time": f"arrivals for {PERIODS_PER_REQUEST * scale.requests} periods; batch tokens "
            "are counted in that time",
            "weights": "shipped; the tiers differ in value and bound alone",
        },
        command=scale.command(NAME),
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
        faults=faults([case for mix in mixes for case in all_cases(mix.lines)], results),
    )


def dominance_claim(mix: Mix, results: Results) -> Claim:
    """Judge "no static reserve is better in both" for the shipped policy."""
    ours = next(item for item in mix.others if item.label == FORWARD)
    p99, tokens = ours.mean(P99, results), ours.mean(TOKENS, results)
    beaten_by = [
        item.label
        for item in mix.reserves
        if item.mean(P99, results) <= p99 and item.mean(TOKENS, results) >= tokens
    ]
    dominates = [
        item.label
        for item in mix.reserves
        if item.mean(P99, results) >= p99 and item.mean(TOKENS, results) <= tokens
    ]
    found = Verdict.NOT_REPRODUCED
    if dominates and not beaten_by:
        all_of_them = len(dominates) == len(mix.reserves)
        found = Verdict.CONFIRMED if all_of_them else Verdict.CONDITIONS
    told = "; ".join(
        f"{item.label}: {number(item.mean(P99, results) * PER_PERIOD)} and "
        f"{number(item.mean(TOKENS, results) * PERIOD_S)}"
        for item in (ours, *mix.reserves)
    )
    worse = f" Better in both: {', '.join(beaten_by)}." if beaten_by else ""
    return Claim(
        source=f"ours, {mix.title}",
        statement="The shipped policy is at least as good as every static reserve in interactive "
        "p99 TTFT and in batch tokens.",
        verdict=found,
        evidence=f"interactive p99 TTFT (periods) and batch tokens per period: {told}.{worse}",
        chart=NAME,
    )


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
            _point("priority with reserve 0, 4, 8, 16, 32", mix.reserves, results),
            *(_point(item.label, (item,), results) for item in mix.others),
        ),
    )


def _point(label: str, lines: Sequence[Line], results: Results) -> Series:
    spreads = [item.spread(TOKENS, results, PERIOD_S) for item in lines]
    return Series(
        label,
        tuple(item.mean(P99, results) * PER_PERIOD for item in lines),
        tuple(None if s is None else s.mean for s in spreads),
        tuple(None if s is None else s.low for s in spreads),
        tuple(None if s is None else s.high for s in spreads),
    )


EXPERIMENT = Experiment(name=NAME, summary="interactive next to batch, static reserves", plan=plan)
