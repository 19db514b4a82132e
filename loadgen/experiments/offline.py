"""The best schedule of a small instance, all arrivals and lengths known: an integer program.

x_jt = 1 when request j starts in iteration t. Nothing is split and nothing is preempted, so what
lies between this and the hindsight bound of hindsight_lp.py is the bound's own slack.

    min sum_jt x_jt (t - arrival_j + 1)
    s.t. sum_t x_jt = 1 (all j),  sum_{j, t <= i < t + o_j} x_jt <= slots (all iterations i).

Slots alone are counted: KV memory must be ample, and then it makes no difference which worker a
slot belongs to. Arrivals must be whole iterations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from loadgen.experiments.hindsight_lp import constant_iteration_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from loadgen.simulation_config import SimulatedWorker
    from loadgen.trace_record import TraceRequest

REQUESTS_MAX = 200
WINDOW_ITERATIONS = 150
"""No request starts later than this after its arrival; a schedule that wants to is refused."""
TIME_LIMIT_S = 120.0
GAP = 1e-3
"""Relative gap at which the solver may stop; the proven lower end is reported too."""
ALIGNED = 1e-6


def best_schedule(
    requests: Sequence[TraceRequest], workers: Sequence[SimulatedWorker]
) -> dict[str, float]:
    """Find the schedule of least mean time to first token.

    Returns:
        ttft_mean_s of the schedule, and ttft_mean_proven_s that no schedule goes below.

    Raises:
        ValueError: for too many requests, arrivals that are no whole iterations, KV memory that
            could bind, or workers without one constant pace.
        RuntimeError: when no schedule is found in time.
    """
    iteration_s = constant_iteration_s(workers)
    arrival = np.array([request.arrival_s for request in requests]) / iteration_s
    start = np.rint(arrival).astype(np.int64)
    decode = np.array([request.decode_tokens for request in requests], dtype=np.int64)
    _check(requests, workers, float(np.abs(arrival - start).max()))
    slots = sum(worker.batch_limit for worker in workers)
    request = np.repeat(np.arange(start.size), WINDOW_ITERATIONS)
    delay = np.tile(np.arange(WINDOW_ITERATIONS), start.size)
    rows = _occupied(start[request] + delay, decode[request])
    once = sparse.csr_array(
        (np.ones(request.size), (request, np.arange(request.size))),
        shape=(start.size, request.size),
    )
    found = milp(
        delay + 1.0,
        integrality=np.ones(request.size, dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(rows, 0, slots)],
        options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
    )
    if not found.success:
        raise RuntimeError(f"the best offline schedule was not found: {found.message}")
    scale = iteration_s / start.size
    return {
        "ttft_mean_s": float(found.fun) * scale,
        "ttft_mean_proven_s": float(found.mip_dual_bound) * scale,
    }


def _check(
    requests: Sequence[TraceRequest], workers: Sequence[SimulatedWorker], misaligned: float
) -> None:
    if len(requests) > REQUESTS_MAX:
        raise ValueError(f"the offline schedule takes at most {REQUESTS_MAX} requests")
    if misaligned > ALIGNED:
        raise ValueError("the offline schedule needs arrivals at whole iterations")
    largest = max(r.prompt_tokens + r.decode_tokens + 1 for r in requests)
    for worker in workers:
        blocks = -(-largest // worker.block_tokens) * worker.block_tokens
        if worker.batch_limit * blocks > worker.machine().kv_capacity_tokens:
            raise ValueError("the offline schedule needs KV memory for any full batch")


def _occupied(start: npt.NDArray[np.int64], decode: npt.NDArray[np.int64]) -> sparse.csr_array:
    """(iterations, variables): which iterations each start would occupy."""
    variable = np.repeat(np.arange(start.size), decode)
    within = np.arange(variable.size) - np.repeat(np.cumsum(decode) - decode, decode)
    iteration = start[variable] + within
    return sparse.csr_array((np.ones(variable.size), (iteration, variable)))
