"""What no policy can beat: a linear program that knows every arrival and every length.

Two relaxations make it small, and each only enlarges what is possible, so the optimum bounds every
policy that serves all requests:
- the workers are pooled into one of sum(B) slots and sum(M) tokens;
- starts are grouped into buckets of q iterations. A start somewhere in a bucket is charged, for
  every span of GROUPS buckets, the least that any start in that bucket would use there (the use is
  unimodal in the start, so the least is at an end of the bucket), and its delay counts from the
  start of the bucket. A start later than START_BUCKETS after the arrival uses nothing.
Requests may be split. Only for decode-only workers whose iterations all take the same time.

    min sum_jb x_jb delay_jb   or   max sum_jb x_jb [delay_jb <= bound]
    s.t. sum_b x_jb = 1 (all j),  sum_jb x_jb use_jbc <= capacity_c (all groups c, slots and KV).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from loadgen.experiments.rules import BUCKET_ITERATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from loadgen.simulation_config import SimulatedWorker
    from loadgen.trace_record import TraceRequest

    FloatArray = npt.NDArray[np.float64]
    IntArray = npt.NDArray[np.int64]

START_BUCKETS = 100
GROUPS = (4, 32)
"""Buckets in one constraint: short spans see peaks, in long ones the least use is sharper."""


@dataclass(frozen=True, slots=True, eq=False)
class Starts:
    """Every (request, start bucket) pair, one an entry; times in iterations.

    Attributes:
        request: index of the request.
        low, high: earliest and latest start in the bucket; equal to inf for "later than all".
        delay: least time to first token.
    """

    request: IntArray
    low: FloatArray
    high: FloatArray
    delay: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The linear program without its objective; times in iterations.

    Attributes:
        starts: its variables.
        arrival, decode, ttft_bound: (n,) of every request.
        matrix, limits: use of slots and KV memory.
        once: (n, variables) every request starts once.
        iteration_s: what turns iterations into seconds.
    """

    starts: Starts
    arrival: FloatArray
    decode: FloatArray
    ttft_bound: FloatArray
    matrix: sparse.csr_array
    limits: FloatArray
    once: sparse.csr_array
    iteration_s: float

    def ttft_mean_s(self) -> float:
        """Least mean time to first token."""
        return self._optimum(self.starts.delay) / self.arrival.size * self.iteration_s

    def share_within(self) -> float:
        """Largest share of requests within their bounds on time to first token."""
        in_time = self.starts.delay <= self.ttft_bound[self.starts.request] + 1e-9
        return -self._optimum(-in_time.astype(float)) / self.arrival.size

    def reward_s(self) -> float:
        """Largest mean reward of [OLP] 3.1 for weights (0, 1, 1, 0, 0, 0), in seconds.

        A request earns the time from its first token to T and that from its end to T, neither
        below zero; T is the last arrival.
        """
        last = float(self.arrival.max())
        first_token = self.arrival[self.starts.request] + self.starts.delay
        end = first_token + self.decode[self.starts.request] - 1.0
        earned = np.maximum(last - first_token, 0.0) + np.maximum(last - end, 0.0)
        return -self._optimum(-earned) / self.arrival.size * self.iteration_s

    def _optimum(self, cost: FloatArray) -> float:
        # The stubs know dense matrices alone; scipy takes sparse ones.
        found = linprog(  # type: ignore[call-overload]
            cost,
            A_ub=self.matrix,
            b_ub=self.limits,
            A_eq=self.once,
            b_eq=np.ones(self.once.shape[0]),
            bounds=(0.0, None),
            method="highs-ds",
        )
        if not found.success:
            raise RuntimeError(f"the hindsight bound was not found: {found.message}")
        return float(found.fun)


def hindsight_bounds(
    requests: Sequence[TraceRequest], workers: Sequence[SimulatedWorker], bound_s: float
) -> dict[str, float]:
    """Bound mean TTFT and mean end-to-end time from below, and the share within a bound from above.

    Args:
        requests: all of them, as they will arrive.
        workers: decode-only, with one constant iteration time.
        bound_s: on time to first token, where a request brings none.

    Raises:
        ValueError: for workers to which the relaxation does not apply.
        RuntimeError: when the solver gives up.
    """
    program = relax(requests, workers, bound_s)
    delay_s = program.ttft_mean_s()
    return {
        "ttft_mean_s": delay_s,
        "e2e_mean_s": delay_s + float((program.decode - 1).mean()) * program.iteration_s,
        "share_within": program.share_within(),
    }


def relax(
    requests: Sequence[TraceRequest],
    workers: Sequence[SimulatedWorker],
    bound_s: float,
    bucket_iterations: int = BUCKET_ITERATIONS,
) -> Relaxation:
    """Set the linear program up.

    Raises:
        ValueError: for workers to which the relaxation does not apply.
    """
    iteration_s = constant_iteration_s(workers)
    arrival = np.array([request.arrival_s for request in requests]) / iteration_s
    decode = np.array([request.decode_tokens for request in requests], dtype=float)
    prompt = np.array([request.prompt_tokens for request in requests], dtype=float)
    bounds = np.array([request.ttft_bound_s or bound_s for request in requests]) / iteration_s
    starts = possible_starts(arrival, bucket_iterations)
    capacity = (
        float(sum(worker.batch_limit for worker in workers)),
        float(sum(worker.machine().kv_capacity_tokens for worker in workers)),
    )
    matrix, limits = constraints(starts, prompt, decode, capacity, bucket_iterations)
    once = sparse.csr_array(
        (np.ones(starts.request.size), (starts.request, np.arange(starts.request.size))),
        shape=(len(requests), starts.request.size),
    )
    return Relaxation(starts, arrival, decode, bounds, matrix, limits, once, iteration_s)


def possible_starts(arrival: FloatArray, bucket_iterations: int = BUCKET_ITERATIONS) -> Starts:
    """List the start buckets of every request, its arrival's bucket first, "later" last."""
    n, q = arrival.size, bucket_iterations
    bucket = np.floor(arrival / q)[:, None] + np.arange(START_BUCKETS + 1)
    low = np.maximum(bucket * q, arrival[:, None])
    delay = low - arrival[:, None] + 1.0
    low[:, -1] = np.inf
    return Starts(
        request=np.repeat(np.arange(n), START_BUCKETS + 1),
        low=low.ravel(),
        high=np.where(np.isinf(low), np.inf, (bucket + 1) * q).ravel(),
        delay=delay.ravel(),
    )


def constraints(
    starts: Starts,
    prompt: FloatArray,
    decode: FloatArray,
    capacity: tuple[float, float],
    bucket_iterations: int = BUCKET_ITERATIONS,
) -> tuple[sparse.csr_array, FloatArray]:
    """Rows "least use of slots (of KV) in a span <= what the pooled fleet has there"."""
    slots, kv_tokens = capacity
    real = np.flatnonzero(np.isfinite(starts.low))
    request = starts.request[real]
    low, high = starts.low[real], starts.high[real]
    steps, footprint = decode[request], prompt[request]
    blocks, limits = [], []
    for group in GROUPS:
        width = group * bucket_iterations
        spans = int((high + steps).max() // width) + 1
        parts = _span_uses(low, high, steps, footprint, width)
        for values, size in zip(parts[2:], (slots, kv_tokens), strict=True):
            shape = (spans, starts.request.size)
            blocks.append(sparse.csr_array((values, (parts[0], real[parts[1]])), shape=shape))
            limits.append(np.full(spans, size * width))
    return sparse.csr_array(sparse.vstack(blocks)), np.concatenate(limits)


def _span_uses(
    low: FloatArray, high: FloatArray, steps: FloatArray, footprint: FloatArray, width: int
) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
    """(span, entry, least slot-iterations, least token-iterations), one a pair that may meet."""
    first = np.floor(low / width).astype(np.int64)
    count = np.floor((high + steps) / width).astype(np.int64) - first + 1
    entry = np.repeat(np.arange(low.size), count)
    within = np.arange(entry.size) - np.repeat(np.cumsum(count) - count, count)
    span = first[entry] + within
    left, right = span * float(width), (span + 1) * float(width)
    uses = [
        _use(start[entry], steps[entry], footprint[entry], left, right) for start in (low, high)
    ]
    batch = np.minimum(uses[0][0], uses[1][0])
    kv = np.minimum(uses[0][1], uses[1][1])
    held = batch > 0
    return span[held], entry[held], batch[held], kv[held]


def _use(
    start: FloatArray, steps: FloatArray, footprint: FloatArray, left: FloatArray, right: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Slot-iterations and at least the token-iterations of [start, start + steps) in [left, right).

    At t a request holds s + 1 + floor(t - start) tokens ([OLP] eq. (1)); s + t - start is less.
    """
    begin = np.maximum(start, left)
    end = np.maximum(np.minimum(start + steps, right), begin)
    batch = end - begin
    return batch, batch * (footprint + (begin + end) / 2.0 - start)


def constant_iteration_s(workers: Sequence[SimulatedWorker]) -> float:
    """The one iteration time of all workers.

    Raises:
        ValueError: when they have none.
    """
    times = set()
    for worker in workers:
        profile = worker.profile
        if worker.prefill or profile.per_request_ms or profile.per_kv_token_ms:
            raise ValueError("the hindsight bound needs decode-only workers of constant pace")
        times.add(worker.iteration_factor * profile.iteration_s(1, 0, 0))
    if len(times) != 1:
        raise ValueError("the hindsight bound needs workers of one pace")
    return times.pop()
