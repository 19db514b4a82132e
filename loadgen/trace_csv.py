"""Traces kept as CSV: plain, Azure 2023 and BurstGPT, told apart by their header. gz is accepted.

Plain CSV needs the columns prompt_tokens and output_tokens (or decode_tokens); arrival_s, tenant,
group, value, ttft_bound_s and decode_tokens_hint may be there; other columns are passed over.
"""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, BinaryIO, TextIO

from loadgen.trace_errors import TraceError
from loadgen.trace_record import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Row = dict[str, str]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
PLAIN_COLUMNS = ("prompt_tokens",)
ARRIVAL_COLUMNS = frozenset({"arrival_s", "TIMESTAMP", "Timestamp"})


def open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    """Open a file for reading, unpacking one whose name ends in .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def open_text(path: Path) -> TextIO:
    """Open a text file for reading, unpacking one whose name ends in .gz."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


def csv_header(path: Path) -> list[str]:
    """Return the column names of a CSV file; an empty file is an error."""
    with open_text(path) as lines:
        try:
            header = next(csv.reader(lines), None)
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceError.at(path, 1, str(error)) from error
    if not header:
        raise TraceError(f"{path}: the file is empty, expected a CSV header")
    return [name.strip() for name in header]


def read_csv(path: Path, form: str) -> Iterator[TraceRequest]:
    """Yield the requests of a CSV trace, in file order.

    Args:
        path: the file, plain or gz.
        form: "csv", "azure" or "burstgpt".

    Raises:
        TraceError: for a missing column or a malformed row, naming file and line.
    """
    parse, needed = CSV_FORMATS[form]
    with open_text(path) as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: not a {form} trace: no column {missing[0]!r} in the header")
        try:
            for row in reader:
                request = parse(row)
                if request is not None:
                    yield request
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            raise TraceError.at(path, max(1, reader.line_num), _describe(error)) from error


def _describe(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no column {error.args[0]!r}"
    if isinstance(error, TypeError):
        return "the row has fewer fields than the header"
    return str(error).replace("invalid literal for int() with base 10:", "no whole number:")


def _plain(row: Row) -> TraceRequest:
    length = row["output_tokens"] if "output_tokens" in row else row["decode_tokens"]
    request = TraceRequest(
        arrival_s=float(row["arrival_s"]) if "arrival_s" in row else 0.0,
        prompt_tokens=int(row["prompt_tokens"]),
        decode_tokens=int(length),
        tenant=row.get("tenant") or "",
        group=row.get("group") or "",
    )
    if row.get("value"):
        request = replace(request, value=float(row["value"]))
    if row.get("ttft_bound_s"):
        request = replace(request, ttft_bound_s=float(row["ttft_bound_s"]))
    if row.get("decode_tokens_hint"):
        request = replace(request, decode_tokens_hint=int(row["decode_tokens_hint"]))
    return request


def _azure(row: Row) -> TraceRequest:
    moment = datetime.fromisoformat(_microseconds(row["TIMESTAMP"]))
    return TraceRequest(
        arrival_s=moment.replace(tzinfo=moment.tzinfo or UTC).timestamp(),
        prompt_tokens=int(row["ContextTokens"]),
        decode_tokens=int(row["GeneratedTokens"]),
    )


def _microseconds(stamp: str) -> str:
    """Cut the seventh digit (100 ns) that Azure writes and datetime does not take."""
    whole, dot, rest = stamp.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{whole}{dot}{digits[:6].ljust(6, '0')}{rest[len(digits) :]}" if dot else whole


def _burstgpt(row: Row) -> TraceRequest | None:
    """Read one BurstGPT row; one with no answer is a failed call and is passed over."""
    decode_tokens = int(row["Response tokens"])
    if decode_tokens == 0:
        return None
    return TraceRequest(
        arrival_s=float(row["Timestamp"]),
        prompt_tokens=max(1, int(row["Request tokens"])),
        decode_tokens=decode_tokens,
        group=row["Model"],
    )


CSV_FORMATS: dict[str, tuple[Callable[[Row], TraceRequest | None], tuple[str, ...]]] = {
    "csv": (_plain, PLAIN_COLUMNS),
    "azure": (_azure, AZURE_COLUMNS),
    "burstgpt": (_burstgpt, BURSTGPT_COLUMNS),
}
