"""What became of each request: one record a request, written as one line of outcomes.jsonl.

The live replay and the simulator write the same record, so that every report reads both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

OUTCOMES_FILE = "outcomes.jsonl"


class End(StrEnum):
    """The four ways in which a request that was sent can end."""

    COMPLETED = "completed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRecord:
    """One request, once it has ended.

    Attributes:
        policy: the policy that served it.
        index: its place in the workload, from 0.
        arrival_s: when it was due, seconds since the start of the run.
        sent_s: when it was sent, on the same clock.
        prompt_tokens: length of its prompt.
        decode_tokens: length of the answer asked for.
        decode_tokens_hint: the forecast sent with it, or None.
        outcome: how it ended.
        status: HTTP status, or None when none was received (or none exists: the simulator).
        ttft_s: seconds from sending to the first output token, or None.
        e2e_s: seconds from sending to the end.
        output_tokens: output tokens received.
        output_events: events they came in; fewer than tokens when the server merges some.
        worker: the worker that served it; "" if unknown.
        queue_s: time in the central queue as the router told it, or None.
        ttft_bound_s: the request's own bound on time to first token, or None.
        tenant: who pays.
        group: the request's group.
        detail: reason of a refusal or failure; "" else.
    """

    policy: str
    index: int
    arrival_s: float
    sent_s: float
    prompt_tokens: int
    decode_tokens: int
    outcome: End
    e2e_s: float
    decode_tokens_hint: int | None = None
    status: int | None = None
    ttft_s: float | None = None
    output_tokens: int = 0
    output_events: int = 0
    worker: str = ""
    queue_s: float | None = None
    ttft_bound_s: float | None = None
    tenant: str = ""
    group: str = ""
    detail: str = ""


FIELD_NAMES = frozenset(spec.name for spec in fields(OutcomeRecord))


def write_outcomes(records: Iterable[OutcomeRecord], path: Path) -> int:
    """Write records as JSON lines; returns how many."""
    written = 0
    with path.open("wb") as file:
        for record in records:
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
            written += 1
    return written


def read_outcomes(path: Path) -> Iterator[OutcomeRecord]:
    """Read records back; keys that this version does not know are passed over.

    Raises:
        ValueError: for a line that is no outcome record, naming file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = orjson.loads(line)
                known = {name: record[name] for name in FIELD_NAMES if name in record}
                yield OutcomeRecord(**(known | {"outcome": End(known["outcome"])}))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{number}: no outcome record: {error}") from error
