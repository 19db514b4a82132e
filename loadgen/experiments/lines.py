"""Rows and curves: one setting under several seeds, and what tables and pictures make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from loadgen.experiments.cases import Case, make_case
from loadgen.experiments.document import Cell, Column, Row, Series, Spread, Table, rounded
from loadgen.experiments.measures import Measured

if TYPE_CHECKING:
    from loadgen.experiments.rules import Rule

Results: TypeAlias = Mapping[Case, Measured]


@dataclass(frozen=True, slots=True)
class Line:
    """One setting under every seed, in the order of the seeds."""

    label: str
    cases: tuple[Case, ...]

    def values(self, key: str, results: Results) -> list[float | None]:
        """One measured number a seed; None where there is none."""
        return [results[case].values.get(key) for case in self.cases]

    def spread(self, key: str, results: Results, factor: float = 1.0) -> Spread | None:
        """Mean and extremes over the seeds."""
        return spread([None if v is None else v * factor for v in self.values(key, results)])

    def mean(self, key: str, results: Results) -> float:
        """Mean over the seeds.

        Raises:
            KeyError: when there is no such number.
        """
        found = self.spread(key, results)
        if found is None:
            raise KeyError(f"{self.label} has no {key}")
        return found.mean


def line(case: Case, seeds: Sequence[int], label: str = "") -> Line:
    """Repeat a case under every seed."""
    return Line(
        label or case.rule.label,
        tuple(make_case(replace(case, load=replace(case.load, seed=seed))) for seed in seeds),
    )


def lines_under(case: Case, rules: Iterable[Rule], seeds: Sequence[int]) -> tuple[Line, ...]:
    """Put one case under rule after rule, each under every seed."""
    return tuple(line(replace(case, rule=rule), seeds) for rule in rules)


def pick(lines: Iterable[Line], label: str) -> Line:
    """Find a line by its label.

    Raises:
        KeyError: when there is none.
    """
    for item in lines:
        if item.label == label:
            return item
    raise KeyError(f"no line {label!r}")


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and extremes of what is there; None when nothing is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(
        mean=rounded(sum(there) / len(there)),
        low=rounded(min(there)),
        high=rounded(max(there)),
    )


def ratio(mine: Sequence[float | None], base: Sequence[float | None]) -> Spread | None:
    """Ratios seed by seed."""
    pairs = zip(mine, base, strict=True)
    return spread([a / b if a is not None and b else None for a, b in pairs])


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How to tabulate lines.

    Attributes:
        title: heading.
        columns: measures.
        base: label of the line that ratios refer to; "" for none.
        note: what to know before reading it.
    """

    title: str
    columns: tuple[Column, ...]
    base: str = ""
    note: str = ""


def tabulate(lines: Sequence[Line], spec: TableSpec, results: Results) -> Table:
    """Make a table of lines that all ran under the same seeds."""
    base = next((item for item in lines if item.label == spec.base), None)
    return Table(
        title=spec.title,
        columns=spec.columns,
        rows=tuple(
            Row(item.label, tuple(_cell(item, base, column, results) for column in spec.columns))
            for item in lines
        ),
        base=spec.base if base is not None else "",
        note=spec.note,
    )


def _cell(item: Line, base: Line | None, column: Column, results: Results) -> Cell:
    value = item.spread(column.key, results, column.factor)
    if base is None or not column.compared or item is base:
        return Cell(value)
    return Cell(value, ratio(item.values(column.key, results), base.values(column.key, results)))


@dataclass(frozen=True, slots=True)
class Curve:
    """Lines along an axis: x values and the line at each."""

    label: str
    x: tuple[float | str, ...]
    lines: tuple[Line, ...] = field(default=())


def series(curve: Curve, key: str, results: Results, factor: float = 1.0) -> Series:
    """Turn one measure of a curve into a series with its spread."""
    drawn = front(
        curve.label, curve.lines, lambda _: 0.0, lambda item: item.spread(key, results, factor)
    )
    return replace(drawn, x=curve.x)


def front(
    label: str,
    lines: Sequence[Line],
    x: Callable[[Line], float],
    y: Callable[[Line], Spread | None],
) -> Series:
    """Place lines in a plane, joined in their order; the spread is that of y."""
    found = [y(item) for item in lines]
    return Series(
        label=label,
        x=tuple(x(item) for item in lines),
        y=tuple(None if s is None else s.mean for s in found),
        low=tuple(None if s is None else s.low for s in found),
        high=tuple(None if s is None else s.high for s in found),
    )


class HasLines(Protocol):
    """A group of settings that are shown together."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """All of them."""


def cases_of(groups: Iterable[HasLines]) -> tuple[Case, ...]:
    """Every case of every line of every group."""
    return tuple(case for group in groups for case in all_cases(group.lines))


def all_cases(lines: Sequence[Line]) -> tuple[Case, ...]:
    """Every case of every line."""
    return tuple(case for item in lines for case in item.cases)
