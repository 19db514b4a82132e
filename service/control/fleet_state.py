"""3 controller, workers: limits, state and what the engines report, as arrays over workers.

Own traffic is the ledger's business (ledger.py); here lives what the ledger cannot know: capacity,
iteration time, and load that bypassed the router ("foreign").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from service.control.columns import BoolArray, FloatArray
from service.control.events import WorkerReport, WorkerSpec, WorkerState

LAG_S = 0.5
"""Engine gauges are set at the end of a step; own ends this recent may still be counted in them."""
WAITING_TRUST_S = 2.0
"""A reported engine queue older than this no longer blocks starts."""
ENDS_MAX = 4096
ITERATION_SMOOTHING = 0.3
KV_TOLERANCE = 0.05


@dataclass(slots=True)
class Worker:
    """One worker; mutable, owned by FleetState."""

    spec: WorkerSpec
    state: WorkerState
    batch_limit: int
    kv_capacity_tokens: float
    block_tokens: int
    iteration_s: float
    models: frozenset[str] | None
    foreign_active: int = 0
    foreign_kv: float = 0.0
    excess_active: int = 0
    excess_kv: float = 0.0
    engine_waiting: int = 0
    reported_at_s: float = -np.inf
    recent_ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=ENDS_MAX))


class FleetState:
    """All workers, in the order they joined; the index is the column index g."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.index: dict[str, int] = {}
        self._model_rows: dict[str, BoolArray] = {}

    def __len__(self) -> int:
        return len(self.workers)

    def join(self, spec: WorkerSpec, state: WorkerState) -> None:
        """Add a worker, or take its new specification."""
        capacity = np.inf if spec.kv_capacity_tokens is None else float(spec.kv_capacity_tokens)
        worker = Worker(
            spec,
            state,
            spec.batch_limit,
            capacity,
            spec.block_tokens,
            spec.iteration_s,
            spec.models,
        )
        if spec.worker_id in self.index:
            self.workers[self.index[spec.worker_id]] = worker
        else:
            self.index[spec.worker_id] = len(self.workers)
            self.workers.append(worker)
        self._model_rows.clear()

    def remove(self, worker_id: str) -> int:
        """Remove a worker; later ones move down by one. Returns its old index."""
        gone = self.index.pop(worker_id)
        del self.workers[gone]
        self.index = {worker.spec.worker_id: g for g, worker in enumerate(self.workers)}
        self._model_rows.clear()
        return gone

    def change(self, worker_id: str, state: WorkerState) -> None:
        """Set a worker's state; one that went down forgets what was reported about it."""
        worker = self.workers[self.index[worker_id]]
        worker.state = state
        if state is WorkerState.DOWN:
            worker.foreign_active = worker.excess_active = worker.engine_waiting = 0
            worker.foreign_kv = worker.excess_kv = 0.0

    def report(self, worker_id: str, report: WorkerReport, own: OwnLoad, at_s: float) -> None:
        """Correct a worker by what its engine said; unknown values change nothing.

        Foreign load is what two reports in a row have in excess of our own ledger, own ends of the
        last moments added back: one late gauge must not make us see ghosts.
        """
        worker = self.workers[self.index[worker_id]]
        self._take_limits(worker, report)
        if report.iteration_s is not None and report.iteration_s > 0:
            worker.iteration_s += ITERATION_SMOOTHING * (report.iteration_s - worker.iteration_s)
        if report.running is not None:
            ends = sum(1 for end_s in worker.recent_ends_s if end_s >= at_s - LAG_S)
            seen = report.running + (report.waiting or 0)
            excess = max(0, seen - own.sequences - ends)
            worker.foreign_active = min(excess, worker.excess_active)
            worker.excess_active = excess
        if report.kv_tokens_used is not None and np.isfinite(worker.kv_capacity_tokens):
            slack = KV_TOLERANCE * worker.kv_capacity_tokens
            surplus = report.kv_tokens_used - own.kv_tokens - slack
            worker.foreign_kv = max(0.0, min(surplus, worker.excess_kv))
            if worker.foreign_active == 0:
                worker.foreign_kv = 0.0
            worker.excess_kv = max(0.0, surplus)
        worker.engine_waiting = report.waiting or 0
        worker.reported_at_s = at_s

    def _take_limits(self, worker: Worker, report: WorkerReport) -> None:
        if report.kv_capacity_tokens is not None and worker.spec.kv_capacity_tokens is None:
            worker.kv_capacity_tokens = float(report.kv_capacity_tokens)
        if report.block_tokens is not None:
            worker.block_tokens = report.block_tokens
        if report.batch_limit is not None:
            worker.batch_limit = report.batch_limit
        if report.models is not None and report.models != worker.models:
            worker.models = report.models
            self._model_rows.clear()

    def own_end(self, g: int, now_s: float) -> None:
        """Note that one of our own requests ended on worker g."""
        worker = self.workers[g]
        worker.recent_ends_s.append(now_s)
        worker.engine_waiting = max(0, worker.engine_waiting - 1)

    def serves(self, model: str) -> BoolArray:
        """(g,) which workers serve a model, or may: unknown lists and "" match everything."""
        row = self._model_rows.get(model)
        if row is None or row.size != len(self.workers):
            row = np.array(
                [not model or w.models is None or model in w.models for w in self.workers],
                dtype=np.bool_,
            )
            if len(self._model_rows) < 1024:
                self._model_rows[model] = row
        return row

    def up(self) -> BoolArray:
        """(g,) which workers may take new requests."""
        return np.array([w.state is WorkerState.UP for w in self.workers], dtype=np.bool_)

    def engine_queue_empty(self, now_s: float) -> BoolArray:
        """(g,) no recent report of requests waiting inside the engine."""
        return np.array(
            [
                w.engine_waiting == 0 or now_s - w.reported_at_s > WAITING_TRUST_S
                for w in self.workers
            ],
            dtype=np.bool_,
        )

    def array(self, name: str) -> FloatArray:
        """(g,) one attribute of every worker."""
        return np.array([getattr(worker, name) for worker in self.workers], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What the ledger holds on one worker."""

    sequences: int
    kv_tokens: float
