"""5 fleet: all workers, each server followed by its own watch; what they serve together.

The watches publish what they find as events; the fleet adds and removes them and keeps one
server's trouble from touching the others. The data-parallel ranks of a URL are workers of their
own and share its watch. Read worker_watch.py next.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

import structlog

from service.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    import httpx

    from service.fleet_types import Candidate, WatchConfig, WatchStats
    from service.watched_worker import Publish
    from service.worker_config import WorkerConfig
    from service.worker_probe import ModelCard

WORKERS_MAX: Final = 8192
"""Those that leave are among them for a while."""


class Fleet:
    """Follows every worker while run() runs.

    Args:
        workers: to begin with; more may be added later.
        config: pauses and limits of the watches.
        transport: for health checks, scrapes and model lists, not shared with relayed traffic, so
            that a full pool never delays them; owned by the caller.
        publish: takes the events; must not raise or wait.
        seed: of the jitter.
    """

    def __init__(
        self,
        workers: Iterable[WorkerConfig],
        config: WatchConfig,
        transport: httpx.AsyncBaseTransport,
        publish: Publish,
        seed: int = 0,
    ) -> None:
        self._config = config
        self._transport = transport
        self._publish = publish
        self._seed = seed
        self._watches: dict[str, WorkerWatch] = {}
        self._tasks: dict[WorkerWatch, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._log = structlog.get_logger("bidgate.fleet")
        for worker in workers:
            self.add(worker)

    async def run(self) -> None:
        """Follow the workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for watch in self._servers():
                    self._start(watch)
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
        shared = self._watch_of_siblings(worker)
        if shared is not None:
            self._watches[worker_id] = shared
            rank = shared.add(worker)
            if self._group is not None:
                rank.join()
            return
        rng = random.Random(f"{self._seed} {worker_id}")
        watch = WorkerWatch((worker,), self._config, self._transport, self._publish, rng)
        self._watches[worker_id] = watch
        if self._group is not None:
            self._start(watch)

    def remove(self, worker_id: str) -> None:
        """Stop following a worker; its requests end through their own connections.

        Raises:
            KeyError: it is not in the fleet.
        """
        watch = self._watches.pop(worker_id)
        worker = watch.remove(worker_id)
        task = self._tasks.get(watch)
        if task is None:
            return
        if worker.introduced:
            worker.leave()
        self._end_if_empty(watch)

    def replace(self, worker: WorkerConfig) -> None:
        """Follow a worker anew under another configuration; its requests go on.

        It counts as down until it has answered, so that nothing starts on what is not known.

        Raises:
            KeyError: it is not in the fleet.
        """
        old = self._watches.pop(worker.worker_id)
        drained = old.remove(worker.worker_id).draining
        self._end_if_empty(old)
        self.add(worker)
        self.drain(worker.worker_id, on=drained)

    def drain(self, worker_id: str, *, on: bool) -> None:
        """Start nothing more on a worker, or start again.

        Raises:
            KeyError: it is not in the fleet.
        """
        self._watches[worker_id].drain(worker_id, on=on)

    def reconfigure(self, config: WatchConfig) -> None:
        """Take other pauses and limits for all watches, from their next question on."""
        self._config = config
        for watch in self._servers():
            watch.reconfigure(config)

    def is_up(self, worker_id: str) -> bool:
        """Whether a worker's server answers, whether or not requests are started on it."""
        watch = self._watches.get(worker_id)
        return watch is not None and watch.up

    def saw_failure(self, worker_id: str) -> None:
        """Requests to the worker fail: take its server out until it answers a health check."""
        watch = self._watches.get(worker_id)
        if watch is not None:
            watch.lose("requests to it fail")

    def models(self) -> dict[str, object]:
        """Return what the workers that are up serve, as an OpenAI model list.

        A model that several workers serve is listed once, with the shortest max_model_len: any of
        them may get the request.
        """
        union: dict[str, ModelCard] = {}
        for watch in self._servers():
            if not watch.up:
                continue
            for card in watch.model_cards():
                known = union.setdefault(str(card["id"]), card)
                if _length_limit(card) < _length_limit(known):
                    union[str(card["id"])] = card
        return {"object": "list", "data": list(union.values())}

    def candidates(self, model: str) -> tuple[Candidate, ...]:
        """Return the workers that are up and serve a model, or may; "" is any model."""
        return tuple(
            one for watch in self._servers() if watch.serves(model) for one in watch.candidates()
        )

    def served(self) -> frozenset[str] | None:
        """Return what the workers, up or not, serve; None when one of them may serve any model."""
        known = [watch.models for watch in self._servers()]
        if not known or None in known:
            return None
        return frozenset().union(*(models or () for models in known))

    def answers(self, worker_id: str) -> bool:
        """Whether the server of a worker answers, though the worker may take nothing new."""
        watch = self._watches.get(worker_id)
        return watch is not None and watch.up

    def context_tokens(self, model: str) -> int | None:
        """Return the longest context of a model among the workers, or None when nobody told."""
        told = [watch.context_tokens(model) for watch in self._watches.values()]
        return max((limit for limit in told if limit is not None), default=None)

    def stats(self) -> tuple[WatchStats, ...]:
        """Return every worker's counters and gauges; call it from the event loop."""
        now_s = asyncio.get_running_loop().time()
        return tuple(one for watch in self._servers() for one in watch.stats(now_s))

    def _servers(self) -> list[WorkerWatch]:
        """Every watch once, in the order of their first workers."""
        return list(dict.fromkeys(self._watches.values()))

    def _watch_of_siblings(self, worker: WorkerConfig) -> WorkerWatch | None:
        """The watch of the server whose rank this is, if another rank has brought it."""
        if worker.data_parallel_rank is None:
            return None
        return next((watch for watch in self._watches.values() if watch.has_rank_of(worker)), None)

    def _end_if_empty(self, watch: WorkerWatch) -> None:
        if watch.empty and watch in self._tasks:
            self._tasks.pop(watch).cancel()

    def _start(self, watch: WorkerWatch) -> None:
        if self._group is None:
            raise RuntimeError("the fleet is not running")
        self._tasks[watch] = self._group.create_task(self._follow(watch))

    async def _follow(self, watch: WorkerWatch) -> None:
        """Run a watch, and run it again should it break: the others must not notice."""
        while True:
            try:
                await watch.run()
            except Exception:
                self._log.exception("worker_watch_broke", url=watch.url)
                watch.lose("its watch broke")
            await asyncio.sleep(self._config.reprobe_max_s)


def _length_limit(card: ModelCard) -> float:
    """max_model_len of a model, infinite where a worker does not tell."""
    limit = card.get("max_model_len")
    return float(limit) if isinstance(limit, (int, float)) else float("inf")
