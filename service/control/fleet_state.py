"""3 controller, workers: limits, state and what the engines report, as arrays over workers.

Own traffic is the ledger's business (ledger.py); here lives what the ledger cannot know: capacity,
iteration time, and load that bypassed the router ("foreign").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from service.control.columns import BoolArray, FloatArray
from service.control.config import HandoffConfig
from service.control.events import Role, WorkerReport, WorkerSpec, WorkerState
from service.control.prefill import PrefillPool, WorkerEvent

LAG_S = 0.5
"""Engine gauges are set at the end of a step; own ends this recent may still be counted in them."""
WAITING_TRUST_S = 2.0
"""A reported engine queue older than this no longer blocks starts."""
ENDS_MAX = 4096
ITERATION_SMOOTHING = 0.3
KV_TOLERANCE = 0.05
MODELS_MAX = 1024
"""Model names whose workers are remembered; names come from clients."""
NUMBERS = (
    "batch_limit",
    "kv_capacity_tokens",
    "block_tokens",
    "iteration_s",
    "foreign_active",
    "foreign_kv",
    "engine_waiting",
    "reported_at_s",
    "left_up_s",
    "came_up_s",
)
"""Attributes of a worker that are also kept as arrays over workers."""
LIMITS = ("batch_limit", "kv_capacity_tokens", "block_tokens")
"""Those that say what an empty worker can hold."""


@dataclass(slots=True)
class Worker:
    """One worker; mutable, owned by FleetState, whose arrays mirror it."""

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
    left_up_s: float = -np.inf
    came_up_s: float = -np.inf
    recent_ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=ENDS_MAX))

    def ends_since(self, since_s: float) -> int:
        """How many of our own requests ended since then; the newest are last."""
        return sum(1 for _ in takewhile(lambda at_s: at_s >= since_s, reversed(self.recent_ends_s)))


@dataclass(frozen=True, slots=True)
class Limits:
    """What an empty worker can hold.

    Attributes:
        batch_limit: sequences. room: KV tokens in whole blocks, inf when unknown.
    """

    batch_limit: float
    room: float


@dataclass(frozen=True, slots=True)
class Shapes:
    """The distinct limits of the workers that serve a model; mostly all have the same.

    Attributes:
        up: of those that are up. serving: of all.
    """

    up: frozenset[Limits]
    serving: frozenset[Limits]


class FleetState:
    """All workers, in the order they joined; the index is the column index g.

    Args:
        slow_start_s: over this time a worker that comes up beside others gets its batch slots.

    Attributes:
        workers: the workers. index: their place by id. worker_ids: their ids in order.
        prefill: the prefill workers, which have no index.
        decoders: how many are decode workers.
        version: grows whenever it changes which workers are up, which models they serve, or what
            an empty one can hold.
    """

    def __init__(self, handoff: HandoffConfig | None = None, slow_start_s: float = 0.0) -> None:
        self.prefill = PrefillPool(handoff or HandoffConfig())
        self._slow_start_s = slow_start_s
        self._slow_until_s = -np.inf
        self.workers: list[Worker] = []
        self.index: dict[str, int] = {}
        self.worker_ids: tuple[str, ...] = ()
        self.version = 0
        self.decoders = 0
        self._numbers: dict[str, FloatArray] = {}
        self._up: BoolArray = np.zeros(0, dtype=np.bool_)
        self._decodes: BoolArray = np.zeros(0, dtype=np.bool_)
        # Everywhere true, while no engine has told of a queue.
        self._no_queue: BoolArray | None = None
        self._model_rows: dict[str, BoolArray] = {}
        self._shapes: dict[str, Shapes] = {}
        self._rebuild()

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
        self._rebuild()

    def remove(self, worker_id: str) -> int:
        """Remove a worker; later ones move down by one. Returns its old index."""
        gone = self.index.pop(worker_id)
        del self.workers[gone]
        self.index = {worker.spec.worker_id: g for g, worker in enumerate(self.workers)}
        self._rebuild()
        return gone

    def change(self, worker_id: str, state: WorkerState, now_s: float) -> None:
        """Set a worker's state; one that went down forgets what was reported about it."""
        g = self.index[worker_id]
        worker = self.workers[g]
        if worker.state is WorkerState.UP and state is not WorkerState.UP:
            worker.left_up_s = now_s
        if worker.state is not WorkerState.UP and state is WorkerState.UP and self._up.any():
            worker.came_up_s = now_s
            self._slow_until_s = now_s + self._slow_start_s
        worker.state = state
        if state is WorkerState.DOWN:
            worker.foreign_active = worker.excess_active = worker.engine_waiting = 0
            worker.foreign_kv = worker.excess_kv = 0.0
        self._mirror(g)
        self._up = self._states()
        self._shapes.clear()
        self.version += 1

    def start_slowly_over(self, slow_start_s: float) -> None:
        """Take another time of the slow start; workers that came up of late follow it as well."""
        self._slow_start_s = slow_start_s
        came_up_s = self._numbers["came_up_s"].max(initial=-np.inf)
        self._slow_until_s = float(came_up_s) + slow_start_s

    def report(self, worker_id: str, report: WorkerReport, own: OwnLoad, at_s: float) -> None:
        """Correct a worker by what its engine said; unknown values change nothing.

        Foreign load is what two reports in a row have in excess of our own ledger, own ends of the
        last moments added back: one late gauge must not make us see ghosts.
        """
        g = self.index[worker_id]
        worker = self.workers[g]
        self._take_limits(worker, report)
        if report.iteration_s is not None and report.iteration_s > 0:
            worker.iteration_s = _smoothed_s(worker.iteration_s, report.iteration_s)
        if report.running is not None:
            ends = worker.ends_since(at_s - LAG_S)
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
        self._mirror(g)

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
            self._shapes.clear()
            self.version += 1

    def own_end(self, g: int, sequences: int, now_s: float) -> None:
        """Note that the sequences of one of our own requests ended on worker g."""
        worker = self.workers[g]
        worker.recent_ends_s.extend([now_s] * sequences)
        if worker.engine_waiting > 0:
            worker.engine_waiting = max(0, worker.engine_waiting - sequences)
            self._mirror(g)

    def serves(self, model: str) -> BoolArray:
        """(g,) which workers serve a model, or may: unknown lists and "" match everything."""
        row = self._model_rows.get(model)
        if row is None:
            row = np.array(
                [not model or w.models is None or model in w.models for w in self.workers],
                dtype=np.bool_,
            )
            if len(self._model_rows) < MODELS_MAX:
                self._model_rows[model] = row
        return row

    def models(self) -> frozenset[str]:
        """Every model that a worker, up or not, is known to serve."""
        return frozenset().union(*(worker.models or () for worker in self.workers))

    def shapes(self, model: str) -> Shapes:
        """The distinct limits among the workers that serve a model."""
        found = self._shapes.get(model)
        if found is None:
            serves = self.serves(model)
            found = Shapes(self._limits(serves & self._up), self._limits(serves))
            if len(self._shapes) < MODELS_MAX:
                self._shapes[model] = found
        return found

    def shapes_of(self, worker_id: str) -> Shapes:
        """The limits of one worker alone; none when it is not in the fleet."""
        alone = np.array([known == worker_id for known in self.worker_ids], dtype=np.bool_)
        return Shapes(self._limits(alone & self._up), self._limits(alone))

    def _limits(self, workers: BoolArray) -> frozenset[Limits]:
        batch, block = (self._numbers[name][workers] for name in ("batch_limit", "block_tokens"))
        capacity = self._numbers["kv_capacity_tokens"][workers]
        known = np.isfinite(capacity)
        room = np.where(known, capacity - np.where(known, capacity, 0.0) % block, np.inf)
        return frozenset(map(Limits, batch.tolist(), room.tolist()))

    def left_up_s(self, model: str) -> float:
        """When a worker that serves a model last ceased to be up; -inf when none did."""
        return float(self._numbers["left_up_s"][self.serves(model)].max(initial=-np.inf))

    def batch_limit(self, now_s: float) -> FloatArray:
        """(g,) batch slots that may be used now, at least one; all but where a worker is new."""
        limit = self._numbers["batch_limit"]
        if now_s >= self._slow_until_s:
            return limit
        share = np.clip((now_s - self._numbers["came_up_s"]) / self._slow_start_s, 0.0, 1.0)
        return np.maximum(1.0, np.ceil(limit * share))

    def up(self) -> BoolArray:
        """(g,) which workers may take new requests; read-only."""
        return self._up

    def decodes(self) -> BoolArray:
        """(g,) which workers are decode workers: their prompts are computed elsewhere; read-only.

        The others do both.
        """
        return self._decodes

    def followed_prefill(self, event: WorkerEvent, now_s: float) -> bool:
        """Book an event if it is about a prefill worker; answers whether it is."""
        known = self.prefill.version
        ours = self.prefill.follow(event, now_s)
        self.version += self.prefill.version != known
        return ours

    def engine_queue_empty(self, now_s: float) -> BoolArray:
        """(g,) no recent report of requests waiting inside the engine."""
        if self._no_queue is not None:
            return self._no_queue
        stale = now_s - self._numbers["reported_at_s"] > WAITING_TRUST_S
        return np.asarray((self._numbers["engine_waiting"] == 0) | stale)

    def array(self, name: str) -> FloatArray:
        """(g,) one of NUMBERS of every worker; read-only, and never changed once handed out."""
        return self._numbers[name]

    def _states(self) -> BoolArray:
        up = np.array([w.state is WorkerState.UP for w in self.workers], dtype=np.bool_)
        up.flags.writeable = False
        return up

    def _rebuild(self) -> None:
        """Make every array anew: the workers are others than before."""
        self.worker_ids = tuple(worker.spec.worker_id for worker in self.workers)
        for name in NUMBERS:
            values = np.array([getattr(w, name) for w in self.workers], dtype=np.float64)
            values.flags.writeable = False
            self._numbers[name] = values
        self._up = self._states()
        decodes = [worker.spec.role is Role.DECODE for worker in self.workers]
        self.decoders = sum(decodes)
        self._decodes = np.array(decodes, dtype=np.bool_)
        self._decodes.flags.writeable = False
        self._see_queues()
        self._model_rows.clear()
        self._shapes.clear()
        self.version += 1

    def _mirror(self, g: int) -> None:
        """Take worker g's numbers into the arrays, by copy: a view handed out stays as it was."""
        worker = self.workers[g]
        for name in NUMBERS:
            value = float(getattr(worker, name))
            if self._numbers[name][g] == value:
                continue
            values = self._numbers[name].copy()
            values[g] = value
            values.flags.writeable = False
            self._numbers[name] = values
            if name in LIMITS:
                self._shapes.clear()
                self.version += 1
            if name == "engine_waiting":
                self._see_queues()

    def _see_queues(self) -> None:
        """Look whether any engine told of requests that wait inside it."""
        self._no_queue = None
        if not np.count_nonzero(self._numbers["engine_waiting"]):
            self._no_queue = np.ones(len(self.workers), dtype=np.bool_)
            self._no_queue.flags.writeable = False


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What the ledger holds on one worker."""

    sequences: int
    kv_tokens: float


def _smoothed_s(known_s: float, measured_s: float) -> float:
    """Average iterations per second, not seconds per iteration.

    Reports cover equal times, so one with a few long iterations stands for few: the mean of the
    rates says how many iterations fit into a time, which is what the iteration time is used for.
    """
    rate = (1.0 - ITERATION_SMOOTHING) / known_s + ITERATION_SMOOTHING / measured_s
    return 1.0 / rate
