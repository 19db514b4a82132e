"""Fleets that are not four equal workers for ever: unequal ones, and one that dies and returns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case, Probe
from loadgen.experiments.columns import FAILED, PERIOD_TABLE, UTILISATION
from loadgen.experiments.comparisons import Comparison, compare_rules, ratio_chart
from loadgen.experiments.document import Chart, Document, Panel, Series, rounded
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S, period_control, unit_fleet
from loadgen.experiments.lines import Line, Results, all_cases
from loadgen.experiments.loads import Load
from loadgen.experiments.measures import WINDOWS
from loadgen.experiments.rules import FORWARD, PUBLISHED, SHORTEST_FIRST, RuleBook
from loadgen.simulation_config import Outage, SimulatedWorker, Telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_LIMIT, KV_TOKENS = 25, 10_000
UNEQUAL_LOAD, FAILURE_LOAD = 0.95, 0.8
DETECT_S = 0.5
MEAN_ANSWER_TOKENS = 210
"""Of the LMSYS-like lengths; only says when about the outage lies."""


def unequal_fleet() -> tuple[SimulatedWorker, ...]:
    """One fast, one ordinary, one slow worker, and one of half the size."""
    fleet = unit_fleet(4, BATCH_LIMIT, KV_TOKENS)
    small = unit_fleet(4, BATCH_LIMIT // 2, KV_TOKENS // 2)[3]
    return (
        replace(fleet[0], iteration_factor=0.7),
        fleet[1],
        replace(fleet[2], iteration_factor=1.6),
        small,
    )


def unequal_plan(scale: Scale) -> Plan:
    """Every rule on the unequal fleet."""
    book = RuleBook(period_control())
    rules = [*book.heuristics(), book.true_jsq(), *book.strong()]
    case = Case(
        load=Load(load=UNEQUAL_LOAD, requests=scale.fewer),
        workers=unequal_fleet(),
        rule=rules[0],
        ttft_bound_s=49 * PERIOD_S,
    )
    item = compare_rules(f"unequal workers, load {UNEQUAL_LOAD:g}", case, rules, scale)
    return Plan(all_cases(item.lines), partial(_unequal_report, scale, item))


def _unequal_report(scale: Scale, item: Comparison, results: Results) -> Document:
    return Document(
        title="Unequal workers",
        asked="One worker is fast, one slow, one small: who notices?",
        answers=(item.answer(results),),
        setting={
            "fleet": "iterations of 7, 10 and 16 ms with B = 25 and M = 10,000; 10 ms with half of "
            "both; decode only; the router is told each worker's pace and measures it",
            "load": f"LMSYS-like lengths, Poisson, {UNEQUAL_LOAD:g} of all slots, exact prediction",
            "requests": str(scale.fewer),
            "periods": "of 10 ms",
        },
        seeds=scale.seeds,
        tables=(item.table((*PERIOD_TABLE, UTILISATION), results),),
        charts=(ratio_chart("unequal", "Every policy over round robin", (item,), results),),
    )


def failure_plan(scale: Scale) -> Plan:
    """Worker w1 dies with all it holds after a third of the time and is back for the last third."""
    book = RuleBook(period_control())
    rules = [*book.heuristics(), *book.strong()]
    rate_per_s = FAILURE_LOAD * 4 * BATCH_LIMIT / MEAN_ANSWER_TOKENS * PER_PERIOD
    third_s = scale.fewer / rate_per_s / 3
    case = Case(
        load=Load(load=FAILURE_LOAD, requests=scale.fewer),
        workers=unit_fleet(4, BATCH_LIMIT, KV_TOKENS),
        rule=rules[0],
        outages=(Outage(worker_id="w1", down_s=round(third_s, 2), up_s=round(2 * third_s, 2)),),
        telemetry=Telemetry(detect_s=DETECT_S),
        ttft_bound_s=49 * PERIOD_S,
        probe=Probe.WINDOWS,
    )
    item = compare_rules(f"w1 is away for a third, load {FAILURE_LOAD:g}", case, rules, scale)
    return Plan(all_cases(item.lines), partial(_failure_report, scale, item))


def _failure_report(scale: Scale, item: Comparison, results: Results) -> Document:
    return Document(
        title="A worker dies and comes back",
        asked="How many requests are lost with it, and how long until the wait is back to normal?",
        answers=(
            item.answer(results),
            "Lost with the worker: "
            + ", ".join(
                f"{found.label} {100 * found.mean('share_failed', results):.1f} %"
                for found in item.lines
            )
            + ".",
        ),
        setting={
            "fleet": f"4 workers, B = {BATCH_LIMIT}, M = {KV_TOKENS:,}, decode only",
            "outage": "w1 dies after a third of the arrivals' time with everything it holds and "
            f"waits in it, comes back empty after two thirds; known {DETECT_S:g} s later",
            "load": f"{FAILURE_LOAD:g} of four workers, so {FAILURE_LOAD * 4 / 3:.2f} of three",
            "lost requests": "have no latency; their share is in the table",
            "requests": str(scale.fewer),
        },
        seeds=scale.seeds,
        tables=(item.table((*PERIOD_TABLE, FAILED, UTILISATION), results),),
        charts=(_failure_chart(item, results),),
    )


def _failure_chart(item: Comparison, results: Results) -> Chart:
    shown = ("least_outstanding", SHORTEST_FIRST, PUBLISHED, FORWARD)
    panel = Panel(
        kind="lines",
        title="w1 is away in the middle third",
        x_label="share of the time of arrivals",
        y_label="mean TTFT, periods",
        series=tuple(_over_time(found, results) for found in item.lines if found.label in shown),
    )
    return Chart("failure", "Mean TTFT by time of arrival", (panel,))


def _over_time(item: Line, results: Results) -> Series:
    columns: Sequence[tuple[float | None, ...]] = list(
        zip(*(results[case].series["ttft_by_window_s"] for case in item.cases), strict=True)
    )
    y: list[float | None] = []
    for column in columns:
        known = [value for value in column if value is not None]
        y.append(rounded(PER_PERIOD * sum(known) / len(known)) if known else None)
    x = tuple(rounded((step + 0.5) / WINDOWS) for step in range(WINDOWS))
    return Series(item.label, x, tuple(y))


UNEQUAL = Experiment(name="unequal", summary="fast, slow and small workers", plan=unequal_plan)
FAILURE = Experiment(name="failure", summary="a worker dies mid-run", plan=failure_plan)
