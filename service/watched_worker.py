"""5 fleet: one worker of the controller as the watch of its server knows it.

A worker is a whole server, or one data-parallel rank of it: then its siblings share the server's
health, models and scrapes, and each has its own state, report and place in the controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from service.control.events import (
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
    WorkerState,
)
from service.engine_progress import EngineProgress
from service.engine_ranks import part_of
from service.engine_reports import EngineReports

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from service.control.events import Event
    from service.engine_metrics import EnginePage
    from service.worker_config import WorkerConfig

Publish: TypeAlias = "Callable[[Event], None]"


class WatchedWorker:
    """Tells the controller about one worker.

    Args:
        config: as configured; what it leaves open is learned.
        publish: takes the events; must not raise or wait.
        log: of the fleet, without the worker.
        stalled_after_s: how long its engine may stand still with requests running.

    Attributes:
        config: as given.
        state: as published.
        report: the last one that was published.
        restarts: how often the engine's counters or start time said that it was restarted.
        exists: False once a page that shows every engine did not show this rank.
        draining: whether it takes no new requests while it is up.
        introduced: whether the controller knows it.
        stalls: how often its engine stood still with requests running.
    """

    def __init__(
        self,
        config: WorkerConfig,
        publish: Publish,
        log: FilteringBoundLogger,
        stalled_after_s: float,
    ) -> None:
        self.config = config
        self.state = WorkerState.DOWN
        self.report = WorkerReport()
        self.restarts = 0
        self.exists = True
        self.draining = False
        self.introduced = False
        self.stalls = 0
        self._stalled = False
        self._stalled_after_s = stalled_after_s
        self._progress = EngineProgress()
        self._publish = publish
        self._reports = EngineReports(config)
        self._log = log.bind(worker=config.worker_id)

    @property
    def usable(self) -> bool:
        """Whether requests may be started on it while its server is up."""
        return self.exists and not self._stalled

    def join(self) -> None:
        """Introduce the worker to the controller, down until its server has answered."""
        self.state = WorkerState.DOWN
        self.introduced = True
        spec = WorkerSpec(
            worker_id=self.config.worker_id,
            batch_limit=self.config.batch_limit,
            kv_capacity_tokens=self.config.kv_capacity_tokens,
            models=self.config.models,
            role=self.config.role,
        )
        self._publish(WorkerJoined(spec, WorkerState.DOWN))

    def leave(self) -> None:
        """Take the worker out of the controller."""
        self._publish(WorkerGone(self.config.worker_id))

    def come_up(self) -> None:
        """Let requests be started, unless the rank drains, does not exist or hangs."""
        state = WorkerState.DRAINING if self.draining else WorkerState.UP
        if self.usable and self.state is not state:
            if self.state is WorkerState.DOWN:
                self._log.info("worker_up", batch_limit=self.config.batch_limit)
            self.state = state
            self._publish(WorkerChanged(self.config.worker_id, state))

    def go_down(self) -> None:
        """Let no more requests be started."""
        if self.state is not WorkerState.DOWN:
            self.state = WorkerState.DOWN
            self._publish(WorkerChanged(self.config.worker_id, WorkerState.DOWN))

    def read(
        self, page: EnginePage, models: frozenset[str] | None, sent_at_s: float, *, complete: bool
    ) -> None:
        """Report what a page of the server says about this worker.

        Args:
            page: of the whole server.
            models: names served, when they have changed.
            sent_at_s: when the scrape was sent, on the loop's clock.
            complete: whether the page shows every engine there is.
        """
        part = part_of(page, self.config)
        self.exists = part is not None or not complete
        if part is not None:
            self.tell(self._reports.report(part, models), sent_at_s)
            self._mind_stall(self._progress.note(part, sent_at_s))
        elif models is not None:
            self.tell(WorkerReport(models=models), sent_at_s)

    def _mind_stall(self, still_s: float) -> None:
        """Note whether the engine hangs: then its HTTP server may well answer everything else."""
        was_stalled, self._stalled = self._stalled, still_s > self._stalled_after_s
        if self._stalled and not was_stalled:
            self.stalls += 1
            self._log.warning("worker_stalled", still_s=round(still_s, 1))
        elif was_stalled and not self._stalled:
            self._log.info("worker_moves_again")

    def tell(self, report: WorkerReport, sent_at_s: float) -> None:
        """Publish a report."""
        self.report = report
        if report.restarted:
            self.restarts += 1
            self._log.warning("worker_restarted")
        self._publish(WorkerReported(self.config.worker_id, report, sent_at_s))
