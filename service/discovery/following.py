"""5 fleet, discovery: follows every source and tells the roster which workers there should be.

A source that fails is tried again after a pause; until it speaks again its last word stands, for
keep_s in full and then for those of its workers that are up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import structlog

from service.discovery.config import DiscoveryConfig
from service.discovery.desired import (
    ADMIN,
    MOCK,
    STATIC,
    WORKERS_MAX,
    Known,
    Wanted,
    merge,
)
from service.discovery.dns_names import DnsSource
from service.discovery.kubernetes_slices import KubernetesSource
from service.discovery.source import Snapshot, Source, SourceError
from service.discovery.worker_file import FileSource
from service.worker_config import WorkerConfig
from service.worker_settings import FleetConfig, WorkerEntry, worker_config

RETRY_MIN_S: Final = 0.1
JITTER: Final = 0.2
REMOVED_MAX: Final = 4096
"""Workers taken out by the operator that are remembered; the oldest are forgotten first."""
LEFT_OUT_SHOWN: Final = 8
"""Workers left out that a log line names."""

Want: TypeAlias = Callable[[Mapping[str, WorkerConfig]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """One source for metrics.

    Attributes:
        label: which. workers: in its last word.
        age_s: seconds since that; None before the first.
        failing: whether it cannot say more. failures: how often that was so.
    """

    label: str
    workers: int
    age_s: float | None
    failing: bool
    failures: int


class Discovery:
    """Merges the sources' words, those of the settings and of the operator among them.

    Args:
        want: takes the wanted set whenever it may have changed; must not raise or wait.
        is_up: whether a worker answers.
        seed: of the jitter.

    Attributes:
        wanted: the merged set. fleet: what workers have in common.
        is_up: whether a worker answers.
    """

    def __init__(self, want: Want, is_up: Callable[[str], bool], seed: int = 0) -> None:
        self.wanted = Wanted()
        self.fleet = FleetConfig()
        self._want = want
        self.is_up = is_up
        self._rng = random.Random(seed)
        self._config = DiscoveryConfig()
        self._known: dict[str, Known] = {label: Known() for label in (ADMIN, STATIC, MOCK)}
        self._removed: dict[str, None] = {}
        self._sources: dict[str, tuple[object, Source]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._log = structlog.get_logger("bidgate.discovery")

    def configure(
        self, static: Iterable[WorkerConfig], fleet: FleetConfig, config: DiscoveryConfig
    ) -> None:
        """Take settings: the static list, the fleet's defaults, and the sources.

        Sources whose settings stay are not disturbed, unless the fleet's defaults changed.
        """
        built = _sources(config)
        afresh = fleet != self.fleet
        self.fleet, self._config = fleet, config
        for label in list(self._sources):
            if label not in built or afresh or built[label][0] != self._sources[label][0]:
                self._stop(label, forget=label not in built)
        for label, source in built.items():
            if label not in self._sources:
                self._sources[label] = source
                self._start(label)
        self._known[STATIC].workers = tuple(static)
        order = [ADMIN, STATIC, MOCK, *built]
        self._known = {label: self._known.get(label, Known()) for label in order}
        self._publish()

    async def run(self) -> None:
        """Follow the sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for label in self._sources:
                    self._start(label)
                await asyncio.Event().wait()
            finally:
                self._group = None
                self._tasks.clear()

    def embed(self, mocks: Iterable[WorkerConfig]) -> None:
        """Take the mock workers inside this process."""
        self._known[MOCK].workers = tuple(mocks)
        self._publish()

    def add(self, worker: WorkerConfig) -> bool:
        """Add a worker at the operator's word; whether anything changed.

        Raises:
            ValueError: its id or its URL is another worker's.
        """
        for other in self.wanted.workers.values():
            same_place = _place(other) == _place(worker)
            if (other.worker_id == worker.worker_id) != same_place:
                raise ValueError(
                    f"worker {other.worker_id} at {other.url} has that id or that URL already"
                )
        before = self.wanted.workers.get(worker.worker_id)
        self._removed.pop(worker.worker_id, None)
        kept = [one for one in self._known[ADMIN].workers if one.worker_id != worker.worker_id]
        self._known[ADMIN].workers = (*kept, worker)
        self._publish()
        return before != worker

    def remove(self, worker_id: str) -> bool:
        """Take a worker out at the operator's word, whoever named it; whether it is known."""
        if worker_id in self._removed:
            return True
        if worker_id not in self.wanted.workers:
            return False
        said = self._known[ADMIN].workers
        self._known[ADMIN].workers = tuple(one for one in said if one.worker_id != worker_id)
        self._removed[worker_id] = None
        while len(self._removed) > REMOVED_MAX:
            self._removed.pop(next(iter(self._removed)))
        self._publish()
        return True

    def stats(self) -> tuple[SourceStats, ...]:
        """Every source with a life of its own; call it from the event loop."""
        now_s = asyncio.get_running_loop().time()
        return tuple(
            SourceStats(
                label=label,
                workers=len(said.workers),
                age_s=None if said.said_at_s is None else now_s - said.said_at_s,
                failing=bool(said.failing),
                failures=said.failures,
            )
            for label, said in self._known.items()
            if label in self._sources
        )

    def _start(self, label: str) -> None:
        if self._group is not None:
            _, source = self._sources[label]
            self._tasks[label] = self._group.create_task(self._follow(source), name=label)

    def _stop(self, label: str, *, forget: bool) -> None:
        del self._sources[label]
        task = self._tasks.pop(label, None)
        if task is not None:
            task.cancel()
        if forget:
            self._known.pop(label, None)

    async def _follow(self, source: Source) -> None:
        """Listen to a source for ever; one that fails must not disturb the others."""
        loop = asyncio.get_running_loop()
        pause_s = RETRY_MIN_S
        while True:
            began_s = loop.time()
            try:
                async for entries in source.snapshots():
                    self._take(source, entries)
            except SourceError as error:
                self._fail(source.label, str(error))
            except Exception as error:
                self._log.exception("discovery_broke", source=source.label)
                self._fail(source.label, repr(error))
            if loop.time() - began_s >= source.retry_max_s:
                pause_s = RETRY_MIN_S
            await asyncio.sleep(pause_s * self._rng.uniform(1 - JITTER, 1 + JITTER))
            pause_s = min(2 * pause_s, source.retry_max_s)

    def _take(self, source: Source, entries: Snapshot) -> None:
        """Book a source's word; one that hears of no changes goes on failing.

        Raises:
            SourceError: an entry cannot be a worker; the whole word is dropped.
        """
        label = source.label
        workers = tuple(rank for one in entries for rank in self._worker(label, one).ranks())
        said = self._known[label]
        if said.failing and not source.trouble:
            self._log.info("discovery_works_again", source=label)
        if said.workers != workers or said.said_at_s is None:
            self._log.info("discovered", source=label, workers=len(workers))
        said.workers, said.failing = workers, source.trouble
        said.said_at_s = asyncio.get_running_loop().time()
        self._publish()

    def _worker(self, label: str, entry: WorkerEntry) -> WorkerConfig:
        try:
            return worker_config(entry, self.fleet)
        except ValueError as error:
            raise SourceError(f"{label}: {error}") from error

    def _fail(self, label: str, reason: str) -> None:
        said = self._known[label]
        said.failures += 1
        if said.failing != reason:
            self._log.warning(
                "discovery_failed", source=label, reason=reason, kept_workers=len(said.workers)
            )
        said.failing = reason
        now_s = asyncio.get_running_loop().time()
        if said.said_at_s is not None and now_s - said.said_at_s > self._config.keep_s:
            up = tuple(worker for worker in said.workers if self.is_up(worker.worker_id))
            if up != said.workers:
                self._log.warning("discovery_kept_too_long", source=label, kept_workers=len(up))
                said.workers = up
                self._publish()

    def _publish(self) -> None:
        wanted = merge(self._known, self._removed)
        new = [one for one in wanted.left_out if one not in self.wanted.left_out]
        if new:
            why = f"named already, or more than {WORKERS_MAX}"
            self._log.warning(
                "workers_left_out", workers=new[:LEFT_OUT_SHOWN], count=len(new), why=why
            )
        self.wanted = wanted
        self._want(wanted.workers)


def _sources(config: DiscoveryConfig) -> dict[str, tuple[object, Source]]:
    """Every source by its label, with the settings it was made from."""
    found: list[tuple[object, Source]] = []
    for path in config.files:
        found.append(((path, config.file_interval_s), FileSource(path, config.file_interval_s)))
    found += [(one, DnsSource(one)) for one in config.dns]
    found += [(one, KubernetesSource(one)) for one in config.kubernetes]
    return {source.label: (made_from, source) for made_from, source in found}


def _place(worker: WorkerConfig) -> tuple[str, int | None]:
    """Where a worker is: ranks share a URL."""
    return worker.url, worker.data_parallel_rank
