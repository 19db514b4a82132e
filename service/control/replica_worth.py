"""3 controller, what one more worker would be worth: the price of all that it would bring.

Prices are the duals of the starts' linear program, so price x capacity is its derivative with
respect to one more worker of a kind. The optimum is concave in capacity: a whole worker adds at
most that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log10
from typing import Final

from service.control.events import WorkerState
from service.control.stats import WorkerStats

CLASSES_MAX: Final = 16
"""Kinds of workers told apart; those beyond are one, "other"."""
OTHER: Final = "other"
KV_DIGITS: Final = 2
"""Workers alike differ by a few blocks of KV memory, as their engines measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWorth:
    """What one more worker of a class would add.

    Attributes:
        worker_class: role, batch slots and KV tokens: "both-256-430000".
        per_iteration: at most so much reward per decode iteration.
        per_s: the same per second, at the pace of the worker that it is read from.
    """

    worker_class: str
    per_iteration: float
    per_s: float


def replica_worths(workers: Iterable[WorkerStats]) -> tuple[ReplicaWorth, ...]:
    """The worth of one more worker of each class that is up.

    Within a class the least value counts: any one worker's prices are feasible duals for the new
    one, and the least of their values is the tightest bound. Summed over the N buckets of q
    iterations, sum_b (p_batch B + p_kv M) is the reward over the look-ahead; here it is divided by
    its N q iterations, as prices are means over buckets for one iteration.

    Args:
        workers: as they stand now, prices in reward per unit and iteration. Where the KV capacity
            is unknown its price is 0, and only slots count.

    Source: [OLP] 3.2, the reduced dual.
    """
    least: dict[str, ReplicaWorth] = {}
    for worker in workers:
        if worker.state is not WorkerState.UP:
            continue
        name = worker_class(worker)
        if name not in least and len(least) >= CLASSES_MAX:
            name = OTHER
        value = worker.price_batch * worker.batch_limit
        value += worker.price_kv * (worker.kv_capacity_tokens or 0)
        known = least.get(name)
        if known is None or value < known.per_iteration:
            per_s = value / worker.iteration_s if worker.iteration_s > 0 else 0.0
            least[name] = ReplicaWorth(worker_class=name, per_iteration=value, per_s=per_s)
    return tuple(least.values())


def worker_class(worker: WorkerStats) -> str:
    """Name what makes workers alike: role, batch slots, and KV tokens to two digits."""
    kv_tokens = worker.kv_capacity_tokens
    kv = "unknown" if not kv_tokens else str(_rounded(kv_tokens))
    return f"{worker.role.value}-{worker.batch_limit}-{kv}"


def _rounded(tokens: int) -> int:
    unit: int = 10 ** max(0, floor(log10(tokens)) + 1 - KV_DIGITS)
    return round(tokens / unit) * unit
