"""Where requests come from: open_trace, over the embedded table and every file format.

A trace is a stream of TraceRequest. Formats are told by name and content; "format:path" forces
one. Sources without times (tables, conversations) have arrival 0: arrivals.py puts times on them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.conversations import read_lmsys_jsonl, read_lmsys_parquet, read_sharegpt
from loadgen.lmsys_like import lengths_stream
from loadgen.rebuilt_heads import COLUMNS as MOONCAKE_COLUMNS
from loadgen.rebuilt_heads import read_mooncake_csv
from loadgen.trace_csv import (
    ARRIVAL_COLUMNS,
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    csv_header,
    read_csv,
)
from loadgen.trace_errors import TraceError
from loadgen.trace_json import json_lines, read_plain_jsonl, read_timed_jsonl
from loadgen.trace_record import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LMSYS_LIKE = "lmsys-like"
FIXED = "fixed"
FILE_FORMATS = (
    "csv",
    "azure",
    "burstgpt",
    "jsonl",
    "mooncake",
    "mooncake_csv",
    "timed_trace",
    "lmsys",
    "sharegpt",
)
TIMED_FORMATS = frozenset({"azure", "burstgpt", "mooncake", "mooncake_csv", "timed_trace"})


@dataclass(frozen=True, slots=True)
class Trace:
    """A source of requests that can be read again from the start.

    Attributes:
        name: what it is, for reports.
        timed: whether its requests carry recorded arrival times.
        endless: whether it never ends (the embedded table, fixed lengths).
        read: starts a new pass; the argument is the seed, which files do not use.
    """

    name: str
    timed: bool
    endless: bool
    read: Callable[[int], Iterator[TraceRequest]]


def open_trace(spec: str) -> Trace:
    """Choose a source by its name.

    Args:
        spec: "lmsys-like"; "fixed:PROMPTxDECODE"; a path; or "format:path" with a format of
            FILE_FORMATS.

    Raises:
        TraceError: when there is no such file or its format cannot be told.
    """
    if spec == LMSYS_LIKE:
        return Trace(name=LMSYS_LIKE, timed=False, endless=True, read=_lmsys_like)
    form, colon, rest = spec.partition(":")
    if colon and form == FIXED:
        return _fixed(spec, rest)
    if colon and form in FILE_FORMATS:
        path = Path(rest)
    else:
        form, path = "", Path(spec)
    if not path.exists():
        raise TraceError(f"no trace {spec!r}: not {LMSYS_LIKE!r}, no such file, no known format")
    return _file_trace(form or detect_format(path), path)


def detect_format(path: Path) -> str:
    """Tell the format of a trace file from its name and its first record.

    Raises:
        TraceError: when nothing fits.
    """
    name = path.name.removesuffix(".gz")
    if path.is_dir() or name.endswith(".parquet"):
        return "lmsys"
    if name.endswith(".csv"):
        return _csv_format(path)
    if name.endswith((".jsonl", ".ndjson")):
        return _jsonl_format(path)
    if name.endswith(".json"):
        return "sharegpt"
    raise TraceError(f"{path}: cannot tell the format; say one of {', '.join(FILE_FORMATS)}:path")


def _csv_format(path: Path) -> str:
    header = set(csv_header(path))
    if header.issuperset(AZURE_COLUMNS):
        return "azure"
    if header.issuperset(BURSTGPT_COLUMNS):
        return "burstgpt"
    if header.issuperset(MOONCAKE_COLUMNS):
        return "mooncake_csv"
    return "csv"


def _jsonl_format(path: Path) -> str:
    first = next(json_lines(path), None)
    if first is None:
        raise TraceError(f"{path}: the file is empty")
    _, record = first
    if "input_length" in record:
        return "mooncake"
    return "lmsys" if "conversation" in record else "jsonl"


def _file_trace(form: str, path: Path) -> Trace:
    return Trace(
        name=f"{form}:{path.name}",
        timed=_is_timed(form, path),
        endless=False,
        read=lambda _seed: _reader(form, path),
    )


def _is_timed(form: str, path: Path) -> bool:
    if form == "csv":
        return not ARRIVAL_COLUMNS.isdisjoint(csv_header(path))
    if form == "jsonl":
        first = next(json_lines(path), None)
        return first is not None and "arrival_s" in first[1]
    return form in TIMED_FORMATS


def _reader(form: str, path: Path) -> Iterator[TraceRequest]:
    match form:
        case "csv" | "azure" | "burstgpt":
            return read_csv(path, form)
        case "mooncake" | "timed_trace":
            return read_timed_jsonl(path)
        case "mooncake_csv":
            return read_mooncake_csv(path)
        case "jsonl":
            return read_plain_jsonl(path)
        case "sharegpt":
            return read_sharegpt(path)
        case "lmsys":
            return _lmsys(path)
        case _:
            raise TraceError(f"unknown trace format {form!r}; known: {', '.join(FILE_FORMATS)}")


def _lmsys(path: Path) -> Iterator[TraceRequest]:
    if path.is_dir() or path.suffix == ".parquet":
        return read_lmsys_parquet(path)
    return read_lmsys_jsonl(path)


def _lmsys_like(seed: int) -> Iterator[TraceRequest]:
    for prompt_tokens, decode_tokens in lengths_stream(seed):
        yield TraceRequest(arrival_s=0.0, prompt_tokens=prompt_tokens, decode_tokens=decode_tokens)


def _fixed(spec: str, lengths: str) -> Trace:
    try:
        prompt, decode = (int(part) for part in lengths.split("x"))
        request = TraceRequest(arrival_s=0.0, prompt_tokens=prompt, decode_tokens=decode)
    except ValueError as error:
        raise TraceError(f"{spec!r}: expected fixed:PROMPTxDECODE, as fixed:128x64") from error
    return Trace(name=spec, timed=False, endless=True, read=lambda _seed: itertools.repeat(request))
