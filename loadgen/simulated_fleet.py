"""One worker in virtual time: the decode model, whether it is up, and what its metrics page says.

The decode model has no clock; here iterations get a beginning and an end, and what they did is
summed up. Read simulator.py for who calls this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.simulation_records import WorkerUse
from service.control.events import WorkerReport

if TYPE_CHECKING:
    from loadgen.simulation_config import SimulatedWorker
    from service.mock.decode_records import Iteration


@dataclass(slots=True)
class _Use:
    """Sums over the iterations ended."""

    iterations: int = 0
    busy_s: float = 0.0
    slot_s: float = 0.0
    kv_token_s: float = 0.0
    kv_tokens_peak: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(slots=True)
class _Page:
    """What the engine's metrics page would say: set when an iteration ends, as vLLM does."""

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    token_latency_s: float = 0.0
    tokens: int = 0
    restarted: bool = False


class FleetWorker:
    """A worker of the simulated fleet.

    Attributes:
        setup: what it is.
        model: what it holds; a new one after a failure.
        up: whether it takes requests.
        life: how often it has failed; tells whether an iteration belongs to the present model.
        iterating: whether an iteration is in flight.
        began_s: when that iteration began.
    """

    def __init__(self, setup: SimulatedWorker) -> None:
        self.setup = setup
        self.model = setup.machine()
        self.up = True
        self.life = 0
        self.iterating = False
        self.began_s = 0.0
        self._held = (0, 0)
        self._use = _Use()
        self._page = _Page()
        self._prefixes = (0, 0)

    def begin(self, now_s: float) -> float | None:
        """Begin an iteration; answers when it ends, None when there is nothing to do."""
        duration_s = self.model.begin_iteration()
        if duration_s is None:
            return None
        self.iterating = True
        self.began_s = now_s
        self._held = (self.model.batch, self.model.kv_tokens_used)
        return now_s + duration_s * self.setup.iteration_factor

    def end(self, now_s: float) -> Iteration:
        """End the iteration in flight."""
        iteration = self.model.end_iteration()
        self.iterating = False
        duration_s = now_s - self.began_s
        use, page = self._use, self._page
        use.iterations += 1
        use.busy_s += duration_s
        use.slot_s += duration_s * self._held[0]
        use.kv_token_s += duration_s * self._held[1]
        use.kv_tokens_peak = max(use.kv_tokens_peak, self._held[1])
        use.output_tokens += iteration.tokens
        use.preemptions += len(iteration.preempted)
        page.token_latency_s += duration_s * iteration.tokens
        page.tokens += iteration.tokens
        self._show(iteration.waiting)
        return iteration

    def fail(self) -> dict[str, int]:
        """Die; answers the requests that are lost and the tokens each had produced."""
        lost = self.model.progress() | {
            request_id: self.model.decode_tokens(request_id) for request_id in self.model.waiting
        }
        self.up = False
        self.iterating = False
        self.life += 1
        self._count_prefixes()
        self.model = self.setup.machine()
        self._page, self._prefixes = _Page(restarted=True), (0, 0)
        return lost

    def report(self, bias: float) -> WorkerReport:
        """Answer a scrape: gauges of the last iteration's end, times since the last scrape.

        Args:
            bias: the iteration time told is this many times the true one.
        """
        page, seen = self._page, self._seen_prefixes()
        iteration_s = bias * page.token_latency_s / page.tokens if page.tokens else None
        report = WorkerReport(
            running=page.running,
            waiting=page.waiting,
            kv_tokens_used=page.kv_tokens_used,
            kv_capacity_tokens=self.model.kv_capacity_tokens,
            block_tokens=self.setup.block_tokens,
            iteration_s=iteration_s,
            preemptions_total=self.model.stats().preemptions_total,
            restarted=page.restarted,
            prefix_queries=None if seen is None else seen[0],
            prefix_hits=None if seen is None else seen[1],
        )
        page.token_latency_s, page.tokens, page.restarted = 0.0, 0, False
        return report

    def _seen_prefixes(self) -> tuple[int, int] | None:
        """(queries, hits) since the last scrape; None without a prefix cache."""
        if not self.setup.piece_tokens:
            return None
        stats, before = self.model.stats(), self._prefixes
        self._prefixes = (stats.prefix_queries_total, stats.prefix_hits_total)
        return self._prefixes[0] - before[0], self._prefixes[1] - before[1]

    def use(self, span_s: float) -> WorkerUse:
        """Sum up a run of so many seconds."""
        use = self._use
        self._count_prefixes()
        slots_s = span_s * self.setup.batch_limit
        kv_s = span_s * self.model.kv_capacity_tokens
        return WorkerUse(
            worker_id=self.setup.worker_id,
            iterations=use.iterations,
            busy_s=use.busy_s,
            batch_use=use.slot_s / slots_s if slots_s else 0.0,
            kv_use=use.kv_token_s / kv_s if kv_s else 0.0,
            kv_use_peak=use.kv_tokens_peak / self.model.kv_capacity_tokens,
            kv_tokens_at_end=self.model.kv_tokens_used,
            output_tokens=use.output_tokens,
            preemptions=use.preemptions,
            prefix_queries=use.prefix_queries,
            prefix_hits=use.prefix_hits,
        )

    def _count_prefixes(self) -> None:
        """Add what the present model has looked up; call once in its life."""
        stats = self.model.stats()
        self._use.prefix_queries += stats.prefix_queries_total
        self._use.prefix_hits += stats.prefix_hits_total

    def _show(self, waiting: int) -> None:
        page, model = self._page, self.model
        page.running, page.waiting = model.batch, waiting
        page.kv_tokens_used = model.kv_tokens_used
