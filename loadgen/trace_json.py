"""Traces kept as JSON: Mooncake and vLLM timed_trace JSONL, and plain JSONL. gz is accepted.

Mooncake and timed_trace lines are {"timestamp", "input_length", "output_length", "hash_ids"}, the
timestamp in milliseconds. Plain lines carry the field names of TraceRequest.
"""

from __future__ import annotations

import codecs
from dataclasses import fields
from typing import TYPE_CHECKING

import orjson

from loadgen.trace_csv import open_bytes
from loadgen.trace_errors import TraceError
from loadgen.trace_record import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMESTAMP_UNIT_S = 1e-3
RECORD_FIELDS = frozenset(spec.name for spec in fields(TraceRequest))


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line number, object) for every line that is not blank.

    Raises:
        TraceError: for a line that is not one JSON object.
    """
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = orjson.loads(line.removeprefix(codecs.BOM_UTF8))
            except orjson.JSONDecodeError as error:
                raise TraceError.at(path, number, f"not JSON: {error}") from error
            if not isinstance(record, dict):
                raise TraceError.at(path, number, "expected one JSON object per line")
            yield number, record


def whole_number(record: dict[str, object], name: str) -> int:
    """Take an integer out of a JSON object, or say in one sentence why it is none."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return value


def number_of(record: dict[str, object], name: str) -> float:
    """Take a number out of a JSON object, or say in one sentence why it is none."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def read_timed_jsonl(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a Mooncake or vLLM timed_trace file, in file order."""
    for number, record in json_lines(path):
        try:
            yield TraceRequest(
                arrival_s=number_of(record, "timestamp") * TIMESTAMP_UNIT_S,
                prompt_tokens=whole_number(record, "input_length"),
                decode_tokens=max(1, whole_number(record, "output_length")),
                hash_ids=_hash_ids(record.get("hash_ids", [])),
            )
        except ValueError as error:
            raise TraceError.at(path, number, str(error)) from error


def read_plain_jsonl(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a JSONL file whose keys are TraceRequest's fields."""
    for number, record in json_lines(path):
        try:
            yield _plain(record)
        except (ValueError, TypeError) as error:
            raise TraceError.at(path, number, str(error)) from error


def _plain(record: dict[str, object]) -> TraceRequest:
    unknown = sorted(record.keys() - RECORD_FIELDS)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    numbers = {
        name: number_of(record, name)
        for name in ("arrival_s", "value", "ttft_bound_s")
        if record.get(name) is not None
    }
    hint = record.get("decode_tokens_hint")
    return TraceRequest(
        arrival_s=numbers.get("arrival_s", 0.0),
        prompt_tokens=whole_number(record, "prompt_tokens"),
        decode_tokens=whole_number(record, "decode_tokens"),
        decode_tokens_hint=None if hint is None else whole_number(record, "decode_tokens_hint"),
        tenant=str(record.get("tenant", "")),
        group=str(record.get("group", "")),
        value=numbers.get("value", 1.0),
        ttft_bound_s=numbers.get("ttft_bound_s"),
        hash_ids=_hash_ids(record.get("hash_ids", [])),
    )


def _hash_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError("hash_ids must be a list of whole numbers")
    return tuple(value)
