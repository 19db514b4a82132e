"""What an experiment is: a plan of cases, and a report made from what they gave.

A line is one row of a table or one point of a curve: the same setting under several seeds.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from loadgen.experiments.cases import Case, make_case
from loadgen.experiments.document import Cell, Column, Document, Row, Series, Spread, Table, rounded
from loadgen.experiments.measures import Measured

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.experiments.rules import Rule

Results: TypeAlias = Mapping[Case, Measured]

FEWER = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to run.

    Attributes:
        seeds: one simulation of every setting for each.
        requests: in one simulation, where an experiment does not say otherwise.
        full: whole grids instead of reduced ones.
        data: folder of recorded traces, or None.
    """

    seeds: tuple[int, ...] = (1, 2)
    requests: int = 1000
    full: bool = False
    data: Path | None = None

    @property
    def fewer(self) -> int:
        """Requests of the experiments that need less, in reduced grids."""
        return self.requests if self.full else max(4, round(FEWER * self.requests))

    def times(self, factor: int) -> int:
        """Requests of an experiment that looks at tails, so many times as many in reduced grids."""
        return self.requests if self.full else factor * self.requests

    @property
    def fewer_seeds(self) -> tuple[int, ...]:
        """Seeds of what repeats another picture under slightly other conditions: one if reduced."""
        return self.seeds if self.full else self.seeds[:1]

    def command(self, name: str) -> str:
        """Write the command line that makes an experiment again; the data folder as DIR."""
        words = ["bidgate-load", "experiments", name, "--seeds", str(len(self.seeds))]
        words += ["--requests", str(self.requests)]
        if self.full:
            words.append("--full")
        if self.data is not None:
            words += ["--data", "DIR"]
        return shlex.join(words)


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases to simulate, and what to make of them.

    Attributes:
        cases: any order, repetitions allowed.
        report: makes the document once all are there, but for its name, command and faults.
        missing: why there is nothing to run, as recorded data that are not there; "" if there is.
    """

    cases: tuple[Case, ...]
    report: Callable[[Results], Document]
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One entry of the registry.

    Attributes:
        name: as on the command line, and of its files.
        summary: one line for help.
        plan: chooses the cases at a scale.
        clocked: whether it reads the machine's clock; such a one runs alone and its numbers differ
            from run to run.
    """

    name: str
    summary: str
    plan: Callable[[Scale], Plan]
    clocked: bool = False


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


def finished(name: str, plan: Plan, scale: Scale, results: Results) -> Document:
    """Make an experiment's document: its report, and what is alike in all of them."""
    return replace(
        plan.report(results),
        name=name,
        command=scale.command(name),
        faults=faults(plan.cases, results),
    )


def faults(cases: Iterable[Case], results: Results) -> int:
    """Ticks in which a policy failed and the fallback decided."""
    return int(sum(results[case].values.get("faults", 0.0) for case in set(cases)))
