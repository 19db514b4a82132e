"""5 fleet: one worker's life as bidgate sees it: down, up, measured, lost, probed again.

While the worker is up three loops ask it (health, metrics, models), each waiting for its own
answer before it asks again, so that requests to a slow server never pile up. What they find is
published as events for the controller. Read worker_probe.py for how it is asked.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import structlog

from service.control.events import (
    WorkerChanged,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
    WorkerState,
)
from service.engine_reports import EngineReports
from service.fleet_types import WatchStats
from service.worker_probe import ProbeFailedError, WorkerProbe

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    import httpx

    from service.control.events import Event
    from service.fleet_types import WatchConfig
    from service.worker_config import WorkerConfig
    from service.worker_probe import ModelCard

Publish: TypeAlias = "Callable[[Event], None]"


@dataclass(slots=True)
class _Counts:
    """Counters of WatchStats."""

    scrapes_ok: int = 0
    scrapes_failed: int = 0
    malformed_lines: int = 0
    health_failures: int = 0
    times_lost: int = 0
    restarts: int = 0


@dataclass(slots=True)
class _Served:
    """What the worker says it serves, and whether the controller knows it yet."""

    cards: tuple[ModelCard, ...] | None = None
    names: frozenset[str] | None = None
    news: frozenset[str] | None = None


class _WorkerLostError(Exception):
    """Ends the questions to a worker that was up."""


class WorkerWatch:
    """Watches one worker until cancelled.

    Args:
        worker: as configured; what it leaves open is learned.
        config: pauses and limits.
        client: for all questions; owned by the caller.
        publish: takes the events; must not raise or wait.
        rng: of the jitter.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        config: WatchConfig,
        client: httpx.AsyncClient,
        publish: Publish,
        rng: random.Random,
    ) -> None:
        self._worker = worker
        self._config = config
        self._probe = WorkerProbe(worker, client)
        self._publish = publish
        self._rng = rng
        self._reports = EngineReports(worker)
        self._report = WorkerReport()
        self._state = WorkerState.DOWN
        self._served = _Served(names=worker.models)
        self._counts = _Counts()
        self._scraped_at_s: float | None = None
        self._stale_logged = False
        self._reprobe_s = config.reprobe_min_s
        self._lost = asyncio.Event()
        self._log = structlog.get_logger("bidgate.fleet").bind(worker=worker.worker_id)

    @property
    def state(self) -> WorkerState:
        """As last published."""
        return self._state

    async def run(self) -> None:
        """Introduce the worker, then follow it for ever."""
        self._served = _Served(names=self._worker.models)
        self._publish(WorkerJoined(self._spec(), WorkerState.DOWN))
        while True:
            await self._until_alive()
            await self._learn()
            if not self._lost.is_set():
                await self._while_up()
            await self._back_off()

    def lose(self, reason: str) -> None:
        """Take the worker out at once; it is probed again after a pause."""
        self._lost.set()
        if self._state is WorkerState.DOWN:
            return
        self._state = WorkerState.DOWN
        self._counts.times_lost += 1
        self._log.warning("worker_lost", reason=reason)
        self._publish(WorkerChanged(self._worker.worker_id, WorkerState.DOWN))

    def model_cards(self) -> tuple[ModelCard, ...]:
        """Entries for /v1/models: what the worker lists, within what the operator allows."""
        cards = self._served.cards or ()
        if self._worker.models is None:
            return cards
        listed = {str(card["id"]): card for card in cards}
        bare: ModelCard = {"object": "model", "created": 0, "owned_by": "vllm"}
        return tuple(listed.get(name, {"id": name, **bare}) for name in sorted(self._worker.models))

    def stats(self, now_s: float) -> WatchStats:
        """Return counters and gauges at a time of the loop's clock."""
        scraped_at_s = self._scraped_at_s
        return WatchStats(
            worker_id=self._worker.worker_id,
            state=self._state,
            metrics_age_s=None if scraped_at_s is None else now_s - scraped_at_s,
            metrics_stale=self._is_stale(now_s),
            filtered_scrapes=self._probe.filter_works,
            scrapes_ok=self._counts.scrapes_ok,
            scrapes_failed=self._counts.scrapes_failed,
            malformed_lines=self._counts.malformed_lines,
            health_failures=self._counts.health_failures,
            times_lost=self._counts.times_lost,
            restarts=self._counts.restarts,
            report=self._report,
        )

    def _spec(self) -> WorkerSpec:
        """Return the worker as configured."""
        return WorkerSpec(
            worker_id=self._worker.worker_id,
            batch_limit=self._worker.batch_limit,
            kv_capacity_tokens=self._worker.kv_capacity_tokens,
            models=self._worker.models,
        )

    async def _until_alive(self) -> None:
        """Return when the worker has answered a health check."""
        self._lost.clear()
        self._probe.reset()
        while True:
            try:
                await self._probe.health(self._config.health_timeout_s)
            except ProbeFailedError:
                self._counts.health_failures += 1
                await self._back_off()
            else:
                return

    async def _back_off(self) -> None:
        """Pause before the next probe, twice as long as the last time."""
        await self._pause(self._reprobe_s)
        self._reprobe_s = min(2 * self._reprobe_s, self._config.reprobe_max_s)

    async def _learn(self) -> None:
        """Find out what the worker serves and holds before anything is started on it."""
        await self._list_models()
        await self._scrape()

    async def _while_up(self) -> None:
        """Keep asking until the worker is lost; one that stayed long enough is trusted again."""
        up_since_s = _now_s()
        self._state = WorkerState.UP
        self._log.info("worker_up", batch_limit=self._worker.batch_limit)
        self._publish(WorkerChanged(self._worker.worker_id, WorkerState.UP))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_health())
                group.create_task(self._watch_metrics())
                group.create_task(self._watch_models())
                await self._lost.wait()
                raise _WorkerLostError
        except* _WorkerLostError:
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
        try:
            page = await self._probe.metrics(self._config.metrics_timeout_s)
        except ProbeFailedError as error:
            self._scrape_failed(error, sent_at_s)
            return
        self._counts.scrapes_ok += 1
        self._counts.malformed_lines += page.malformed_lines
        self._scraped_at_s = sent_at_s
        if self._stale_logged:
            self._stale_logged = False
            self._log.info("metrics_fresh_again")
        self._tell(self._reports.report(page, self._served.news), sent_at_s)

    def _scrape_failed(self, error: ProbeFailedError, sent_at_s: float) -> None:
        """Count it, say once that the metrics are stale, and pass on what else is new."""
        self._counts.scrapes_failed += 1
        if error.refused:
            self.lose(str(error))
        if self._is_stale(_now_s()) and not self._stale_logged:
            self._stale_logged = True
            self._log.warning("metrics_stale_ledger_only", reason=str(error))
        if self._served.news is not None:
            self._tell(WorkerReport(models=self._served.news), sent_at_s)

    def _tell(self, report: WorkerReport, sent_at_s: float) -> None:
        self._served.news = None
        self._report = report
        if report.restarted:
            self._counts.restarts += 1
            self._log.warning("worker_restarted")
        self._publish(WorkerReported(self._worker.worker_id, report, sent_at_s))

    async def _list_models(self) -> None:
        """Look at /v1/models; while that fails, what was known before stays true."""
        try:
            cards = await self._probe.models(self._config.models_timeout_s)
        except ProbeFailedError as error:
            if error.refused:
                self.lose(str(error))
            return
        self._served.cards = cards
        names = frozenset(str(card["id"]) for card in cards)
        if self._worker.models is None and names and names != self._served.names:
            self._served.names = self._served.news = names

    def _is_stale(self, now_s: float) -> bool:
        """Whether the worker is in use without metrics to correct the ledger by."""
        if self._state is WorkerState.DOWN:
            return False
        if self._scraped_at_s is None:
            return True
        return now_s - self._scraped_at_s > self._config.stale_after_s

    async def _pause(self, seconds_s: float) -> None:
        jitter = self._config.jitter
        await asyncio.sleep(seconds_s * self._rng.uniform(1 - jitter, 1 + jitter))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
