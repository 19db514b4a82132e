"""5 fleet, what every source of workers is: a name, and snapshots of all the workers it knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeAlias

from service.worker_settings import WorkerEntry

Snapshot: TypeAlias = "tuple[WorkerEntry, ...]"
"""All workers of one source at one time."""


class SourceError(Exception):
    """A source cannot say who the workers are; the message is one line for the operator."""


class Source(Protocol):
    """Says who the workers are, and again whenever that changes.

    Attributes:
        label: its name in metrics and log lines; bounded by the settings.
        retry_max_s: longest pause before it is tried again after a failure.
        trouble: why it cannot hear of changes although it can say who the workers are; or "".
    """

    label: str
    retry_max_s: float
    trouble: str

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield all workers at each change; ends when it should be begun anew.

        Raises:
            SourceError: it cannot say; who follows it tries again after a pause.
        """


def authority(host: str, port: int) -> str:
    """host:port of a URL; IPv6 addresses get their brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
