"""Conversation data sets as lengths: LMSYS-Chat-1M (parquet, JSONL) and ShareGPT (JSON array).

One request is the first exchange of a conversation: the first user message is the prompt, the
answer after it the decode length. Text becomes tokens by a rule, not a tokenizer: 1.36 tokens per
whitespace word of a prompt and 1.5 per word of an answer, rounded up, at least 1; the typical
English row of LMSYS-Chat-1M. Rows without such an exchange are passed over. No row has a time of
arrival.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from loadgen.trace_csv import open_bytes
from loadgen.trace_errors import TraceError
from loadgen.trace_json import json_lines
from loadgen.trace_record import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyarrow.parquet import ParquetFile

PROMPT_TOKENS_PER_WORD = 1.36
ANSWER_TOKENS_PER_WORD = 1.5
PARQUET_COLUMNS = ("model", "conversation")
PARQUET_BATCH_ROWS = 2048

USER_ROLES = frozenset({"user", "human"})
ANSWER_ROLES = frozenset({"assistant", "gpt"})


def read_lmsys_parquet(path: Path) -> Iterator[TraceRequest]:
    """Yield first exchanges of LMSYS-Chat-1M from one parquet file or a directory of shards.

    Only the columns model and conversation are read, a bounded batch of rows at a time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    shards = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not shards:
        raise TraceError(f"{path}: the directory holds no .parquet file")
    for shard in shards:
        try:
            with pq.ParquetFile(shard) as file:
                yield from _exchanges(file, shard)
        except pa.ArrowException as error:
            detail = str(error).splitlines()[0]
            raise TraceError(f"{shard}: cannot be read as parquet: {detail}") from error


def _exchanges(file: ParquetFile, shard: Path) -> Iterator[TraceRequest]:
    if "conversation" not in file.schema_arrow.names:
        raise TraceError(f"{shard}: no column 'conversation'")
    columns = [name for name in PARQUET_COLUMNS if name in file.schema_arrow.names]
    row = 0
    for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns):
        for record in batch.to_pylist():
            row += 1
            yield from _located(record, shard, row, unit="row")


def read_lmsys_jsonl(path: Path) -> Iterator[TraceRequest]:
    """Yield first exchanges of LMSYS-Chat-1M kept as one JSON object per line."""
    for number, record in json_lines(path):
        yield from _located(record, path, number, unit="")


def read_sharegpt(path: Path) -> Iterator[TraceRequest]:
    """Yield first exchanges of a ShareGPT file, a JSON array, without holding the array."""
    import ijson

    item = 0
    with open_bytes(path) as file:
        try:
            for record in ijson.items(file, "item", use_float=True):
                item += 1
                if not isinstance(record, dict):
                    raise TraceError.at(path, item, "expected a JSON object", unit="item")
                yield from _located(record, path, item, unit="item")
        except ijson.JSONError as error:
            detail = str(error).splitlines()[0]
            raise TraceError.at(path, item + 1, f"not JSON: {detail}", unit="item") from error


def _located(
    record: dict[str, object], path: Path, number: int, unit: str
) -> Iterator[TraceRequest]:
    try:
        exchange = first_exchange(record)
    except ValueError as error:
        raise TraceError.at(path, number, str(error), unit=unit) from error
    if exchange is not None:
        yield exchange


def first_exchange(record: dict[str, object]) -> TraceRequest | None:
    """Turn a conversation into one request, or None when no user message is answered.

    Raises:
        ValueError: when the record is no conversation.
    """
    messages = record.get("conversation", record.get("conversations"))
    if not isinstance(messages, list):
        raise ValueError("no list 'conversation' or 'conversations'")
    prompt: str | None = None
    for message in messages:
        role, text = _message(message)
        if role in USER_ROLES and prompt is None:
            prompt = text
        elif role in ANSWER_ROLES and prompt is not None:
            return TraceRequest(
                arrival_s=0.0,
                prompt_tokens=tokens_of(prompt, PROMPT_TOKENS_PER_WORD),
                decode_tokens=tokens_of(text, ANSWER_TOKENS_PER_WORD),
                group=str(record.get("model") or ""),
            )
    return None


def _message(message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    role = message.get("role", message.get("from"))
    text = message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise ValueError("a message has no role and text")
    return role, text


def tokens_of(text: str, tokens_per_word: float) -> int:
    """Estimate tokens from whitespace words; at least 1."""
    return max(1, math.ceil(len(text.split()) * tokens_per_word))
