"""`bidgate-load bench tick`: what a decision and a price refresh cost at several sizes."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from loadgen.bench_tick import CASES, ROUNDS_MAX, Case, measure_case, summary_of
from loadgen.cpu import CpuMeter, processors
from loadgen.live import command_line
from loadgen.summary import SUMMARY_FILE, write_json
from loadgen.tick_page import page
from service.control.config import ControlConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue

COLUMNS = (
    ("decision p50", "decision_p50_ms"),
    ("p99", "decision_p99_ms"),
    ("refresh p50", "refresh_p50_ms"),
    ("p99", "refresh_p99_ms"),
    ("published loop p50", "published_loop_p50_ms"),
)


def tick(
    *,
    out: Path = Path("out/bench/tick"),
    docs: Path | None = None,
    cases: int = len(CASES),
    rounds: int = 1,
    seed: int = 0,
) -> int:
    """Measure decisions and price refreshes beside the published method in plain loops.

    Parameters
    ----------
    out
        Directory for summary.json.
    docs
        Page to write: the table, the aims, growth and memory.
    cases
        How many of the sizes, smallest first; all five take about two minutes.
    rounds
        How often all of them are measured. Of each size the quickest round is shown, beside how the
        rounds differ: on a shared machine the same code takes up to twice as long in some.
    seed
        Of the fleet's state.
    """
    if not 1 <= cases <= len(CASES):
        raise ValueError(f"cases must be in 1..{len(CASES)}, got {cases}")
    if not 1 <= rounds <= ROUNDS_MAX:
        raise ValueError(f"rounds must be in 1..{ROUNDS_MAX}, got {rounds}")
    load_average, meter, console = os.getloadavg()[0], CpuMeter.start(()), Console()
    measured: list[list[Case]] = [[] for _ in CASES[:cases]]
    for count, (size, found) in product(range(rounds), zip(CASES, measured, strict=False)):
        with console.status(f"{size[0]} workers, {size[1]} waiting, round {count + 1}"):
            found.append(measure_case(*size, ControlConfig(), seed))
    summaries: list[JsonValue] = [summary_of(found) for found in measured]
    summary: dict[str, JsonValue] = {
        "command": command_line(),
        "processors": processors(),
        "load_average": load_average,
        "others_share": meter.others_share(),
        "cases": summaries,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(summary, out / SUMMARY_FILE)
    if docs is not None:
        docs.write_text(page(summary), encoding="utf-8")
    console.print(_table(summaries))
    return 0


def _table(summaries: Sequence[JsonValue]) -> Table:
    table = Table(title="wall time, milliseconds")
    table.add_column("workers x waiting")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right")
    table.add_column("loop / ours", justify="right")
    for found in summaries:
        assert isinstance(found, dict)
        times = (_number(found[key], "{:.2f}") for _, key in COLUMNS)
        size = f"{found['workers']} x {found['waiting']}"
        table.add_row(size, *times, _number(found["ratio"], "x{:.0f}"))
    return table


def _number(value: JsonValue, form: str) -> str:
    return form.format(value) if isinstance(value, float) else "-"
