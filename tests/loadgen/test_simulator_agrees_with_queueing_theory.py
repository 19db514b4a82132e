"""The simulator against queues whose answers are known, path by path and on average."""

from __future__ import annotations

import heapq
import math
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest

from loadgen.arrivals import load_to_rate
from loadgen.simulation_config import SimulatedWorker, SimulationConfig, full_batch_iteration_s
from loadgen.simulator import simulate
from loadgen.trace_record import TraceRequest
from loadgen.traces import open_trace
from loadgen.true_jsq import TrueJsq
from loadgen.workload import Prediction, WorkloadSpec, build_workload
from service.control.config import ControlConfig, PolicyName
from service.mock.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.simulation_records import SimulationResult

UNIT = PROFILES["unit"]
ITERATION_S = UNIT.iteration_s(1, 1, 0)


def poisson(rate_per_s: float, lengths: Sequence[int], seed: int) -> list[TraceRequest]:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate_per_s, len(lengths)))
    return [
        TraceRequest(
            arrival_s=float(time_s),
            prompt_tokens=10,
            decode_tokens=int(tokens),
            decode_tokens_hint=int(tokens),
        )
        for time_s, tokens in zip(times_s, lengths, strict=True)
    ]


def fleet(workers: int, batch_limit: int) -> tuple[SimulatedWorker, ...]:
    return tuple(
        SimulatedWorker(worker_id=f"w{i}", profile=UNIT, batch_limit=batch_limit)
        for i in range(workers)
    )


def waits_s(result: SimulationResult) -> list[float]:
    return [r.started_s - r.trace.arrival_s for r in result.requests if r.started_s is not None]


def first_come_first_served_waits_s(requests: Sequence[TraceRequest], servers: int) -> list[float]:
    """Kiefer and Wolfowitz: each request starts when it is there and a server is free."""
    free_s = [0.0] * servers
    waits = []
    for request in requests:
        start_s = max(request.arrival_s, heapq.heappop(free_s))
        heapq.heappush(free_s, start_s + request.decode_tokens * ITERATION_S)
        waits.append(start_s - request.arrival_s)
    return waits


@pytest.mark.parametrize("policy", [PolicyName.ROUND_ROBIN, PolicyName.CENTRAL_FCFS])
def test_one_slot_serves_as_lindley_says(policy: PolicyName) -> None:
    requests = poisson(7.5, [10] * 300, seed=1)
    config = SimulationConfig(workers=fleet(1, 1), control=ControlConfig(policy=policy))
    result = simulate(requests, config)
    expected = first_come_first_served_waits_s(requests, 1)
    assert waits_s(result) == pytest.approx(expected, abs=1e-9)
    assert max(expected) > 0.1
    for request in result.requests:
        assert request.ttft_s == pytest.approx(expected[request.index] + ITERATION_S, abs=1e-9)


def test_fixed_lengths_on_one_slot_wait_as_long_as_in_an_m_d_1_queue() -> None:
    """The standard error of the mean over so many requests is 2.7 %; over seeds it is centred."""
    rho = 0.6
    requests = poisson(rho / ITERATION_S, [1] * 20_000, seed=2)
    config = SimulationConfig(workers=fleet(1, 1))
    result = simulate(requests, config, TrueJsq({str(i): 1 for i in range(len(requests))}))
    expected = rho * ITERATION_S / (2 * (1 - rho))
    assert fmean(waits_s(result)) == pytest.approx(expected, rel=0.08)
    assert result.workers[0].batch_use == pytest.approx(rho, rel=0.02)


def test_a_central_queue_over_four_slots_serves_as_kiefer_and_wolfowitz_say() -> None:
    rng = np.random.default_rng(3)
    requests = poisson(0.85 * 4 / 0.5, rng.geometric(1 / 50, 400).tolist(), seed=3)
    control = ControlConfig(policy=PolicyName.CENTRAL_FCFS)
    result = simulate(requests, SimulationConfig(workers=fleet(4, 1), control=control))
    expected = first_come_first_served_waits_s(requests, 4)
    assert waits_s(result) == pytest.approx(expected, abs=1e-9)
    assert sum(wait_s > 0 for wait_s in expected) > 100


def test_kiefer_and_wolfowitz_wait_as_long_as_in_an_m_m_4_queue() -> None:
    """With the test above: so does the simulator. Erlang C is the expectation."""
    servers, rho, tokens = 4, 0.75, 1000
    rng = np.random.default_rng(4)
    service_s = tokens * ITERATION_S
    lengths = rng.geometric(1 / tokens, 150_000).tolist()
    requests = poisson(rho * servers / service_s, lengths, seed=5)
    offered = rho * servers
    blocked = offered**servers / math.factorial(servers) / (1 - rho)
    queued = blocked / (sum(offered**k / math.factorial(k) for k in range(servers)) + blocked)
    erlang_s = queued * service_s / (servers * (1 - rho))
    found = first_come_first_served_waits_s(requests, servers)
    assert fmean(found) == pytest.approx(erlang_s, rel=0.08)


def test_slots_of_one_batch_differ_from_servers_only_by_the_iteration_in_flight() -> None:
    """Whoever meets a busy worker joins at its next iteration: half an iteration on average."""
    servers, rho, tokens = 4, 0.75, 30
    lengths = np.random.default_rng(6).geometric(1 / tokens, 4_000).tolist()
    requests = poisson(rho * servers / (tokens * ITERATION_S), lengths, seed=7)
    exact = {str(i): n for i, n in enumerate(lengths)}
    result = simulate(requests, SimulationConfig(workers=fleet(1, servers)), TrueJsq(exact))
    expected = fmean(first_come_first_served_waits_s(requests, servers))
    assert 0 < fmean(waits_s(result)) - expected < ITERATION_S


def test_load_one_is_what_full_batches_can_do() -> None:
    """Offered the capacity of full batches and never short of work, the fleet delivers it."""
    trace = open_trace("lmsys-like")
    worker = SimulatedWorker(worker_id="w0", profile=PROFILES["llama-3-8b-a100"], batch_limit=16)
    spec = WorkloadSpec(trace=trace, rate_per_s=1.0, requests=1000, prediction=Prediction.EXACT)
    lengths = build_workload(spec)
    iteration_s = full_batch_iteration_s(worker, lengths)
    mean = fmean(r.decode_tokens for r in lengths)
    rate = load_to_rate(3.0, mean, 1, 16, iteration_s)
    requests = poisson(rate, [r.decode_tokens for r in lengths], seed=6)
    requests = [
        TraceRequest(
            arrival_s=timed.arrival_s,
            prompt_tokens=r.prompt_tokens,
            decode_tokens=r.decode_tokens,
        )
        for timed, r in zip(requests, lengths, strict=True)
    ]
    exact = {str(i): r.decode_tokens for i, r in enumerate(requests)}
    result = simulate(requests, SimulationConfig(workers=(worker,)), TrueJsq(exact))
    delivered = sum(r.decode_tokens for r in requests) / result.end_s
    assert delivered == pytest.approx(16 / iteration_s, rel=0.02)
    assert result.iteration_s == pytest.approx(iteration_s, rel=0.02)
