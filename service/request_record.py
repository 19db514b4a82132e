"""1 edge: what is known about one proxied request, for its log line, its series and its spans."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from service.control.events import Outcome


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, for its log line and the histograms; times in seconds, None where not reached.

    Attributes:
        request_id: the x-request-id.
        path: the route.
        model: as asked for.
        status: HTTP status of the answer; 499 when nobody was left to read it.
        outcome: completed, failed, cancelled or refused.
        reason: error code of an answer that is ours, or "".
        worker: where it was started last.
        prefill_worker: which computed its prompt, where that is another one.
        starts: how often it was started.
        queued_s: wait in the central queue.
        ttft_s: from arrival to the first output token, of streams.
        e2e_s: from arrival to the end.
        overhead_s: from the whole body being here to the worker, less the wait in the queue.
        prompt_tokens: of all its prompts: estimated, or told by an answer that skipped the queue.
        decode_tokens: as counted.
        light: whether it skipped the queue.
        tenant: who pays, or "".
        upload_s: how long the body took to arrive; what follows begins then.
        price: what it cost where it was started last, in reward per decode iteration.
        price_batch: of it, the price of a batch slot there. price_kv: that of a KV token.
        trace_id: 32 hex digits of its trace, or "".
    """

    request_id: str
    path: str
    model: str = ""
    tenant: str = ""
    status: int = 499
    outcome: str = Outcome.CANCELLED
    reason: str = ""
    worker: str = ""
    prefill_worker: str = ""
    starts: int = 0
    queued_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float = 0.0
    overhead_s: float | None = None
    prompt_tokens: int | None = None
    decode_tokens: int | None = None
    light: bool = False
    upload_s: float | None = None
    price: float | None = None
    price_batch: float | None = None
    price_kv: float | None = None
    trace_id: str = ""


RECORD_FIELDS: Final = tuple(field.name for field in fields(RequestRecord))


def as_line(record: RequestRecord) -> dict[str, object]:
    """What is known about a request, for its log line."""
    known = ((name, getattr(record, name)) for name in RECORD_FIELDS)
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in known
        if value is not None and value is not False and value != ""
    }
