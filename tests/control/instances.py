"""Random instances for Hypothesis, each in two forms: the controller's arrays and plain loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from service.control.columns import Columns, Horizon, Usage, kv_footprint, service_steps
from service.control.config import Kernel
from service.control.prices import PriceProblem
from tests.control.naive_olp import FREE, Column, NaiveRequest, Tensor, bucketed, clipped, column

KERNELS = st.sampled_from(list(Kernel))
EIGHTHS = st.integers(0, 40).map(lambda n: n / 8)
"""Prices and rewards whose sums are exact in floating point, so that equal means equal."""


def eighths(size: int) -> st.SearchStrategy[np.ndarray]:
    """Many such numbers at once, half of them zero (drawing them one by one is slow)."""
    return st.binary(min_size=size, max_size=size).map(
        lambda drawn: np.maximum(np.frombuffer(drawn, dtype=np.uint8).astype(float) - 127, 0) / 8
    )


@dataclass(frozen=True)
class Placed:
    """A request, where it starts and on which worker."""

    request: NaiveRequest
    start: int
    worker: int


def columns_of(kernel: Kernel, placed: list[Placed]) -> Columns:
    """The controller's form of some columns."""

    def floats(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    requests = [p.request for p in placed]
    return Columns(
        worker=np.array([p.worker for p in placed], dtype=np.int64),
        start=floats([p.start for p in placed]),
        steps=service_steps(kernel, floats([r.length for r in requests])),
        footprint=kv_footprint(kernel, floats([r.prompt for r in requests])),
        sequences=floats([r.sequences for r in requests]),
    )


def naive_column(kernel: Kernel, placed: Placed, horizon: Horizon) -> Column:
    """The loops' form of one column, on the buckets of a look-ahead."""
    uses = column(kernel is Kernel.MIXED, placed.request, placed.start)
    return bucketed(clipped(uses, range(horizon.iterations)), horizon.bucket_iterations)


def tensor_of(usage: Usage) -> Tensor:
    """(g, N) arrays as a dict from (worker, bucket)."""
    return {
        (int(g), int(s)): (float(usage.batch[g, s]), float(usage.kv[g, s]))
        for g, s in np.ndindex(usage.batch.shape)
    }


def usage_of(tensor: Tensor, workers: int, horizon: Horizon) -> Usage:
    """A dict from (worker, bucket) as (g, N) arrays."""
    usage = Usage.zeros(workers, horizon)
    for (g, s), (batch, kv) in tensor.items():
        usage.batch[g, s], usage.kv[g, s] = batch, kv
    return usage


def sum_of(columns: list[tuple[int, Column]], workers: int, horizon: Horizon) -> Usage:
    """Add columns up, slot by slot."""
    total: Tensor = {}
    for worker, uses in columns:
        for slot, (batch, kv) in uses.items():
            old_batch, old_kv = total.get((worker, slot), FREE)
            total[worker, slot] = (old_batch + batch, old_kv + kv)
    return usage_of(total, workers, horizon)


def scaled(uses: Column, kv_scale: float) -> Column:
    """A column with m~ = mem_scale x m in place of m ([OLP] B.2)."""
    return {slot: (batch, kv * kv_scale) for slot, (batch, kv) in uses.items()}


@st.composite
def horizons(draw: st.DrawFn) -> Horizon:
    """Few short buckets, single ones and the paper's slots included."""
    return Horizon(draw(st.integers(1, 7)), draw(st.sampled_from((1, 1, 2, 3, 5))))


@st.composite
def placements(
    draw: st.DrawFn,
    horizon: Horizon,
    workers: int,
    first: int | None = None,
    last: int | None = None,
    most: int = 8,
) -> list[Placed]:
    """Requests on workers; by default some began in the past and some begin beyond the end.

    Drawn as bytes, five a request, because drawing number by number is slow.
    """
    low = -horizon.iterations - 2 if first is None else first
    high = horizon.iterations + 2 if last is None else last
    drawn = draw(st.binary(max_size=5 * most))
    rows = [drawn[at : at + 5] for at in range(0, len(drawn) - 4, 5)]
    return [
        Placed(
            NaiveRequest(
                name=f"r{row}",
                arrival=0,
                prompt=prompt % 10,
                length=1 + length % (2 * horizon.iterations + 1),
                sequences=(1, 1, 1, 2, 3)[sequences % 5],
            ),
            start=low + start % (high - low + 1),
            worker=worker % workers,
        )
        for row, (prompt, length, sequences, start, worker) in enumerate(rows)
    ]


@st.composite
def usages(draw: st.DrawFn, workers: int, horizon: Horizon) -> Usage:
    """(g, N) prices of eighths, half of them zero."""
    batch, kv = draw(eighths(2 * workers * horizon.buckets)).reshape(2, workers, horizon.buckets)
    return Usage(batch=batch, kv=kv)


@dataclass(frozen=True)
class PriceInstance:
    """f_k(p) and Algorithm 2's settings, and the placements behind the recorded columns."""

    problem: PriceProblem
    placed: list[Placed]
    kernel: Kernel

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.problem.worker_ids)

    def choices(self) -> list[list[tuple[float, int, Column]]]:
        """The recorded pairs (r*, a*), each with the workers it may use."""
        problem = self.problem
        result = []
        for row, one in enumerate(self.placed):
            uses = scaled(naive_column(self.kernel, one, problem.horizon), problem.kv_scale)
            workers = range(self.workers) if problem.any_worker else [one.worker]
            result.append([(float(problem.rewards[row]), g, uses) for g in workers])
        return result

    def history(self) -> list[tuple[float, int, Column]]:
        """The recorded pairs on the worker they were recorded on."""
        return [options[0] for options in self.choices()]


@st.composite
def price_instances(
    draw: st.DrawFn, any_worker: bool = False, workers_least: int = 1
) -> PriceInstance:
    """Histories of up to a dozen columns; the mini-batch is never smaller than the history."""
    horizon = draw(horizons())
    workers = draw(st.integers(workers_least, 3))
    kernel = draw(KERNELS)
    placed = draw(placements(horizon, workers, most=12))
    problem = PriceProblem(
        horizon=horizon,
        scarcity=draw(usages(workers, horizon)),
        columns=columns_of(kernel, placed),
        rewards=draw(eighths(len(placed))),
        warm=draw(usages(workers, horizon)),
        any_worker=any_worker,
        steps=draw(st.integers(1, 4)),
        batch=max(1, len(placed)),
        step_size=draw(st.sampled_from((0.0625, 0.25, 1.0))),
        averaged=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        origin=0,
        worker_ids=tuple(f"w{g}" for g in range(workers)),
        normalizer=2.0,
        kv_scale=draw(st.sampled_from((0.125, 0.015625))),
    )
    return PriceInstance(problem, placed, kernel)


@dataclass(frozen=True)
class StartInstance:
    """One tick's admission: who waits, what is free, and a margin for every pair."""

    horizon: Horizon
    kernel: Kernel
    placed: list[Placed]
    margin: np.ndarray
    order: np.ndarray
    free: Usage

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.free.batch.shape[0]

    def columns(self) -> Columns:
        """The controller's form of the waiting requests."""
        return columns_of(self.kernel, self.placed)

    def naive_columns(self) -> list[Column]:
        """The loops' form of the waiting requests."""
        return [naive_column(self.kernel, one, self.horizon) for one in self.placed]


@st.composite
def start_instances(draw: st.DrawFn) -> StartInstance:
    """Up to eight requests that start in one slot of the first bucket, on up to three workers.

    What is free rises and falls over the buckets, may be negative where the ledger was too
    hopeful, and is unlimited in KV on some workers. Every third margin says "not allowed".
    """
    horizon, kernel, workers = draw(horizons()), draw(KERNELS), draw(st.integers(1, 3))
    start = draw(st.integers(0, horizon.bucket_iterations - 1))
    placed = draw(placements(horizon, workers, first=start, last=start))
    cells = workers * horizon.buckets
    batch, kv = draw(st.binary(min_size=2 * cells, max_size=2 * cells)), []
    for g in range(workers):
        unlimited = draw(st.integers(0, 4)) == 0
        row = batch[cells + g * horizon.buckets : cells + (g + 1) * horizon.buckets]
        kv.append([np.inf if unlimited else float(b % 80 - 4) for b in row])
    margin = draw(st.binary(min_size=len(placed) * workers, max_size=len(placed) * workers))
    values = [-np.inf if b % 3 == 0 else (b % 24 - 6) / 8 for b in margin]
    return StartInstance(
        horizon,
        kernel,
        placed,
        margin=np.array(values, dtype=float).reshape(len(placed), workers),
        order=np.array(draw(st.permutations(range(len(placed)))), dtype=np.int64),
        free=Usage(
            batch=np.array([b % 8 - 1 for b in batch[:cells]], dtype=float).reshape(
                workers, horizon.buckets
            ),
            kv=np.array(kv, dtype=float),
        ),
    )
