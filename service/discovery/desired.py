"""5 fleet, the workers that there should be: what every source says, merged into one set.

Sources have an order; the first one that names an id or a URL has it. The operator's word over
the admin API comes before all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from service.worker_config import WorkerConfig

WORKERS_MAX: Final = 4096
ADMIN: Final = "admin"
STATIC: Final = "static"
MOCK: Final = "mock"


@dataclass(slots=True)
class Known:
    """One source's last word.

    Attributes:
        workers: as it named them. said_at_s: when, on the loop's clock; None before the first word.
        failing: why it cannot say more, or "". failures: how often that was so.
    """

    workers: tuple[WorkerConfig, ...] = ()
    said_at_s: float | None = None
    failing: str = ""
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The merged set.

    Attributes:
        workers: by id. sources: which source has which worker.
        left_out: ids of workers that another source has already, or that are too many.
    """

    workers: Mapping[str, WorkerConfig] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def merge(known: Mapping[str, Known], removed: Iterable[str] = ()) -> Wanted:
    """Merge what sources say, in their order.

    Args:
        known: by source, the first one first.
        removed: ids that the operator took out.
    """
    workers: dict[str, WorkerConfig] = {}
    sources: dict[str, str] = {}
    # Ranks of one server share its URL; two sources must not.
    urls: dict[str, str] = {}
    out = frozenset(removed)
    left_out: list[str] = []
    for source, said in known.items():
        for worker in said.workers:
            if worker.worker_id in out:
                continue
            taken = worker.worker_id in workers or urls.get(worker.url, source) != source
            if taken or len(workers) >= WORKERS_MAX:
                left_out.append(worker.worker_id)
                continue
            workers[worker.worker_id] = worker
            sources[worker.worker_id] = source
            urls[worker.url] = source
    return Wanted(workers=workers, sources=sources, left_out=tuple(left_out))
