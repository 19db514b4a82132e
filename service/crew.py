"""5 fleet, the crew: a worker's configuration, connections and watch, let in and out together."""

from __future__ import annotations

from collections.abc import Callable

from service.fleet import Fleet
from service.worker_config import WorkerConfig
from service.worker_link import WorkerTransport


class Crew:
    """Every worker of the fleet and its connections.

    Args:
        fleet: watches them.
        open_transport: makes a worker's own pool of connections.

    Attributes:
        workers: by id. transports: by id.
        on_leave: called with each worker that left.
    """

    def __init__(self, fleet: Fleet, open_transport: Callable[[], WorkerTransport]) -> None:
        self.workers: dict[str, WorkerConfig] = {}
        self.transports: dict[str, WorkerTransport] = {}
        self.on_leave: Callable[[WorkerConfig], None] = lambda _: None
        self._fleet = fleet
        self._open_transport = open_transport

    def add(self, worker: WorkerConfig) -> None:
        """Let a worker in.

        Raises:
            ValueError: the fleet is full.
        """
        self._fleet.add(worker)
        self.workers[worker.worker_id] = worker
        self.transports[worker.worker_id] = self._open_transport()

    def replace(self, worker: WorkerConfig) -> None:
        """Take a worker's new configuration, at the same URL; its requests go on."""
        self.workers[worker.worker_id] = worker
        self._fleet.replace(worker)

    def drain(self, worker_id: str, *, on: bool) -> None:
        """Start nothing on a worker, or start again."""
        self._fleet.drain(worker_id, on=on)

    async def remove(self, worker_id: str) -> None:
        """Let a worker go; what still runs there is cut."""
        self._fleet.remove(worker_id)
        worker = self.workers.pop(worker_id)
        transport = self.transports.pop(worker_id)
        self.on_leave(worker)
        await transport.aclose()

    async def aclose(self) -> None:
        """Close all connections; for the end of the service."""
        for transport in self.transports.values():
            await transport.aclose()
