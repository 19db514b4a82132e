"""What one more worker would add, told from the prices, is what HiGHS says it would add."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog

from service.control.events import Role, WorkerState
from service.control.replica_worth import CLASSES_MAX, OTHER, replica_worths
from service.control.stats import WorkerStats

BUCKETS = 5
BUCKET_ITERATIONS = 4
ITERATIONS = BUCKETS * BUCKET_ITERATIONS
SLOTS, KV_TOKENS = 3.0, 60.0
LITTLE = 1e-4


def worker(name: str = "a", **fields: object) -> WorkerStats:
    known = WorkerStats(
        worker_id=name,
        state=WorkerState.UP,
        batch_limit=int(SLOTS),
        active=0,
        foreign=0,
        kv_tokens=0,
        kv_capacity_tokens=int(KV_TOKENS),
        iteration_s=0.05,
        token_s=0.05,
        startable=True,
        price_batch=0.0,
        price_kv=0.0,
    )
    return replace(known, **fields)  # type: ignore[arg-type]


class Starts:
    """The LP (4)-(5) of random requests that any worker may take, over a few buckets."""

    def __init__(self, seed: int, requests: int = 24) -> None:
        rng = np.random.default_rng(seed)
        steps = rng.integers(1, BUCKETS + 1, requests)
        prompt = rng.uniform(2.0, 25.0, requests)
        self.rewards = rng.uniform(0.1, 1.0, requests)
        bucket = np.arange(BUCKETS)
        runs = bucket[None, :] < steps[:, None]
        kv = np.where(runs, prompt[:, None] + BUCKET_ITERATIONS * (bucket + 0.5)[None, :], 0.0)
        # Whole slots would make the optimum degenerate, with several duals.
        slots = runs * rng.uniform(0.6, 1.4, requests)[:, None]
        self.columns = np.hstack([slots, kv])

    def solve(self, workers: list[float]) -> tuple[float, NDArray[np.float64]]:
        """Optimum and (workers, 2 x buckets) duals, each worker of so many parts of a whole one."""
        n = self.rewards.size
        capacity = np.repeat([SLOTS, KV_TOKENS], BUCKETS)
        fits = np.kron(np.eye(len(workers)), self.columns.T)
        once = np.hstack([np.eye(n)] * len(workers))
        limits = np.concatenate([*(part * capacity for part in workers), np.ones(n)])
        result = linprog(
            -np.tile(self.rewards, len(workers)),
            A_ub=np.vstack([fits, once]),
            b_ub=limits,
            bounds=(0, None),
            method="highs",
        )
        duals = -result.ineqlin.marginals[: len(workers) * 2 * BUCKETS]
        return -float(result.fun), duals.reshape(len(workers), 2 * BUCKETS)

    def seen(self, duals: NDArray[np.float64]) -> list[WorkerStats]:
        """The workers with these prices, each the mean over buckets for one iteration."""
        return [
            worker(
                f"w{g}",
                price_batch=float(row[:BUCKETS].mean()) / BUCKET_ITERATIONS,
                price_kv=float(row[BUCKETS:].mean()) / BUCKET_ITERATIONS,
            )
            for g, row in enumerate(duals)
        ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_it_is_the_derivative_of_the_optimum_and_bounds_what_a_whole_worker_adds(
    seed: int, workers: int
) -> None:
    starts = Starts(seed)
    optimum, duals = starts.solve([1.0] * workers)
    (worth,) = replica_worths(starts.seen(duals))
    over_the_look_ahead = worth.per_iteration * ITERATIONS
    a_little, _ = starts.solve([1.0] * workers + [LITTLE])
    assert (a_little - optimum) / LITTLE == pytest.approx(over_the_look_ahead, rel=1e-3, abs=1e-3)
    one_more, _ = starts.solve([1.0] * (workers + 1))
    assert one_more - optimum <= over_the_look_ahead + 1e-6


def test_where_nothing_is_scarce_one_more_worker_is_worth_nothing() -> None:
    starts = Starts(0, requests=2)
    _, duals = starts.solve([1.0, 1.0])
    (worth,) = replica_worths(starts.seen(duals))
    assert worth.per_iteration == pytest.approx(0.0, abs=1e-9)


def test_within_a_class_the_least_value_counts_and_classes_stay_apart() -> None:
    worths = replica_worths(
        [
            worker("dear", price_batch=2.0, kv_capacity_tokens=430_128),
            worker("cheap", price_batch=1.0, kv_capacity_tokens=429_904),
            worker("decode", price_batch=5.0, role=Role.DECODE, kv_capacity_tokens=430_000),
            worker("down", state=WorkerState.DOWN),
        ]
    )
    told = {worth.worker_class: worth.per_iteration for worth in worths}
    assert told == {"both-3-430000": 3.0, "decode-3-430000": 15.0}


def test_an_unknown_kv_capacity_counts_slots_alone_and_the_pace_makes_seconds() -> None:
    (worth,) = replica_worths([worker(price_batch=1.0, price_kv=0.0, kv_capacity_tokens=None)])
    assert worth.worker_class == "both-3-unknown"
    assert (worth.per_iteration, worth.per_s) == (3.0, pytest.approx(60.0))


def test_classes_are_bounded() -> None:
    worths = replica_worths([worker(f"w{n}", batch_limit=n + 1) for n in range(100)])
    assert len(worths) == CLASSES_MAX + 1
    assert worths[-1].worker_class == OTHER
