"""The compiled calendar beside loops over requests: late, unseen, prefilled ones among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from service.control import Kernel
from service.control.columns import Horizon, Usage
from service.control.lengths import LengthPredictor
from service.control.occupancy import Frame, Occupancy
from service.control.started import NUMBERS, TIMES, Started
from tests.control.driving import ask

WORKERS, REQUESTS, NOW_S, NOBODY = 5, 60, 100.0, np.zeros(5)


@dataclass(frozen=True)
class Case:
    """Started requests under a frame; `held` is theirs by name, as in the ledger."""

    started: Started
    predictor: LengthPredictor

    def rows(self, workers: np.ndarray) -> Usage:
        """What the kernel says of some workers."""
        occupancy = Occupancy()
        occupancy.enter(self.started.frame)
        occupancy.make(workers, self.started)
        return occupancy.plus(workers, NOBODY, NOBODY)

    def row_by_loops(self, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """What each bucket must offer to this worker's requests: batch slots, KV tokens."""
        horizon, block = self.started.frame.horizon, self.started.frame.block_tokens[worker]
        q = horizon.bucket_iterations
        batch, kv = np.zeros((2, horizon.buckets))
        for row in np.flatnonzero(self.started.held["worker"] == worker):
            begin, end, footprint = self.column(int(row))
            sequences = self.started.held["sequences"][row]
            for bucket in range(horizon.buckets):
                left, right = bucket * q, (bucket + 1) * q
                whole = block > 1 and q % block == 0
                if left >= end or right <= 0:
                    continue
                tokens = footprint + (right if whole else min(right, end)) - begin
                tokens = -(-tokens // block) * block if whole else tokens + block - 1
                batch[bucket] += sequences
                kv[bucket] += sequences * tokens
        return batch, kv

    def column(self, row: int) -> tuple[float, float, float]:
        """Begin and end of a request on the look-ahead, and its footprint."""
        frame, one = self.started.frame, {k: v[row] for k, v in self.started.held.items()}
        prefill = 1.0 if frame.kernel is Kernel.MIXED else 0.0
        pace_s, seen = self.started.iteration_s[one["worker"]], one["produced"]
        if self.started.blind and not one["streams"] and not one["ready_s"]:
            seen = min(max((NOW_S - one["started_s"]) // pace_s, 0), one["limit"] - 1)
        total = one["forecast"]
        if seen >= total:
            asked = (np.array([one[name]]) for name in ("pool", "scale"))
            total = seen + self.predictor.remaining(*asked, np.array([float(seen)]))[0]
        total = max(min(total, one["limit"]), seen + 1)
        lead = frame.lead[one["worker"]]
        if self.started.blind and one["ready_s"] > NOW_S:
            lead = lead - (one["ready_s"] - NOW_S) / pace_s
        begin = min(frame.offset - seen - prefill - lead, frame.offset)
        later = max(0.0, frame.offset - seen - prefill - lead - frame.offset)
        return begin, begin + total + prefill + later, one["prompt_tokens"] - prefill


def case(seed: int, kernel: Kernel, blocks: list[float], quantile: float) -> Case:
    """Draw started requests; a third outlived their forecast."""
    rng = np.random.default_rng(seed)
    predictor = LengthPredictor(256, quantile)
    for tokens in rng.integers(1, 200, 300).tolist():
        hint = int(rng.integers(1, 200)) if rng.random() < 0.5 else None
        event = ask("r", 0.0, group=f"g{tokens % 3}", decode_tokens_hint=hint)
        predictor.observe(event.request, tokens)
    forecast = rng.integers(1, 150, REQUESTS).astype(float)
    held = {
        "worker": rng.integers(-1, WORKERS, REQUESTS),
        "pool": rng.integers(0, 6, REQUESTS),
        "prompt_tokens": rng.integers(0, 300, REQUESTS).astype(float),
        "produced": np.floor(forecast * rng.uniform(0, 1.5, REQUESTS)),
        "forecast": forecast,
        "limit": forecast + rng.integers(1, 500, REQUESTS),
        "scale": np.where(rng.random(REQUESTS) < 0.5, 1.0, forecast),
        "sequences": rng.integers(1, 4, REQUESTS).astype(float),
        "streams": rng.random(REQUESTS) < 0.7,
        "ready_s": np.where(rng.random(REQUESTS) < 0.3, NOW_S + rng.integers(-2, 4), 0.0),
        "started_s": NOW_S - rng.integers(0, 40, REQUESTS),
    }
    held["pool"][held["scale"] > 1] = 1
    blind = bool(seed % 2)
    frame = Frame(
        horizon=Horizon(20, 8),
        offset=float(rng.integers(0, 8)),
        block_tokens=np.array(blocks),
        lead=np.array([0.0, 0.0, 8.0, 16.0, 0.0]) if seed % 3 == 0 else np.zeros(WORKERS),
        kernel=kernel,
    )
    names = (*NUMBERS, *TIMES) if blind else NUMBERS
    started = Started(
        held={name: held[name] for name in names},
        blind=blind,
        iteration_s=np.array([0.5, 0.25, 1.0, 2.0, 0.5]),
        now_s=NOW_S,
        frame=frame,
        survival=predictor.survival(),
    )
    return Case(started, predictor)


@pytest.mark.parametrize("blocks", [[1.0] * 5, [8.0] * 5, [1.0, 2.0, 4.0, 8.0, 16.0]])
@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("quantile", [0.0, 0.75])
def test_what_is_held_is_the_sum_over_requests_and_iterations(
    seed: int, kernel: Kernel, blocks: list[float], quantile: float
) -> None:
    drawn = case(seed, kernel, blocks, quantile)
    rows = drawn.rows(np.arange(WORKERS))
    for worker in range(WORKERS):
        batch, kv = drawn.row_by_loops(worker)
        np.testing.assert_allclose(rows.batch[worker], batch, atol=1e-9)
        np.testing.assert_allclose(rows.kv[worker], kv, rtol=1e-12, atol=1e-9)


def test_a_few_workers_get_the_rows_that_all_get_in_the_order_they_are_asked_for() -> None:
    drawn = case(1, Kernel.MIXED, [1.0, 2.0, 4.0, 8.0, 16.0], 0.0)
    few = np.array([3, 0])
    some, every = drawn.rows(few), drawn.rows(np.arange(WORKERS))
    assert np.array_equal(some.batch, every.batch[few])
    assert np.array_equal(some.kv, every.kv[few])
    assert some.kv.any()
