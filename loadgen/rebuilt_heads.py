"""Mooncake kept as CSV: ids of prompt blocks, rebuilt from how many of them had been seen before.

The columns are arrival_s, prompt_tokens, output_tokens, blocks512 and prefix_blocks_seen. Which
earlier prompt a prompt repeats is not in them. It is taken for the next turn of the latest one that
had exactly so many whole blocks and was not continued yet, else for another turn of the latest one
with more. The first block, a common system prompt, is the same in all. So how much could be found
is as recorded; where it could be found is a likely guess. Mooncake's own JSONL has the ids.
"""

from __future__ import annotations

import csv
from itertools import count
from typing import TYPE_CHECKING

from loadgen.trace_csv import open_text
from loadgen.trace_errors import TraceError
from loadgen.trace_record import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "blocks512", "prefix_blocks_seen")
BLOCK_TOKENS = 512
KEPT_MAX = 64
"""Latest prompts of one length that may still be continued."""


class Heads:
    """Gives every prompt its block ids, in the order of the trace."""

    def __init__(self) -> None:
        self._fresh = count()
        self._open: dict[int, list[tuple[int, ...]]] = {}
        self._first: tuple[int, ...] = ()

    def ids(self, prompt_tokens: int, blocks: int, seen: int) -> tuple[int, ...]:
        """Ids of a prompt's blocks, the first `seen` of which an earlier prompt has."""
        head = self._earlier(seen)[:seen]
        found = (*head, *(next(self._fresh) for _ in range(blocks - len(head))))
        self._first = self._first or found[:1]
        latest = self._open.setdefault(prompt_tokens // BLOCK_TOKENS, [])
        latest.append(found)
        del latest[:-KEPT_MAX]
        return found

    def _earlier(self, seen: int) -> tuple[int, ...]:
        if seen <= 1:
            return self._first
        if self._open.get(seen):
            return self._open[seen].pop()
        longer = [latest[-1] for whole, latest in self._open.items() if whole > seen and latest]
        return max(longer, key=lambda ids: ids[-1], default=self._first)


def read_mooncake_csv(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of such a file, in file order."""
    heads = Heads()
    with open_text(path) as lines:
        reader = csv.DictReader(lines, skipinitialspace=True)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise TraceError(f"{path}: no column {missing[0]!r} in the header")
        try:
            for row in reader:
                prompt, blocks = int(row["prompt_tokens"]), int(row["blocks512"])
                yield TraceRequest(
                    arrival_s=float(row["arrival_s"]),
                    prompt_tokens=prompt,
                    decode_tokens=max(1, int(row["output_tokens"])),
                    hash_ids=heads.ids(prompt, blocks, int(row["prefix_blocks_seen"])),
                )
        except (ValueError, TypeError, csv.Error) as error:
            raise TraceError.at(path, max(1, reader.line_num), str(error)) from error
