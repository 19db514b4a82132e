"""5 fleet: which part of a server's metrics page belongs to which of its data-parallel ranks.

Pure. vLLM labels every series of a rank with `engine`. One URL in front of all ranks, or in front
of one or some of them (external and hybrid load balancing): the header X-data-parallel-rank counts
the ranks of one URL from 0, the label counts those of the whole deployment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from service.engine_metrics import EnginePage

if TYPE_CHECKING:
    from service.worker_config import WorkerConfig

LABEL_CHARS_MAX: Final = 9
ADVICE_FEW: Final = (
    "set data_parallel_size to the server's --data-parallel-size, or, with "
    "--data-parallel-hybrid-lb, to its --data-parallel-size-local"
)
ADVICE_UNSEEN: Final = (
    "either the server has fewer ranks, or it runs several API servers: start it with "
    "--api-server-count 1, so that every rank is seen from the start"
)
ADVICE_MANY: Final = (
    "set data_parallel_size to the number of engines, so that each has its own ledger and prices"
)


def part_of(page: EnginePage, worker: WorkerConfig) -> EnginePage | None:
    """Return what a page says about one worker; None when it says nothing about its rank."""
    rank = worker.data_parallel_rank
    if rank is None:
        return page
    label = str(_first_label(page, worker.data_parallel_size) + rank)
    sample = page.engines.get(label)
    if sample is None:
        return None
    return EnginePage(
        total=sample,
        engines={label: sample},
        process_start_s=page.process_start_s,
        malformed_lines=page.malformed_lines,
    )


def discrepancy(page: EnginePage, size: int, *, complete: bool) -> str:
    """Say what is wrong when a page shows other engines than the configuration; "" if nothing is.

    Args:
        page: the scrape.
        size: ranks configured behind the URL.
        complete: whether every engine is on the page from the start, so that one that is absent
            does not exist.
    """
    shown = _labels(page)
    if len(shown) > size:
        return ADVICE_MANY
    if size > 1 and len(shown) < size:
        return ADVICE_FEW if complete else ADVICE_UNSEEN
    return ""


def _labels(page: EnginePage) -> list[int]:
    """The engines' numbers; a page without the label shows one engine, number 0."""
    return sorted(int(label) if _is_number(label) else 0 for label in page.engines)


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdigit() and len(label) <= LABEL_CHARS_MAX


def _first_label(page: EnginePage, size: int) -> int:
    """The label of the URL's rank 0: every URL of a hybrid deployment has as many ranks."""
    shown = _labels(page)
    return shown[0] // size * size if shown else 0
