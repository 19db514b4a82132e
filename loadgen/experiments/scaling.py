"""From 4 to 256 workers: quality at constant load a worker, and how long decisions take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from loadgen.experiments.cases import Case, Probe
from loadgen.experiments.columns import PERIOD_TABLE
from loadgen.experiments.document import Cell, Chart, Column, Document, Panel, Row, Table
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S, period_control, unit_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.lines import (
    Curve,
    Line,
    Results,
    TableSpec,
    all_cases,
    cases_of,
    line,
    series,
    spread,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import RuleBook

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_LIMIT, KV_TOKENS = 8, 3_200
SIZES, SIZES_FULL = (4, 16, 64), (4, 16, 64, 256)
PER_WORKER, PER_WORKER_FULL = 0.03, 0.1
"""Requests a worker, as a share of the usual number of a run."""
LOAD = 1.0
HORIZONS = (512, 2048, 8192)
TICK_SIZES, TICK_SIZES_FULL = (4, 16, 64), (4, 16, 64, 256)
TICK_LOAD = 1.3
TICK_REQUESTS, TICK_REQUESTS_FULL = 12, 24
"""Requests a worker when only the time of decisions is measured."""


def plan(scale: Scale) -> Plan:
    """Every size of fleet at the same load a worker."""
    book = RuleBook(period_control())
    rules = [*book.heuristics(), book.first_come(), book.shortest_first(), book.forward()]
    sizes = SIZES_FULL if scale.full else SIZES
    curves = []
    for rule in rules:
        lines = []
        for size in sizes:
            share = PER_WORKER_FULL if scale.full else PER_WORKER
            case = Case(
                load=Load(load=LOAD, requests=max(5, round(share * scale.requests)) * size),
                workers=unit_fleet(size, BATCH_LIMIT, KV_TOKENS),
                rule=rule,
                ttft_bound_s=49 * PERIOD_S,
            )
            seeds = scale.seeds if size < sizes[-1] else scale.fewer_seeds
            lines.append(line(case, seeds, f"{rule.label}: {size} workers"))
        curves.append(Curve(rule.label, tuple(str(size) for size in sizes), tuple(lines)))
    return Plan(cases_of(curves), partial(_report, scale, tuple(curves)))


def _report(scale: Scale, curves: Sequence[Curve], results: Results) -> Document:
    lines = [item for curve in curves for item in curve.lines]
    told = "; ".join(
        f"{curve.label} {number(curve.lines[0].mean('ttft_mean_s', results) * PER_PERIOD)} to "
        f"{number(curve.lines[-1].mean('ttft_mean_s', results) * PER_PERIOD)}"
        for curve in curves
    )
    ends = f"from {curves[0].x[0]} to {curves[0].x[-1]} workers"
    return Document(
        title="From few workers to many",
        asked="At the same load a worker, what does a larger fleet change?",
        answers=(f"Mean TTFT in periods {ends}: {told}.",),
        setting={
            "fleet": f"B = {BATCH_LIMIT}, M = {KV_TOKENS:,} a worker, decode only",
            "load": f"LMSYS-like lengths, Poisson, load {LOAD:g}, exact prediction; requests in "
            "proportion to the workers, so the time is about the same",
            "seeds of the largest fleet": ", ".join(map(str, scale.fewer_seeds)),
        },
        seeds=scale.seeds,
        tables=(tabulate(lines, TableSpec("Every point", PERIOD_TABLE), results),),
        charts=(
            Chart(
                "scaling",
                "TTFT against workers",
                tuple(
                    Panel(
                        kind="lines",
                        title=title,
                        x_label="workers",
                        y_label=f"{title}, periods (log)",
                        log_y=True,
                        series=tuple(series(c, key, results, PER_PERIOD) for c in curves),
                    )
                    for key, title in (("ttft_mean_s", "mean TTFT"), ("ttft_p99_s", "p99 TTFT"))
                ),
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed setting."""

    workers: int
    horizon: int
    item: Line


def overhead_plan(scale: Scale) -> Plan:
    """Time every decision of short overloaded runs; one seed, as the machine is the noise."""
    timings = []
    for workers, horizon in [
        *((size, 2048) for size in (TICK_SIZES_FULL if scale.full else TICK_SIZES)),
        *((4, horizon) for horizon in HORIZONS if horizon != 2048),
    ]:
        book = RuleBook(replace(period_control(), horizon_iterations=horizon))
        case = Case(
            load=Load(load=TICK_LOAD, requests=_tick_requests(scale) * workers),
            workers=unit_fleet(workers, BATCH_LIMIT, KV_TOKENS),
            rule=book.forward(),
            probe=Probe.TICKS,
        )
        for rule in (book.forward(), book.published(), book.shortest_first()):
            item = line(replace(case, rule=rule), scale.seeds[:1])
            timings.append(Timing(workers, horizon, item))
    cases = all_cases([timing.item for timing in timings])
    return Plan(cases, partial(_overhead_report, scale, tuple(timings)))


def _tick_requests(scale: Scale) -> int:
    return TICK_REQUESTS_FULL if scale.full else TICK_REQUESTS


def _overhead_report(scale: Scale, timings: Sequence[Timing], results: Results) -> Document:
    rows = []
    for timing in timings:
        found = results[timing.item.cases[0]].series
        ticks = np.array([t for t in found["tick_s"] if t is not None])
        refreshes = np.array([t for t in found["refresh_s"] if t is not None])
        cells = [Cell(spread([1e3 * float(np.percentile(ticks, q))])) for q in (50, 99)]
        refresh = [1e3 * float(np.percentile(refreshes, 50))] if refreshes.size else []
        label = f"{timing.item.label}: {timing.workers} workers, H = {timing.horizon}"
        rows.append(Row(label, (*cells, Cell(spread(list(refresh))))))
    columns = (
        Column("p50", "decision p50", "ms"),
        Column("p99", "decision p99", "ms"),
        Column("refresh", "price refresh p50", "ms"),
    )
    slowest = max(rows, key=lambda row: row.cells[0].value.mean if row.cells[0].value else 0.0)
    return Document(
        title="How long a decision takes",
        asked="How does the time of one decision grow with workers and horizon?",
        answers=(
            f"The slowest median decision is that of {slowest.label}. These are wall-clock times "
            "of one run on whatever machine ran it; `bidgate-load bench` measures with more care.",
        ),
        setting={
            "load": f"{TICK_LOAD:g} of the slots, {_tick_requests(scale)} requests a worker, B = "
            f"{BATCH_LIMIT}; every tick of the run counts, the idle ones too",
            "published": "refreshes its prices inside the decision, as Algorithm 1 says",
        },
        seeds=scale.seeds[:1],
        tables=(Table("Milliseconds", columns, tuple(rows)),),
    )


SCALING = Experiment(name="scaling", summary="4 to 64 (full: 256) workers", plan=plan)
OVERHEAD = Experiment(
    name="overhead",
    summary="time of a decision against workers and horizon",
    plan=overhead_plan,
    clocked=True,
)
