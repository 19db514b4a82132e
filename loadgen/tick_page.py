"""The page of `bidgate-load bench tick`: its table, the aims, and how cost grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.comparison import value_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue

NEAR_LINEAR = 1.15
"""Exponent of growth up to which cost counts as growing in proportion."""
OTHERS_MAX = 0.1
"""Share of the processors that others may use before times say more about them than about us."""
GROWTH_FROM, GROWTH_TO = (64, 1024), (1024, 10_000)

HEAD = """# What a decision and a price refresh cost

`{command}`

Wall time in milliseconds, one thread, on {processors} processors. When it began the load average
was {load_average:.2f}, and while it ran others used {others} of the processors.

**Decision** is `Router.tick` of a full fleet: every batch is full, one or two requests end and as
many arrive between two ticks, and prices are refreshed as often as a live router does it.
**Refresh** is snapshot, solution and adoption after every worker decoded; its **loop part** is what
of that runs on the event loop's thread: the snapshot and the adoption. **Published loop** is one
tick of the paper's method with columns as Python objects and loops over the history, where that
ends in time; **ratio** is that over our decision and refresh together. Where others use the
processors too, wall time counts their turns as well; the second table has processor time, which
does not. Of several rounds the tables show the quickest of each size, the one nearest to what the
code costs; how they differ stands below, and an aim is met where all rounds meet it.
"""
COLUMNS = (
    ("decision p50", "decision_p50_ms", "{:.2f}"),
    ("p99", "decision_p99_ms", "{:.2f}"),
    ("refresh p50", "refresh_p50_ms", "{:.2f}"),
    ("p99", "refresh_p99_ms", "{:.2f}"),
    ("its loop part p50", "refresh_loop_p50_ms", "{:.2f}"),
    ("p99", "refresh_loop_p99_ms", "{:.2f}"),
    ("published loop p50", "published_loop_p50_ms", "{:.0f}"),
    ("ratio", "ratio", "{:.0f}"),
)
TOO_BUSY = """Others used too much of the processors for a verdict on times, or on growth: repeat it
on a machine with nothing else to do. Memory does not depend on that.
"""
CPU_COLUMNS = (
    ("decision p50", "decision_cpu_p50_ms", "{:.2f}"),
    ("p99", "decision_cpu_p99_ms", "{:.2f}"),
    ("refresh p50", "refresh_cpu_p50_ms", "{:.2f}"),
    ("p99", "refresh_cpu_p99_ms", "{:.2f}"),
    ("its loop part p50", "refresh_loop_cpu_p50_ms", "{:.2f}"),
    ("p99", "refresh_loop_cpu_p99_ms", "{:.2f}"),
    ("published loop p50", "loop_cpu_p50_ms", "{:.0f}"),
)
ROUND_COLUMNS = (
    ("decision p50", "decision_p50_ms", "{:.2f}"),
    ("decision p99", "decision_p99_ms", "{:.2f}"),
    ("refresh p50", "refresh_p50_ms", "{:.2f}"),
    ("published loop p50", "published_loop_p50_ms", "{:.0f}"),
)
MEMORY_COLUMNS = (
    ("history and prices, MB", "price_state_mb", "{:.1f}"),
    ("a refresh adds at most, MB", "refresh_peak_mb", "{:.1f}"),
    ("all arrays of the router, MB", "router_arrays_mb", "{:.1f}"),
)


@dataclass(frozen=True, slots=True)
class Aim:
    """A number that one size must not exceed.

    Attributes:
        size: workers and waiting requests. key: of the summary. most: the bound. text: the claim.
    """

    size: tuple[int, int]
    key: str
    most: float
    text: str


AIMS = (
    Aim((64, 1024), "decision_p50_ms", 0.5, "decision p50, ms"),
    Aim((64, 1024), "decision_p99_ms", 1.5, "decision p99, ms"),
    Aim((64, 1024), "refresh_p50_ms", 1.5, "price refresh p50, ms"),
    Aim((1024, 10_000), "decision_p50_ms", 8.0, "decision p50, ms"),
    Aim((1024, 10_000), "price_memory_mb", 100.0, "history, prices and refresh together, MB"),
)


def page(summary: dict[str, JsonValue]) -> str:
    """Write the page of one run in Markdown."""
    cases = _cases(summary)
    others = value_at(summary, ("others_share",))
    head = HEAD.format(
        command=summary["command"],
        processors=summary["processors"],
        load_average=value_at(summary, ("load_average",)) or 0.0,
        others="an unknown share" if others is None else f"{others:.0%}",
    )
    parts = [head, "Wall time, ms:\n", _table(cases, COLUMNS)]
    parts += ["Processor time, ms:\n", _table(cases, CPU_COLUMNS), "## Aims\n"]
    busy = others is not None and others > OTHERS_MAX
    parts += [TOO_BUSY] if busy else []
    parts += [_aims(cases, busy=busy), "## Every round, ms\n", _rounds(cases)]
    parts += [
        "## Growth\n",
        _growth(cases, busy=busy),
        "## Memory\n",
        _table(cases, MEMORY_COLUMNS),
    ]
    return "\n".join(parts)


def _cases(summary: dict[str, JsonValue]) -> list[dict[str, JsonValue]]:
    cases = summary["cases"]
    assert isinstance(cases, list)
    return [case for case in cases if isinstance(case, dict)]


def _table(cases: Sequence[dict[str, JsonValue]], columns: Sequence[tuple[str, str, str]]) -> str:
    titles = ["workers x waiting", *(title for title, _, _ in columns)]
    lines = [_row(titles), "|---" + "|---:" * len(columns) + "|"]
    for case in cases:
        name = f"{case['workers']} x {case['waiting']}"
        lines.append(_row([name, *(_number(case, key, form) for _, key, form in columns)]))
    return "\n".join(lines) + "\n"


def _aims(cases: Sequence[dict[str, JsonValue]], *, busy: bool) -> str:
    lines = [_row(["size", "aim, wall time", "at most", "measured", ""]), "|---|---|---:|---:|---|"]
    for aim in AIMS:
        case = _find(cases, aim.size)
        measured = None if case is None else value_at(case, (aim.key,))
        if case is None or measured is None:
            verdict = "not measured"
        elif busy and aim.key.endswith("_ms"):
            verdict = "no verdict"
        else:
            verdict = _verdict(aim, case)
        shown = "-" if measured is None else f"{measured:.2f}"
        size = f"{aim.size[0]} x {aim.size[1]}"
        lines.append(_row([size, aim.text, f"{aim.most:g}", shown, f"**{verdict}**"]))
    return "\n".join(lines) + "\n"


def _verdict(aim: Aim, case: dict[str, JsonValue]) -> str:
    rounds = _rounds_of(case)
    met = sum((value_at(one, (aim.key,)) or math.inf) <= aim.most for one in rounds)
    if met == len(rounds):
        return "met"
    return f"met in {met} of {len(rounds)} rounds" if met else "missed"


def _rounds(cases: Sequence[dict[str, JsonValue]]) -> str:
    titles = ["workers x waiting", *(title for title, _, _ in ROUND_COLUMNS)]
    lines = [_row(titles), "|---" + "|---:" * len(ROUND_COLUMNS) + "|"]
    for case in cases:
        cells = [f"{case['workers']} x {case['waiting']}"]
        for _, key, form in ROUND_COLUMNS:
            cells.append(", ".join(_number(one, key, form) for one in _rounds_of(case)))
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _rounds_of(case: dict[str, JsonValue]) -> list[dict[str, JsonValue]]:
    rounds = case["rounds"]
    assert isinstance(rounds, list)
    return [one for one in rounds if isinstance(one, dict)]


def _growth(cases: Sequence[dict[str, JsonValue]], *, busy: bool) -> str:
    columns = (
        ("decision, microseconds for a waiting request", "decision_p50_ms", "waiting"),
        ("refresh, microseconds for a worker", "refresh_p50_ms", "workers"),
    )
    lines = [_row(["workers x waiting", *(title for title, _, _ in columns)]), "|---|---:|---:|"]
    for case in cases:
        found = [f"{case['workers']} x {case['waiting']}"]
        for _, key, per in columns:
            time_ms, count = value_at(case, (key,)), value_at(case, (per,))
            found.append("-" if time_ms is None or not count else f"{1e3 * time_ms / count:.2f}")
        lines.append(_row(found))
    return "\n".join(lines) + "\n" + _exponents(cases, busy=busy)


def _exponents(cases: Sequence[dict[str, JsonValue]], *, busy: bool) -> str:
    """Between two sizes: t2 / t1 = (size2 / size1) ^ exponent."""
    small, large = _find(cases, GROWTH_FROM), _find(cases, GROWTH_TO)
    if small is None or large is None:
        return ""
    found = []
    for name, key, per in (
        ("decision with waiting requests", "decision_p50_ms", "waiting"),
        ("refresh with workers", "refresh_p50_ms", "workers"),
    ):
        time = (value_at(large, (key,)) or 0.0) / (value_at(small, (key,)) or math.inf)
        size = (value_at(large, (per,)) or 0.0) / (value_at(small, (per,)) or math.inf)
        if time > 0 and size > 1:
            power = math.log(time) / math.log(size)
            verdict = "at most near-linear" if power <= NEAR_LINEAR else "more than linear"
            found.append(f"{name}: exponent {power:.2f}, {'no verdict' if busy else verdict}")
    sizes = " to ".join(f"{workers} x {waiting}" for workers, waiting in (GROWTH_FROM, GROWTH_TO))
    return f"\nFrom {sizes}: " + "; ".join(found) + ".\n" if found else ""


def _find(
    cases: Sequence[dict[str, JsonValue]], size: tuple[int, int]
) -> dict[str, JsonValue] | None:
    same = (case for case in cases if (case["workers"], case["waiting"]) == size)
    return next(same, None)


def _number(case: dict[str, JsonValue], key: str, form: str) -> str:
    value = value_at(case, (key,))
    return "-" if value is None else form.format(value)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
