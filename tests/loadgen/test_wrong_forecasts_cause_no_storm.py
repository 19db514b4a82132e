"""T87: answers ten times as long as their clients said, where memory is too small for them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from loadgen.outcomes import End
from loadgen.simulation_config import SimulatedWorker, SimulationConfig, Telemetry
from loadgen.simulation_records import SimulationResult
from loadgen.simulator import simulate
from loadgen.trace_record import TraceRequest
from service.control.config import ControlConfig, PolicyName
from service.control.router import Router
from service.mock.profiles import PROFILES

REQUESTS = 60
KV_TOKENS = 480
"""Of a worker: half of what eight requests need at their longest."""


def requests(share_told: float) -> list[TraceRequest]:
    """Arrivals faster than the workers, with a forecast of a share of the true length."""
    rng = np.random.default_rng(0)
    arrival_s = np.cumsum(rng.exponential(0.04, REQUESTS))
    return [
        TraceRequest(
            arrival_s=float(at_s),
            prompt_tokens=int(rng.integers(10, 30)),
            decode_tokens=length,
            decode_tokens_hint=max(1, int(length * share_told)),
        )
        for at_s, length in zip(arrival_s, map(int, rng.integers(60, 120, REQUESTS)), strict=True)
    ]


@cache
def played(policy: PolicyName, share_told: float) -> SimulationResult:
    workers = tuple(
        SimulatedWorker(
            worker_id=name,
            profile=PROFILES["unit"],
            batch_limit=8,
            kv_capacity_tokens=KV_TOKENS,
        )
        for name in ("w0", "w1")
    )
    config = SimulationConfig(
        workers=workers,
        control=ControlConfig(policy=policy, max_wait_s=1000.0),
        telemetry=Telemetry(scrape_interval_s=0.5),
    )
    return simulate(requests(share_told), config, Router(config.control))


def preemptions(result: SimulationResult) -> int:
    return sum(worker.preemptions for worker in result.workers)


@pytest.mark.parametrize("policy", [PolicyName.ONLINE_LP, PolicyName.CENTRAL_FCFS])
def test_answers_ten_times_as_long_as_told_all_end_and_take_no_longer(policy: PolicyName) -> None:
    """Memory is short, so some are preempted; nobody again and again, and no work is piled up."""
    wrong, exact = played(policy, 0.1), played(policy, 1.0)
    assert {request.outcome for request in wrong.requests} == {End.COMPLETED}
    assert sum(worker.output_tokens for worker in wrong.workers) == sum(
        request.trace.decode_tokens for request in wrong.requests
    )
    assert all(worker.kv_use_peak <= 1.0 for worker in wrong.workers)
    assert all(worker.kv_tokens_at_end == 0 for worker in wrong.workers)
    assert max(request.preemptions for request in wrong.requests) <= 4
    assert wrong.end_s <= 1.2 * exact.end_s
    assert preemptions(exact) == 0 < preemptions(wrong) <= REQUESTS


def test_a_queue_in_front_preempts_less_than_pushing_does_whatever_clients_say() -> None:
    pushed = preemptions(played(PolicyName.LEAST_OUTSTANDING, 0.1))
    assert preemptions(played(PolicyName.ONLINE_LP, 0.1)) < 0.75 * pushed
