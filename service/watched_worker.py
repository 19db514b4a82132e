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

    Attributes:
        config: as given.
        state: as published.
        report: the last one that was published.
        restarts: how often the engine's counters or start time said that it was restarted.
        exists: False once a page that shows every engine did not show this rank.
        draining: whether it takes no new requests while it is up.
        introduced: whether the controller knows it.
    """

    def __init__(self, config: WorkerConfig, publish: Publish, log: FilteringBoundLogger) -> None:
        self.config = config
        self.state = WorkerState.DOWN
        self.report = WorkerReport()
        self.restarts = 0
        self.exists = True
        self.draining = False
        self.introduced = False
        self._publish = publish
        self._reports = EngineReports(config)
        self._log = log.bind(worker=config.worker_id)

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
        """Let requests be started, unless the rank drains or does not exist."""
        state = WorkerState.DRAINING if self.draining else WorkerState.UP
        if self.exists and self.state is not state:
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
        elif models is not None:
            self.tell(WorkerReport(models=models), sent_at_s)

    def tell(self, report: WorkerReport, sent_at_s: float) -> None:
        """Publish a report."""
        self.report = report
        if report.restarted:
            self.restarts += 1
            self._log.warning("worker_restarted")
        self._publish(WorkerReported(self.config.worker_id, report, sent_at_s))
