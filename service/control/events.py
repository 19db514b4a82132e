"""3 controller, vocabulary: what the router is told (events) and what it answers (commands).

Frozen values, checked when built. Times are seconds of the caller's clock, lengths are tokens.
Read router.py next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

MODELS_SHOWN_MAX: Final = 5


class Outcome(StrEnum):
    """How a request that was not refused ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Refusal(StrEnum):
    """Why a request was turned away; doubles as a metric label."""

    QUEUE_FULL = "queue_full"
    DISPLACED = "displaced"
    WAITED_TOO_LONG = "waited_too_long"
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    WOULD_WAIT = "would_wait"
    NO_WORKER = "no_worker"
    DRAINING = "draining"


def unserved(model: str, served: Iterable[str]) -> str:
    """Say that nobody serves a model, and what is served: the first few names."""
    names = sorted(served)
    words = f"no worker serves the model {model!r}"
    if not names:
        return words
    more = len(names) - MODELS_SHOWN_MAX
    tail = f" and {more} more" if more > 0 else ""
    return f"{words}; served: {', '.join(names[:MODELS_SHOWN_MAX])}{tail}"


def nobody_up(hold_s: float) -> str:
    """Say that no worker came up while a request waited for one."""
    return (
        f"no worker that serves the request was up within {hold_s:g} s: check the workers' URLs,"
        " and that one answers /health"
    )


class Role(StrEnum):
    """What a worker does for a request: all of it, its prompt alone, or all but its prompt."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """Whether new requests may be started on a worker."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Prefix:
    """By what a prompt's beginning is known again, on any worker.

    Attributes:
        hashes: of its chunks from the head on, each including all before it and whatever else
            decides about sharing (model, adapter, cache salt).
        ends: prompt tokens up to the end of each chunk, increasing.
        session: hash of the client's name for the conversation; 0 for none.
    """

    hashes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    session: int = 0

    def __post_init__(self) -> None:
        """Refuse chunks without an end."""
        if len(self.hashes) != len(self.ends):
            raise ValueError("a prefix needs as many ends as hashes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request for decoding, as the controller sees it.

    Attributes:
        request_id: unique among the requests the router holds.
        arrival_s: when it reached bidgate, on the caller's clock.
        prompt_tokens: s_j, exact or estimated; > 0 after rounding up.
        decode_tokens_hint: a forecast that came with the request (client header, trace), or None.
        decode_tokens_limit: hard bound on the decode length (max_tokens), or None.
        decode_tokens_floor: the engine stops no earlier (min_tokens), or None.
        model: the model asked for; "" means whatever the worker serves.
        tenant: who pays; "" for the anonymous tenant.
        group: bounded label under which the length predictor pools requests.
        fingerprint: hash of the system prompt, under which lengths are pooled too; "" for none.
        sequences: parallel sequences (n x prompts); each takes a batch slot and its own KV.
        value: multiplies the request's reward; > 0; 1 is ordinary traffic.
        ttft_bound_s: the request's own bound on time to first token, or None for the fleet's.
        e2e_bound_s: the request's own bound on end-to-end time, or None for the fleet's.
        max_wait_s: longest time in the central queue, or None for the fleet's; 0 starts at the
            first decision or not at all.
        streams: whether tokens are seen one by one (else progress is extrapolated).
        pinned_worker: the only worker that can serve it (it holds the state), or "".
        whole: one worker must do all of it; else a prefill worker may compute the prompt.
        prefix: by what its prompt's beginning is known again; None where it is too short for that.
        body_bytes: what it holds in memory while it waits.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    decode_tokens_hint: int | None = None
    decode_tokens_limit: int | None = None
    decode_tokens_floor: int | None = None
    model: str = ""
    tenant: str = ""
    group: str = ""
    fingerprint: str = ""
    sequences: int = 1
    value: float = 1.0
    ttft_bound_s: float | None = None
    e2e_bound_s: float | None = None
    max_wait_s: float | None = None
    streams: bool = True
    pinned_worker: str = ""
    whole: bool = False
    prefix: Prefix | None = None
    body_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse values no request can have."""
        if self.prompt_tokens < 0 or self.sequences < 1:
            raise ValueError("prompt_tokens must be >= 0 and sequences >= 1")
        for name in ("decode_tokens_hint", "decode_tokens_limit", "decode_tokens_floor"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name} must be at least 1, got {tokens}")
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"value must be positive and finite, got {self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker as configured or discovered.

    Attributes:
        worker_id: unique name; bounded set, used as a metric label.
        batch_limit: B_g, the engine's --max-num-seqs; >= 1.
        kv_capacity_tokens: M_g; None until the engine has told it (then KV does not constrain).
        block_tokens: KV block size; the ledger rounds each request up by this.
        iteration_s: first guess of one decode iteration, replaced by measurement.
        models: names served; None when not yet known (then any model is tried).
        role: prefill workers are given prompts only, decode workers what was prefilled elsewhere.
    """

    worker_id: str
    batch_limit: int
    kv_capacity_tokens: int | None = None
    block_tokens: int = 16
    iteration_s: float = 0.02
    models: frozenset[str] | None = None
    role: Role = Role.BOTH

    def __post_init__(self) -> None:
        """Refuse limits no worker can have."""
        if self.batch_limit < 1 or self.block_tokens < 1:
            raise ValueError("batch_limit and block_tokens must be at least 1")
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < 1:
            raise ValueError("kv_capacity_tokens must be positive or None")
        if not (math.isfinite(self.iteration_s) and self.iteration_s > 0):
            raise ValueError("iteration_s must be positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a scrape of a worker said; None means unknown, which is not zero.

    Attributes:
        running: requests in the engine's batch.
        waiting: requests in the engine's own queue.
        kv_tokens_used: tokens in allocated KV blocks.
        kv_capacity_tokens: M_g as the engine reports it.
        block_tokens: KV block size.
        batch_limit: B_g when the engine tells it.
        iteration_s: measured mean time of one decode iteration since the last report.
        generated_tokens: output tokens made since the last report; None when that is not known.
        preemptions_total: engine counter; falls when the engine restarted.
        models: names served now.
        restarted: counters went down since the last report.
        prefix_queries: prompt tokens looked up in the prefix cache since the last report.
        prefix_hits: of these, found there.
    """

    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None
    batch_limit: int | None = None
    iteration_s: float | None = None
    generated_tokens: int | None = None
    preemptions_total: int | None = None
    models: frozenset[str] | None = None
    restarted: bool = False
    prefix_queries: int | None = None
    prefix_hits: int | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request entered bidgate."""

    request: Request


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The worker produced the first output token of a started request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """Output tokens seen so far for started requests (totals, not increments)."""

    decode_tokens: dict[str, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill worker has computed a request's prompt and tells how to fetch it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """A prefill came to nothing; `kept` says that the worker may hold its KV memory all the same.

    What becomes of the request is said by another event: Returned, Left, or FirstToken when the
    decode worker computes the prompt.
    """

    request_id: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """A started request was not taken; it waits again and avoids the worker that did not.

    That is `worker_id`, or where it was started when that is empty.
    """

    request_id: str
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A request ended, waiting or started; decode_tokens is what the engine counted, if known."""

    request_id: str
    outcome: Outcome
    decode_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker entered the fleet (state UP), or its specification changed."""

    spec: WorkerSpec
    state: WorkerState = WorkerState.UP


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker went up, went down or drains."""

    worker_id: str
    state: WorkerState


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A scrape of a worker came back; reported_at_s is when it was sent."""

    worker_id: str
    report: WorkerReport
    reported_at_s: float


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker was removed from the fleet; its requests end through their own connections."""

    worker_id: str


Event: TypeAlias = (
    Arrived
    | FirstToken
    | Progressed
    | Prefilled
    | PrefillFailed
    | Returned
    | Left
    | WorkerJoined
    | WorkerChanged
    | WorkerReported
    | WorkerGone
)


@dataclass(frozen=True, slots=True)
class Start:
    """Send this request to this worker now.

    Attributes:
        prefill_id: the prefill worker that must compute its prompt first; "" for none.
        handed: it was prefilled and held: the worker fetches what came of that.
        decode_tokens: of its column, over all sequences: what was set aside for it.
    """

    request_id: str
    worker_id: str
    prefill_id: str = ""
    handed: bool = False
    decode_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Send this request's prompt to this prefill worker now; a Start or a Refuse follows."""

    request_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Turn this request away; detail is one sentence for the client."""

    request_id: str
    reason: Refusal
    detail: str


Command: TypeAlias = Start | Prefill | Refuse
