"""The JSON of an experiment: tables, charts and claims, everything that pictures and pages show.

Plain values without wall-clock times, so that one seed gives the same bytes twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import orjson
from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from pathlib import Path

SIGNIFICANT_DIGITS = 4


class Verdict(StrEnum):
    """What became of a claim; skipped where the numbers allow no verdict."""

    CONFIRMED = "confirmed"
    CONDITIONS = "confirmed with conditions"
    NOT_REPRODUCED = "not reproduced"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over several seeds: mean and extremes."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A measured value and its ratio to the base row of the same seed; None where there is none."""

    value: Spread | None
    ratio: Spread | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """One measure of a table.

    Attributes:
        key: name among the measured values of a simulation.
        title: what people read.
        unit: "iterations", "s", "share", "count", "rate" or "percent".
        factor: shown = measured times this.
        compared: whether ratios to the base row are shown.
        better: -1 when less is better, 1 when more is, 0 when neither.
    """

    key: str
    title: str
    unit: str = "s"
    factor: float = 1.0
    compared: bool = False
    better: int = -1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what ran, and a cell a column."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of policies or settings.

    Attributes:
        title: heading.
        columns: measures.
        rows: in order.
        base: label of the row that ratios refer to; "" for none.
        note: what to know before reading it.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    base: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, set of points or set of bars; low and high are the spread over seeds."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes."""

    kind: Literal["bars", "lines", "points"]
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    reference: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """One PNG: panels side by side."""

    name: str
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something the paper, or we, say, and what the numbers say to it.

    Attributes:
        source: "Figure 4", "Table 2", or "ours".
        statement: the claim in one sentence.
        verdict: what became of it.
        evidence: the numbers, in sentences.
        chart: name of the picture that shows it; "" for none.
    """

    source: str
    statement: str
    verdict: Verdict
    evidence: str
    chart: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One experiment's results.

    A report leaves name, command, faults and scale to experiment.py and execution.py.

    Attributes:
        name: as on the command line.
        title: heading.
        asked: the question.
        answers: what came out, a sentence each, what does not flatter us included.
        setting: everything needed to judge it, as text.
        command: the command line that makes it again.
        seeds: of the runs.
        faults: ticks in which a policy failed and first come first served decided instead.
        skipped: what was not run, and why.
        scale: what of the whole grid was run; "" for all of it.
    """

    name: str = ""
    title: str
    asked: str
    answers: tuple[str, ...]
    setting: dict[str, str]
    command: str = ""
    seeds: tuple[int, ...]
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    claims: tuple[Claim, ...] = ()
    faults: int = 0
    skipped: tuple[str, ...] = field(default=())
    scale: str = ""


def rounded(value: float) -> float:
    """Keep four significant digits: enough for people, and small files."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value))))


def write_document(document: Document, path: Path) -> None:
    """Write JSON with a final newline, the same bytes for equal documents."""
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))


def read_document(path: Path) -> Document:
    """Read a document back.

    Raises:
        ValueError: when the file is none.
    """
    try:
        return TypeAdapter(Document).validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: no experiment document: {error.errors()[0]['msg']}") from error
