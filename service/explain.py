"""`bidgate explain`: a running bidgate's queue and prices in words."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from pydantic import TypeAdapter, ValidationError

from service.control.events import WorkerState
from service.control.stats import PrefillStats, WorkerStats

TIMEOUT_S: Final = 5.0
WHAT_OF: Final = (
    "Prices are of the arrivals expected next, at the rate and mix of late, not of who is here now:"
    " they outlast a burst, and may stand where slots are free and nobody waits."
)


class ExplainError(Exception):
    """Nothing can be said; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scarcity:
    """What GET /scarcity answers: the queue now, and every worker as the controller sees it."""

    waiting: int
    running: int
    oldest_wait_s: float
    arrivals_per_s: float
    price_age_s: float | None
    workers: tuple[WorkerStats, ...]
    prefillers: tuple[PrefillStats, ...] = ()


def explain_service(
    address: str, *, api_key: str | None = None, ca_file: Path | None = None
) -> str:
    """Ask the service at an address (http://host:port) and put its answer into words.

    Args:
        address: where it listens.
        api_key: a client's key, where it wants one.
        ca_file: PEM of who signed its certificate; None for those that the system trusts.

    Raises:
        ExplainError: it does not answer, or something else does.
    """
    address = address if "://" in address else f"http://{address}"
    try:
        response = httpx.get(
            f"{address.rstrip('/')}/scarcity",
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            verify=True if ca_file is None else ssl.create_default_context(cafile=str(ca_file)),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        if response.is_error:
            raise ExplainError(f"{address} {_refusal(response)}")
        return explain(TypeAdapter(Scarcity).validate_json(response.content))
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ExplainError(f"{address} does not answer: {error}") from error
    except ValidationError as error:
        raise ExplainError(f"{address} is no bidgate") from error


def _refusal(response: httpx.Response) -> str:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return "wants a key: give one of its clients' with --api-key"
    return f"answers {response.status_code} {response.reason_phrase}; is that bidgate?"


def explain(state: Scarcity) -> str:
    """Put queue and prices into words."""
    lines = [_queue_line(state)]
    if not state.workers:
        return "\n".join([*lines, "No worker is known yet."])
    lines += _scarcest(state.workers)
    width = max(len(worker.worker_id) for worker in state.workers)
    ranked = sorted(state.workers, key=lambda worker: (-_price(worker), worker.worker_id))
    lines += [_worker_line(worker, width) for worker in ranked]
    return "\n".join(lines + [_prefill_line(worker) for worker in state.prefillers])


def _queue_line(state: Scarcity) -> str:
    line = f"{state.running} requests run, {state.waiting} wait"
    if state.waiting:
        line += f", the oldest for {state.oldest_wait_s:.2f} s"
    return f"{line}; {state.arrivals_per_s:.1f} arrive per second."


def _scarcest(workers: tuple[WorkerStats, ...]) -> list[str]:
    up = [worker for worker in workers if worker.state is WorkerState.UP]
    if not up:
        return ["No worker is up, so nothing can start."]
    top = max(up, key=_price)
    if _price(top) <= 0:
        return [
            "Nothing is scarce for the arrivals expected next: every price is zero, so a request"
            " that fits starts at once."
        ]
    what, one, price, more = "KV memory", "token of it", top.price_kv, "more GPU memory for KV"
    if top.price_batch >= _kv_price(top):
        what, one, price, more = "batch slots", "slot", top.price_batch, "a larger --max-num-seqs"
    return [
        f"Scarcest for the arrivals expected next: {what} on {top.worker_id}. One more {one} there"
        f" would earn {price:.3g} reward per iteration ({more}, or a worker).",
        WHAT_OF,
    ]


def _worker_line(worker: WorkerStats, width: int) -> str:
    used = worker.active + worker.foreign
    kv = "KV unknown"
    if worker.kv_capacity_tokens:
        kv = f"KV {worker.kv_tokens / worker.kv_capacity_tokens:.0%} ours"
    return (
        f"  {worker.worker_id:<{width}}  {worker.state:<8} slots {used}/{worker.batch_limit},"
        f" {kv}, {worker.iteration_s * 1e3:.1f} ms an iteration,"
        f" price {worker.price_batch:.3g} a slot, {worker.price_kv:.3g} a KV token"
        f"{'' if worker.startable else ', takes nothing now'}"
    )


def _prefill_line(worker: PrefillStats) -> str:
    line = (
        f"  {worker.worker_id}  {worker.state:<8} prefill: {worker.legs} prompts,"
        f" {worker.leg_tokens} tokens not computed yet, {worker.kv_tokens} KV tokens held"
    )
    if worker.orphaned_kv_tokens:
        line += f", {worker.orphaned_kv_tokens} of them until their lease ends"
    return line


def _price(worker: WorkerStats) -> float:
    return max(worker.price_batch, _kv_price(worker))


def _kv_price(worker: WorkerStats) -> float:
    """Price of the KV memory that is one slot's even share, to compare with a slot's."""
    return worker.price_kv * (worker.kv_capacity_tokens or 0) / worker.batch_limit
