"""5 fleet: all workers, each followed by its own watch; what they serve together.

The watches publish what they find as events; the fleet adds and removes them and keeps one
worker's trouble from touching the others. Read worker_watch.py next.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

import structlog

from service.control.events import WorkerGone, WorkerState
from service.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    import httpx

    from service.fleet_types import WatchConfig, WatchStats
    from service.worker_config import WorkerConfig
    from service.worker_probe import ModelCard
    from service.worker_watch import Publish

WORKERS_MAX: Final = 4096


class Fleet:
    """Follows every worker while run() runs.

    Args:
        workers: to begin with; more may be added later.
        config: pauses and limits of the watches.
        client: for health checks, scrapes and model lists, not shared with relayed traffic, so
            that a full pool never delays them; owned by the caller.
        publish: takes the events; must not raise or wait.
        seed: of the jitter.
    """

    def __init__(
        self,
        workers: Iterable[WorkerConfig],
        config: WatchConfig,
        client: httpx.AsyncClient,
        publish: Publish,
        seed: int = 0,
    ) -> None:
        self._config = config
        self._client = client
        self._publish = publish
        self._seed = seed
        self._watches: dict[str, WorkerWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._log = structlog.get_logger("bidgate.fleet")
        for worker in workers:
            self.add(worker)

    async def run(self) -> None:
        """Follow the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for worker_id in self._watches:
                    self._start(worker_id)
                await asyncio.Event().wait()
            finally:
                self._group = None
                self._tasks.clear()

    def add(self, worker: WorkerConfig) -> None:
        """Follow one more worker.

        Raises:
            ValueError: the id is taken, or there are WORKERS_MAX workers.
        """
        worker_id = worker.worker_id
        if worker_id in self._watches:
            raise ValueError(f"worker {worker_id} is already in the fleet")
        if len(self._watches) >= WORKERS_MAX:
            raise ValueError(f"the fleet holds at most {WORKERS_MAX} workers")
        rng = random.Random(f"{self._seed} {worker_id}")
        watch = WorkerWatch(worker, self._config, self._client, self._publish, rng)
        self._watches[worker_id] = watch
        if self._group is not None:
            self._start(worker_id)

    def remove(self, worker_id: str) -> None:
        """Stop following a worker; its requests end through their own connections.

        Raises:
            KeyError: it is not in the fleet.
        """
        del self._watches[worker_id]
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()
            self._publish(WorkerGone(worker_id))

    def saw_failure(self, worker_id: str) -> None:
        """Requests to the worker fail: take it out until it answers a health check."""
        watch = self._watches.get(worker_id)
        if watch is not None:
            watch.lose("requests to it fail")

    def models(self) -> dict[str, object]:
        """Return what the workers that are up serve, as an OpenAI model list.

        A model that several workers serve is listed once, with the shortest max_model_len: any of
        them may get the request.
        """
        union: dict[str, ModelCard] = {}
        for watch in self._watches.values():
            if watch.state is not WorkerState.UP:
                continue
            for card in watch.model_cards():
                known = union.setdefault(str(card["id"]), card)
                if _length_limit(card) < _length_limit(known):
                    union[str(card["id"])] = card
        return {"object": "list", "data": list(union.values())}

    def stats(self) -> tuple[WatchStats, ...]:
        """Return every worker's counters and gauges; call it from the event loop."""
        now_s = asyncio.get_running_loop().time()
        return tuple(watch.stats(now_s) for watch in self._watches.values())

    def _start(self, worker_id: str) -> None:
        if self._group is None:
            raise RuntimeError("the fleet is not running")
        self._tasks[worker_id] = self._group.create_task(self._follow(worker_id))

    async def _follow(self, worker_id: str) -> None:
        """Run a watch, and run it again should it break: the others must not notice."""
        watch = self._watches[worker_id]
        while True:
            try:
                await watch.run()
            except Exception:
                self._log.exception("worker_watch_broke", worker=worker_id)
                watch.lose("its watch broke")
            await asyncio.sleep(self._config.reprobe_max_s)


def _length_limit(card: ModelCard) -> float:
    """max_model_len of a model, infinite where a worker does not tell."""
    limit = card.get("max_model_len")
    return float(limit) if isinstance(limit, (int, float)) else float("inf")
