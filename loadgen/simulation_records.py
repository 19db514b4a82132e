"""What a simulation hands back: one record a request, one a worker, and their summary.

The records become the OutcomeRecord that the live replay writes too, so every report reads both.
Nothing here depends on the clock of the machine: the same seed gives the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import orjson

from loadgen.outcomes import End, OutcomeRecord
from loadgen.summary import RunContext, policy_summary, stats

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from loadgen.summary import JsonValue
    from loadgen.trace_record import TraceRequest
    from service.control.stats import RouterStats


@dataclass(slots=True)
class SimulatedRequest:
    """One request's life; filled in while it happens. Times are seconds from the start.

    Attributes:
        index: its place in the workload; its id at router and workers is this as text.
        dispatched_s: when the router last started it on a worker.
        started_s: when it first entered a worker's batch; None if it had ended by then.
        first_token_s: when bidgate saw its first token.
        end_s: when it ended.
        outcome: how it ended.
        worker: where it was started last.
        output_tokens: tokens it had produced.
        preemptions: how often a worker preempted it.
        detail: reason of a refusal or failure.
    """

    index: int
    trace: TraceRequest
    dispatched_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    outcome: End | None = None
    worker: str = ""
    output_tokens: int = 0
    preemptions: int = 0
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.trace.arrival_s

    def outcome_record(self, policy: str) -> OutcomeRecord:
        """Turn an ended request into the record that replay and reports share."""
        trace = self.trace
        if self.end_s is None or self.outcome is None:
            raise ValueError(f"request {self.index} has not ended")
        return OutcomeRecord(
            policy=policy,
            index=self.index,
            arrival_s=trace.arrival_s,
            sent_s=trace.arrival_s,
            prompt_tokens=trace.prompt_tokens,
            decode_tokens=trace.decode_tokens,
            decode_tokens_hint=trace.decode_tokens_hint,
            outcome=self.outcome,
            ttft_s=self.ttft_s,
            e2e_s=self.end_s - trace.arrival_s,
            output_tokens=self.output_tokens,
            worker=self.worker,
            queue_s=None if self.dispatched_s is None else self.dispatched_s - trace.arrival_s,
            ttft_bound_s=trace.ttft_bound_s,
            tenant=trace.tenant,
            group=trace.group,
            detail=self.detail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """What one worker did.

    Attributes:
        iterations: decode iterations ended.
        busy_s: their durations, summed.
        batch_use: batch slots in use over batch slots there were, averaged over the run.
        kv_use: the same for KV blocks.
        kv_use_peak: highest share of KV blocks in use.
        kv_tokens_at_end: room of the blocks still allocated when the last request had ended.
        output_tokens: tokens produced, of requests that were lost later too.
        preemptions: sequences preempted.
        prefix_queries: prompt tokens looked up in its prefix cache. prefix_hits: of these, found.
    """

    worker_id: str
    iterations: int
    busy_s: float
    batch_use: float
    kv_use: float
    kv_use_peak: float
    kv_tokens_at_end: int
    output_tokens: int
    preemptions: int
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A finished simulation.

    Attributes:
        policy: name of what decided.
        ttft_bound_s: bound on time to first token where a request brings none.
        requests: every request, in the order of the workload.
        workers: in the order of the fleet.
        router: the router's own counters at the end; None for policies that are no Router.
        end_s: when the last request ended.
    """

    policy: str
    ttft_bound_s: float
    requests: tuple[SimulatedRequest, ...]
    workers: tuple[WorkerUse, ...]
    router: RouterStats | None
    end_s: float

    @property
    def iteration_s(self) -> float:
        """Mean duration of an iteration, over all workers."""
        iterations = sum(worker.iterations for worker in self.workers)
        busy_s = math.fsum(worker.busy_s for worker in self.workers)
        return busy_s / iterations if iterations else math.nan

    def outcome_records(self) -> list[OutcomeRecord]:
        """Every request as the record that replay and reports share."""
        return [request.outcome_record(self.policy) for request in self.requests]

    def summary(self) -> dict[str, JsonValue]:
        """Sum up the run.

        The keys of the live summary (loadgen.summary.policy_summary), and beside them the same
        latencies in iterations (seconds over the run's mean iteration time), what the workers
        did, and the router's counters.
        """
        context = RunContext(ttft_bound_s=self.ttft_bound_s)
        records = self.outcome_records()
        found = policy_summary(records, len(self.requests), context)
        completed = [record for record in records if record.outcome is End.COMPLETED]
        iteration_s = self.iteration_s
        ttft_s = [record.ttft_s for record in completed if record.ttft_s is not None]
        found["ttft_iterations"] = stats([value / iteration_s for value in ttft_s])
        found["e2e_iterations"] = stats([record.e2e_s / iteration_s for record in completed])
        found["engine_wait_s"] = stats(self._engine_waits_s())
        found["iteration_s"] = None if math.isnan(iteration_s) else iteration_s
        found["utilisation"] = sum(w.batch_use for w in self.workers) / len(self.workers)
        found["kv_utilisation"] = sum(w.kv_use for w in self.workers) / len(self.workers)
        found["preemptions"] = sum(worker.preemptions for worker in self.workers)
        found["workers"] = [asdict(worker) for worker in self.workers]
        found["tenants"] = self._tenants()
        found["router"] = None if self.router is None else _counters(self.router)
        return found

    def _tenants(self) -> dict[str, JsonValue]:
        """Tokens, ends and waits of each tenant; empty when the requests have none."""
        found: dict[str, JsonValue] = {}
        for tenant in sorted({request.trace.tenant for request in self.requests} - {""}):
            own = [request for request in self.requests if request.trace.tenant == tenant]
            found[tenant] = {
                "entered": len(own),
                "completed": sum(request.outcome is End.COMPLETED for request in own),
                "output_tokens": sum(request.output_tokens for request in own),
                "ttft_s": stats([r.ttft_s for r in own if r.ttft_s is not None]),
            }
        return found

    def _engine_waits_s(self) -> list[float]:
        """Time between the router's start and the worker's batch: the engine's own queue."""
        return [
            request.started_s - request.dispatched_s
            for request in self.requests
            if request.started_s is not None and request.dispatched_s is not None
        ]


def write_simulated_outcomes(results: Iterable[SimulationResult], path: Path) -> int:
    """Write outcomes.jsonl: the shared record, and what only a simulator knows beside it."""
    written = 0
    with path.open("wb") as file:
        for result in results:
            for request in result.requests:
                line = asdict(request.outcome_record(result.policy)) | {
                    "started_s": request.started_s,
                    "first_token_s": request.first_token_s,
                    "end_s": request.end_s,
                    "preemptions": request.preemptions,
                }
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                written += 1
    return written


def _counters(router: RouterStats) -> dict[str, JsonValue]:
    return {
        "starts": router.starts,
        "returns": router.returns,
        "ticks": router.ticks,
        "fallback_ticks": router.fallback_ticks,
        "last_fault": router.last_fault,
        "price_refreshes": router.price_refreshes,
        "prices_dropped": router.prices_dropped,
        "rate_rises": router.rate_rises,
        "rate_falls": router.rate_falls,
        "refused": {str(reason): count for reason, count in router.refused.items()},
    }
