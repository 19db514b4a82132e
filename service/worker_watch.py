"""5 fleet: one server's life as bidgate sees it: down, up, measured, lost, probed again.

A server is one worker, or as many as it has data-parallel ranks. While it is up three loops ask it
(health, metrics, models), each waiting for its own answer before it asks again, so that requests
to a slow server never pile up. What they find is published as events for the controller. Read
worker_probe.py for how it is asked, watched_worker.py for what is published.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog

from service.control.events import WorkerReport, WorkerState
from service.engine_ranks import discrepancy
from service.fleet_types import Candidate, WatchStats
from service.watched_worker import WatchedWorker
from service.worker_probe import ProbeFailedError, WorkerProbe, context_limits

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import httpx

    from service.engine_metrics import EnginePage
    from service.fleet_types import WatchConfig
    from service.watched_worker import Publish
    from service.worker_config import WorkerConfig
    from service.worker_probe import ModelCard

ENGINES_LOGGED_MAX: Final = 16


@dataclass(slots=True)
class _Counts:
    """Counters of WatchStats that are the server's."""

    scrapes_ok: int = 0
    scrapes_failed: int = 0
    malformed_lines: int = 0
    health_failures: int = 0
    times_lost: int = 0


@dataclass(slots=True)
class _Served:
    """What the server says it serves, and whether the controller knows it yet."""

    cards: tuple[ModelCard, ...] | None = None
    contexts: dict[str, int] = field(default_factory=dict)
    names: frozenset[str] | None = None
    news: frozenset[str] | None = None


class _ServerLostError(Exception):
    """Ends the questions to a server that was up."""


class WorkerWatch:
    """Watches one server until cancelled.

    Args:
        workers: the worker that it is, or its data-parallel ranks; at least one. What they leave
            open is learned.
        config: pauses and limits.
        transport: for all questions; owned by the caller.
        publish: takes the events; must not raise or wait.
        rng: of the jitter.
    """

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        config: WatchConfig,
        transport: httpx.AsyncBaseTransport,
        publish: Publish,
        rng: random.Random,
    ) -> None:
        self._server = workers[0]
        self._config = config
        self._probe = WorkerProbe(self._server, transport)
        self._publish = publish
        self._rng = rng
        self._workers: dict[str, WatchedWorker] = {}
        self._up = False
        self._served = _Served(names=self._server.models)
        self._counts = _Counts()
        self._scraped_at_s: float | None = None
        self._histograms_due_s = -math.inf
        self._stale_logged = False
        self._advice = ""
        self._reprobe_s = config.reprobe_min_s
        self._lost = asyncio.Event()
        log = structlog.get_logger("bidgate.fleet")
        alone = self._server.data_parallel_rank is None
        self._log = log.bind(worker=self._server.worker_id) if alone else log.bind(url=self.url)
        for worker in workers:
            self.add(worker)

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._server.url

    def has_rank_of(self, worker: WorkerConfig) -> bool:
        """Whether a rank belongs to this server: then they share health, models and scrapes."""
        server = self._server
        if server.data_parallel_rank is None:
            return False
        return (
            replace(
                worker,
                worker_id=server.worker_id,
                data_parallel_rank=server.data_parallel_rank,
                batch_limit=server.batch_limit,
                kv_capacity_tokens=server.kv_capacity_tokens,
            )
            == server
        )

    @property
    def up(self) -> bool:
        """Whether the server answers."""
        return self._up

    async def run(self) -> None:
        """Introduce the workers, then follow their server for ever."""
        self._served = _Served(names=self._server.models)
        for worker in self._workers.values():
            worker.join()
        while True:
            await self._until_alive()
            await self._learn()
            if not self._lost.is_set():
                await self._while_up()
            await self._back_off()

    def add(self, worker: WorkerConfig) -> WatchedWorker:
        """Watch one more rank of the server."""
        log = structlog.get_logger("bidgate.fleet")
        added = WatchedWorker(worker, self._publish, log, self._config.stalled_after_s)
        self._workers[worker.worker_id] = added
        return added

    def remove(self, worker_id: str) -> WatchedWorker:
        """Watch a worker no longer.

        Raises:
            KeyError: it is none of this server's.
        """
        return self._workers.pop(worker_id)

    def drain(self, worker_id: str, *, on: bool) -> None:
        """Let a worker take no new requests, or let it take them again.

        Raises:
            KeyError: it is none of this server's.
        """
        worker = self._workers[worker_id]
        worker.draining = on
        if worker.state is not WorkerState.DOWN:
            worker.come_up()

    def reconfigure(self, config: WatchConfig) -> None:
        """Take other pauses and limits, from the next question on."""
        self._config = config

    @property
    def empty(self) -> bool:
        """Whether no worker is left to watch."""
        return not self._workers

    def lose(self, reason: str) -> None:
        """Take the server out at once, with all its ranks; it is probed again after a pause."""
        self._lost.set()
        if not self._up:
            return
        self._up = False
        self._counts.times_lost += 1
        self._log.warning("worker_lost", reason=reason)
        for worker in self._workers.values():
            worker.go_down()

    def model_cards(self) -> tuple[ModelCard, ...]:
        """Entries for /v1/models: what the server lists, within what the operator allows."""
        cards = self._served.cards or ()
        if self._server.models is None:
            return cards
        listed = {str(card["id"]): card for card in cards}
        bare: ModelCard = {"object": "model", "created": 0, "owned_by": "vllm"}
        return tuple(listed.get(name, {"id": name, **bare}) for name in sorted(self._server.models))

    @property
    def models(self) -> frozenset[str] | None:
        """What it serves; None when that is not known and any model is tried."""
        return self._served.names

    def serves(self, model: str) -> bool:
        """Whether it serves a model, or may: an unknown list and "" match everything."""
        return not model or self.models is None or model in self.models

    def context_tokens(self, model: str) -> int | None:
        """Return the context length of a model, if the server told it; "" is its shortest."""
        contexts = self._served.contexts
        return contexts.get(model) if model else min(contexts.values(), default=None)

    def candidates(self) -> tuple[Candidate, ...]:
        """Return its workers that are up, and how loaded each said it was."""
        return tuple(
            Candidate(
                worker_id=worker.config.worker_id,
                load=((worker.report.running or 0) + (worker.report.waiting or 0))
                / worker.config.batch_limit,
            )
            for worker in self._workers.values()
            if worker.state is WorkerState.UP
        )

    def stats(self, now_s: float) -> tuple[WatchStats, ...]:
        """Return every worker's counters and gauges at a time of the loop's clock."""
        return tuple(self._stats_of(worker, now_s) for worker in self._workers.values())

    def _stats_of(self, worker: WatchedWorker, now_s: float) -> WatchStats:
        scraped_at_s = self._scraped_at_s
        return WatchStats(
            worker_id=worker.config.worker_id,
            state=worker.state,
            metrics_age_s=None if scraped_at_s is None else now_s - scraped_at_s,
            metrics_stale=worker.state is WorkerState.UP and self._is_stale(now_s),
            filtered_scrapes=self._probe.filter_works,
            scrapes_ok=self._counts.scrapes_ok,
            scrapes_failed=self._counts.scrapes_failed,
            malformed_lines=self._counts.malformed_lines,
            health_failures=self._counts.health_failures,
            times_lost=self._counts.times_lost,
            stalls=worker.stalls,
            restarts=worker.restarts,
            report=worker.report,
        )

    async def _until_alive(self) -> None:
        """Return when the server has answered a health check."""
        self._lost.clear()
        self._probe.reset()
        self._histograms_due_s = -math.inf
        while True:
            try:
                await self._probe.health(self._config.health_timeout_s)
            except ProbeFailedError as error:
                if not (self._counts.health_failures or self._counts.times_lost):
                    self._log.warning("worker_does_not_answer", reason=str(error))
                self._counts.health_failures += 1
                await self._back_off()
            else:
                return

    async def _back_off(self) -> None:
        """Pause before the next probe, twice as long as the last time."""
        await self._pause(self._reprobe_s)
        self._reprobe_s = min(2 * self._reprobe_s, self._config.reprobe_max_s)

    async def _learn(self) -> None:
        """Find out what the server serves and holds before anything is started on it."""
        await self._list_models()
        await self._scrape()

    async def _while_up(self) -> None:
        """Keep asking until the server is lost; one that stayed long enough is trusted again."""
        up_since_s = _now_s()
        self._up = True
        self._show_states()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_health())
                group.create_task(self._watch_metrics())
                group.create_task(self._watch_models())
                await self._lost.wait()
                raise _ServerLostError
        except* _ServerLostError:
            if _now_s() - up_since_s >= self._config.reprobe_max_s:
                self._reprobe_s = self._config.reprobe_min_s

    async def _watch_health(self) -> None:
        failures = 0
        while True:
            config = self._config
            await self._pause(config.suspect_interval_s if failures else config.health_interval_s)
            try:
                await self._probe.health(config.health_timeout_s)
                failures = 0
            except ProbeFailedError as error:
                failures += 1
                self._counts.health_failures += 1
                if error.refused or failures >= config.failures_to_down:
                    self.lose(str(error))

    async def _watch_metrics(self) -> None:
        while True:
            await self._pause(self._config.metrics_interval_s)
            await self._scrape()

    async def _watch_models(self) -> None:
        while True:
            await self._pause(self._config.models_interval_s)
            await self._list_models()

    async def _scrape(self) -> None:
        """Publish what one scrape says; a failed one leaves the controller with its ledger."""
        sent_at_s = _now_s()
        cheap = sent_at_s < self._histograms_due_s
        try:
            page = await self._probe.metrics(self._config.metrics_timeout_s, cheap=cheap)
        except ProbeFailedError as error:
            self._scrape_failed(error, sent_at_s)
            return
        self._counts.scrapes_ok += 1
        if not cheap:
            self._histograms_due_s = sent_at_s + self._config.histograms_interval_s
        self._counts.malformed_lines += page.malformed_lines
        self._scraped_at_s = sent_at_s
        if self._stale_logged:
            self._stale_logged = False
            self._log.info("metrics_fresh_again")
        self._check_ranks(page)
        news, self._served.news = self._served.news, None
        for worker in self._workers.values():
            worker.read(page, news, sent_at_s, complete=self._probe.filter_works)
        self._show_states()

    def _show_states(self) -> None:
        """Put the workers of a server that is up to use, but no rank that does not exist."""
        for worker in self._workers.values():
            if self._up and worker.usable:
                worker.come_up()
            else:
                worker.go_down()

    def _check_ranks(self, page: EnginePage) -> None:
        """Say once when the page shows other engines than the configuration."""
        size = self._server.data_parallel_size
        advice = discrepancy(page, size, complete=self._probe.filter_works)
        if advice and advice != self._advice:
            shown = sorted(page.engines)[:ENGINES_LOGGED_MAX]
            self._log.warning(
                "engines_differ", data_parallel_size=size, engines_shown=shown, advice=advice
            )
        self._advice = advice

    def _scrape_failed(self, error: ProbeFailedError, sent_at_s: float) -> None:
        """Count it, say once that the metrics are stale, and pass on what else is new."""
        self._counts.scrapes_failed += 1
        if error.refused:
            self.lose(str(error))
        if self._is_stale(_now_s()) and not self._stale_logged:
            self._stale_logged = True
            self._log.warning("metrics_stale_ledger_only", reason=str(error))
        news, self._served.news = self._served.news, None
        if news is not None:
            for worker in self._workers.values():
                worker.tell(WorkerReport(models=news), sent_at_s)

    async def _list_models(self) -> None:
        """Look at /v1/models; while that fails, what was known before stays true."""
        try:
            cards = await self._probe.models(self._config.models_timeout_s)
        except ProbeFailedError as error:
            if error.refused:
                self.lose(str(error))
            return
        self._served.cards = cards
        self._served.contexts = context_limits(cards)
        names = frozenset(str(card["id"]) for card in cards)
        if self._server.models is None and names and names != self._served.names:
            self._served.names = self._served.news = names

    def _is_stale(self, now_s: float) -> bool:
        """Whether the server is in use without metrics to correct the ledger by."""
        if not self._up:
            return False
        if self._scraped_at_s is None:
            return True
        return now_s - self._scraped_at_s > self._config.stale_after_s

    async def _pause(self, mean_s: float) -> None:
        jitter = self._config.jitter
        await asyncio.sleep(mean_s * self._rng.uniform(1 - jitter, 1 + jitter))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
