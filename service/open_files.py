"""Whether this process may open as many sockets as its settings let it need."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

BASE_FILES: Final = 64
"""Libraries, logs, the listener, the loop itself, scrapes of /metrics."""
WATCH_FILES: Final = 4
"""Connections that ask one worker for its health, metrics and models."""


def files_needed(*, queue_max: int, slots: int, workers: int) -> int:
    """Open files at the busiest: a client each for those who wait, two sockets for those who run.

    Args:
        queue_max: requests that may wait.
        slots: requests that may run, over all workers.
        workers: how many there are.
    """
    return BASE_FILES + queue_max + 2 * slots + WATCH_FILES * workers


def allow_open_files(needed: int, log: FilteringBoundLogger) -> None:
    """Raise the soft limit as far as the system lets us, and say so when that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError, OverflowError):
        allowed = soft
    if allowed < needed:
        log.warning("open_files_limit_too_low", limit=allowed, needed=needed, fix="ulimit -n")
