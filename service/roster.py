"""5 fleet, the roster: makes the workers that there are those that there should be.

A worker that should go takes no new request and leaves when its last one has ended, or after a
limit. One that should come back meanwhile stays. The operator's drain keeps a worker in the
fleet without new requests until it is resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import structlog

from service.worker_config import WorkerConfig

LOOK_S: Final = 0.25
"""How often a leaving worker's requests are counted."""

Running: TypeAlias = Callable[[], Mapping[str, int]]


class Hands(Protocol):
    """What the roster does with workers."""

    def add(self, worker: WorkerConfig) -> None:
        """Let a worker in."""

    def replace(self, worker: WorkerConfig) -> None:
        """Take a worker's new configuration; its requests go on."""

    def drain(self, worker_id: str, *, on: bool) -> None:
        """Start nothing on a worker, or start again."""

    async def remove(self, worker_id: str) -> None:
        """Let a worker go; what still runs there is cut."""


@dataclass(slots=True)
class _Member:
    """One worker of the fleet.

    Attributes:
        worker: as it was let in. leaving_since_s: when it was told to go, or None.
        drained: at the operator's word.
    """

    worker: WorkerConfig
    leaving_since_s: float | None = None
    drained: bool = False


class Roster:
    """Reconciles the fleet with the wanted set.

    Args:
        crew: does what is decided.
        running: sequences of our own requests on each worker now.
        remove_s: longest that a worker's requests may hold up its leaving.
    """

    def __init__(self, crew: Hands, running: Running, remove_s: float) -> None:
        self.remove_s = remove_s
        self._crew = crew
        self._running = running
        self._wanted: Mapping[str, WorkerConfig] = {}
        self._members: dict[str, _Member] = {}
        self._news = asyncio.Event()
        self._log = structlog.get_logger("bidgate.fleet")

    def want(self, workers: Mapping[str, WorkerConfig]) -> None:
        """Take the workers that there should be; called from the loop or before it runs."""
        self._wanted = dict(workers)
        for worker_id, member in self._members.items():
            wanted = self._wanted.get(worker_id)
            if wanted is None or _is_another(wanted, member.worker):
                self._leave(worker_id, member)
            else:
                self._stay(worker_id, member, wanted)
        for worker_id, worker in self._wanted.items():
            if worker_id not in self._members:
                self._join(worker)
        self._news.set()

    def drain(self, worker_id: str, *, on: bool) -> None:
        """Start nothing more on a worker, or start again.

        Raises:
            KeyError: it is not in the fleet.
        """
        member = self._members[worker_id]
        member.drained = on
        self._crew.drain(worker_id, on=self._is_closed(member))
        self._log.info("worker_drained" if on else "worker_resumed", worker=worker_id)

    def members(self) -> dict[str, tuple[WorkerConfig, str]]:
        """Every worker, and whether it serves, is drained by the operator, or leaves."""
        return {
            worker_id: (member.worker, _standing(member))
            for worker_id, member in self._members.items()
        }

    async def run(self) -> None:
        """Let leaving workers go as they become idle, until cancelled."""
        while True:
            if any(member.leaving_since_s is not None for member in self._members.values()):
                await self._part()
                await asyncio.sleep(LOOK_S)
            else:
                await self._news.wait()
                self._news.clear()

    def _join(self, worker: WorkerConfig) -> None:
        try:
            self._crew.add(worker)
        except ValueError as error:
            self._log.error("worker_not_added", worker=worker.worker_id, reason=str(error))
        else:
            self._members[worker.worker_id] = _Member(worker)

    def _leave(self, worker_id: str, member: _Member) -> None:
        if member.leaving_since_s is None:
            member.leaving_since_s = asyncio.get_running_loop().time()
            self._crew.drain(worker_id, on=True)
            self._log.info("worker_leaves", worker=worker_id)

    def _stay(self, worker_id: str, member: _Member, wanted: WorkerConfig) -> None:
        if member.leaving_since_s is not None:
            member.leaving_since_s = None
            self._crew.drain(worker_id, on=self._is_closed(member))
            self._log.info("worker_stays", worker=worker_id)
        if wanted != member.worker:
            member.worker = wanted
            self._crew.replace(wanted)
            self._log.info("worker_changed", worker=worker_id)

    async def _part(self) -> None:
        now_s = asyncio.get_running_loop().time()
        running = self._running()
        for worker_id, member in list(self._members.items()):
            since_s = member.leaving_since_s
            if since_s is None:
                continue
            held, late = running.get(worker_id, 0), now_s - since_s >= self.remove_s
            if held and not late:
                continue
            del self._members[worker_id]
            if held:
                self._log.warning("worker_removed_while_busy", worker=worker_id, sequences=held)
            else:
                self._log.info("worker_removed", worker=worker_id)
            await self._let_go(worker_id)

    async def _let_go(self, worker_id: str) -> None:
        try:
            await self._crew.remove(worker_id)
        finally:
            back = self._wanted.get(worker_id)
            if back is not None and worker_id not in self._members:
                self._join(back)

    @staticmethod
    def _is_closed(member: _Member) -> bool:
        return member.drained or member.leaving_since_s is not None


def _is_another(wanted: WorkerConfig, worker: WorkerConfig) -> bool:
    """Whether the same id means another engine, not other limits."""
    return (wanted.url, wanted.role) != (worker.url, worker.role)


def _standing(member: _Member) -> str:
    if member.leaving_since_s is not None:
        return "leaving"
    return "drained" if member.drained else "serving"
