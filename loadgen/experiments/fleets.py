"""The fleets of the experiments, and the look-ahead and bounds that go with them."""

from __future__ import annotations

from dataclasses import replace

from loadgen.simulation_config import SimulatedWorker, full_batch_iteration_s
from loadgen.traces import open_trace
from loadgen.workload import Prediction, WorkloadSpec, build_workload
from service.control.config import ControlConfig, Kernel
from service.mock.profiles import LLAMA_3_8B_A100, UNIT, DecodeProfile

PERIOD_S = 0.01
"""One decode iteration of the unit profile, which is one period of the paper."""
PER_PERIOD = 1.0 / PERIOD_S
LMSYS_HORIZON = 2048
"""Look-ahead in iterations: more than twice the longest answer of the LMSYS-like lengths."""


def unit_fleet(workers: int, batch_limit: int, kv_tokens: int) -> tuple[SimulatedWorker, ...]:
    """Equal decode-only workers with one period an iteration: the paper's model."""
    return tuple(
        SimulatedWorker(
            worker_id=f"w{number}",
            profile=UNIT,
            batch_limit=batch_limit,
            kv_capacity_tokens=kv_tokens,
            prefill=False,
        )
        for number in range(workers)
    )


def a100_fleet(
    workers: int,
    batch_limit: int,
    kv_tokens: int | None = None,
    profile: DecodeProfile = LLAMA_3_8B_A100,
) -> tuple[SimulatedWorker, ...]:
    """Equal workers with the iteration times of an A100, which compute prompts themselves."""
    return tuple(
        SimulatedWorker(
            worker_id=f"w{number}",
            profile=profile,
            batch_limit=batch_limit,
            kv_capacity_tokens=kv_tokens,
        )
        for number in range(workers)
    )


def with_pace_error(
    workers: tuple[SimulatedWorker, ...], error: float
) -> tuple[SimulatedWorker, ...]:
    """Tell the router at the start an iteration time this many times the true one."""
    lengths = build_workload(
        WorkloadSpec(
            trace=open_trace("lmsys-like"),
            rate_per_s=1.0,
            requests=1000,
            prediction=Prediction.NONE,
        )
    )
    return tuple(
        replace(worker, iteration_guess_s=error * full_batch_iteration_s(worker, lengths))
        for worker in workers
    )


def period_control(*, max_wait_periods: int = 4000) -> ControlConfig:
    """Router settings for unit fleets; every bound that is not named is the shipped one."""
    return ControlConfig(
        kernel=Kernel.DECODE_ONLY,
        horizon_iterations=LMSYS_HORIZON,
        max_wait_s=max_wait_periods * PERIOD_S,
        queue_max=100_000,
    )
