"""The comparison of policies as rows of text, for the terminal table and for the HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from loadgen.summary import BASE_POLICY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.summary import JsonValue

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the comparison.

    Attributes:
        title: what it is called.
        path: keys into a policy's summary.
        unit: "s", "share", "count" or "rate".
        compared: whether the ratio to round robin is shown with it.
    """

    title: str
    path: tuple[str, ...]
    unit: str
    compared: bool = False


MEASURES = (
    Measure("TTFT mean", ("ttft_s", "mean"), "s", compared=True),
    Measure("TTFT p50", ("ttft_s", "p50"), "s", compared=True),
    Measure("TTFT p95", ("ttft_s", "p95"), "s", compared=True),
    Measure("TTFT p99", ("ttft_s", "p99"), "s", compared=True),
    Measure("TTFT within bound", ("share_ttft_within_bound",), "share"),
    Measure("end-to-end mean", ("e2e_s", "mean"), "s", compared=True),
    Measure("end-to-end p50", ("e2e_s", "p50"), "s", compared=True),
    Measure("end-to-end p95", ("e2e_s", "p95"), "s", compared=True),
    Measure("end-to-end p99", ("e2e_s", "p99"), "s", compared=True),
    Measure("output tokens/s", ("output_tokens_per_s",), "rate", compared=True),
    Measure("entered", ("entered",), "count"),
    Measure("completed", ("completed",), "count"),
    Measure("refused", ("refused",), "count"),
    Measure("cancelled", ("cancelled",), "count"),
    Measure("failed", ("failed",), "count"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measure; a (value, ratio to round robin) pair a policy, "" where there is no ratio."""

    title: str
    pairs: tuple[tuple[str, str], ...]


def policy_names(summary: Mapping[str, JsonValue]) -> list[str]:
    """List the policies in the order in which they ran."""
    return list(_mapping(summary.get("policies")))


def comparison_rows(summary: Mapping[str, JsonValue]) -> list[Row]:
    """Make the rows of the comparison from the content of summary.json."""
    policies = _mapping(summary.get("policies"))
    ratios = _mapping(summary.get("ratio_to_round_robin"))
    return [
        Row(
            title=measure.title,
            pairs=tuple(
                (
                    _cell(value_at(policies[name], measure.path), measure),
                    _ratio(name, value_at(ratios.get(name), measure.path), measure),
                )
                for name in policies
            ),
        )
        for measure in MEASURES
    ]


def comparison_table(summary: Mapping[str, JsonValue], title: str) -> Table:
    """Make the terminal table: a measure a line, a policy a column, ratios beside the values."""
    table = Table(title=title, title_justify="left", header_style="bold", show_edge=False)
    table.add_column("")
    for name in policy_names(summary):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison_rows(summary):
        table.add_row(row.title, *(_joined(value, ratio) for value, ratio in row.pairs))
    return table


def value_at(value: JsonValue, path: tuple[str, ...]) -> float | None:
    """Follow keys into nested JSON objects down to a number; None when there is none."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return float(value) if isinstance(value, int | float) else None


def seconds_text(value: float) -> str:
    """Write a duration with three significant figures and its unit."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1.0:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _joined(value: str, ratio: str) -> str:
    return f"{value} [dim]{ratio:>6}[/dim]" if ratio else value


def _cell(value: float | None, measure: Measure) -> str:
    if value is None:
        return NOTHING
    match measure.unit:
        case "s":
            return seconds_text(value)
        case "share":
            return f"{value:.0%}"
        case _:
            return f"{value:,.0f}"


def _ratio(policy: str, value: float | None, measure: Measure) -> str:
    if value is None or not measure.compared or policy == BASE_POLICY:
        return ""
    return f"x{value:.2f}"


def _mapping(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}
