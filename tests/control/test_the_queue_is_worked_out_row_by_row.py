"""Compiled loops over who waits, what came and the fleet give what the formulas give."""

import math

import numpy as np
import pytest

from service.control import Weights
from service.control.columns import (
    Columns,
    Horizon,
    in_whole_blocks,
    kv_footprint,
    service_steps,
)
from service.control.config import Kernel
from service.control.kernels.arrivals import nth_most_work
from service.control.kernels.fleet import (
    free_beside,
    prompt_steps,
    startable_workers,
    weigh_waits,
)
from service.control.kernels.queue import settle, weigh
from service.control.reward import StartTimes, start_reward
from service.control.tiers import LOWEST_VALUE, tiers

N = 60


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize(("block", "q"), [(1, 16), (16, 16), (8, 16), (16, 7), (32, 16)])
def test_rows_whose_stamp_changed_are_those_of_the_columns(
    kernel: Kernel, block: int, q: int
) -> None:
    rng = np.random.default_rng(block * q)
    horizon, weights = Horizon(20, q), Weights(throughput=0.3, e2e=1.0, ttft=0.5, queries=2.0)
    decode = rng.integers(1, 500, N).astype(float)
    prompt = rng.integers(1, 900, N).astype(float)
    kv_max = np.where(rng.random(N) < 0.5, np.inf, rng.integers(600, 1500, N))
    value = rng.choice([0.0, 1e-30, 0.3, 1.0, 2.0, 3.999, 4.0], N)
    stamp = np.arange(N)
    kept_stamp = np.where(rng.random(N) < 0.5, stamp, -1)
    fresh, was = kept_stamp == stamp, rng.random((6, N))
    kept, worth = was.copy(), np.full(N, 99)

    made = settle(
        *(stamp, decode, prompt, kv_max, value, kernel is Kernel.MIXED),
        *(float(block), float(q), float(horizon.iterations)),
        *(weights.throughput, weights.e2e, weights.ttft, weights.queries, LOWEST_VALUE),
        *(kept_stamp, worth, kept),
    )

    columns = in_whole_blocks(
        Columns(
            worker=np.zeros(N, dtype=np.int64),
            start=np.zeros(N),
            steps=service_steps(kernel, decode),
            footprint=kv_footprint(kernel, prompt),
            sequences=np.ones(N),
        ),
        np.array([float(block)]),
        horizon,
    )
    times = StartTimes(
        waited=decode,
        decode_tokens=decode,
        left=float(horizon.iterations),
        e2e_bound=0.0,
        ttft_bound=0.0,
    )
    expected = [
        service_steps(kernel, decode),
        columns.steps,
        np.minimum(columns.footprint, kv_max - columns.steps),
        start_reward(weights, times),
        np.zeros(N),
        was[5],
    ]
    assert made == np.count_nonzero(~fresh)
    assert kept_stamp.tolist() == stamp.tolist()
    assert kept[:, fresh].tolist() == was[:, fresh].tolist()
    assert (worth[fresh] == 99).all()
    assert worth[~fresh].tolist() == tiers(value)[~fresh].tolist()
    for found, right in zip(kept, expected, strict=True):
        assert found[~fresh].tolist() == right[~fresh].tolist()


@pytest.mark.parametrize("shared", [False, True])
def test_rewards_are_weighed_by_value_and_newcomers_found(shared: bool) -> None:
    rng = np.random.default_rng(5)
    order, prompt = rng.permutation(N) + 100, rng.integers(1, 900, N).astype(float)
    value, discount, reward = (
        rng.uniform(0.1, 4.0, N),
        rng.uniform(0.1, 1.0, N),
        500 * rng.random(N),
    )
    weighted, new = np.empty(N), np.empty(N, dtype=np.int64)
    found = weigh(
        *(order, prompt, value, discount, reward, shared, 0.4, 1.25, 4096.0, 149, weighted, new)
    )
    assert new[:found].tolist() == [row for row in range(N) if order[row] > 149]
    for row in range(N):
        worth = value[row] * discount[row] if shared else value[row]
        left = reward[row] - 1.25 * (0.4 * prompt[row])
        assert weighted[row] == (left * worth if left >= 0 else left / worth) / 4096.0
    assert (weighted < 0).any()


@pytest.mark.parametrize("last", [0.0, 10.0, 1e9, math.inf])
def test_the_nth_most_work_is_found_wherever_it_is_looked_for_first(last: float) -> None:
    rng = np.random.default_rng(3)
    numbers = rng.integers(1, 500, (5, 300)).astype(float)
    for size in (1, 2, 20, 299):
        work = np.sort(numbers[1, :size] + 0.3 * numbers[4, :size])
        for nth in {1, 2, size // 2, size} - {0}:
            if nth <= size:
                assert nth_most_work(numbers, size, nth, 0.3, last) == work[-nth]


@pytest.mark.parametrize("workers", [1, 5, 8, 64, 131, 500])
def test_a_prompt_costs_the_busy_slots_of_a_mean_worker(workers: int) -> None:
    rng = np.random.default_rng(workers)
    held, limit = (
        rng.integers(0, 9, workers).astype(float),
        rng.integers(1, 9, workers).astype(float),
    )
    prompt_s, step_s = rng.uniform(0.0, 0.01, workers), rng.uniform(0.001, 1.0, workers)
    steps = np.minimum(1.0 + held, limit) * prompt_s / step_s
    # To the last bit: a decision may hang on it.
    assert prompt_steps(held, limit, prompt_s, step_s) == np.add.reduce(steps) / workers


@pytest.mark.parametrize("workers", [1, 5, 8, 64, 131, 500])
def test_waits_for_prompts_weigh_what_the_formula_says(workers: int) -> None:
    rng = np.random.default_rng(workers)
    prompt_s = np.where(rng.random(workers) < 0.7, rng.uniform(0.0, 0.01, workers), 0.0)
    prompt_s[0] = 0.003
    step_s, ahead = rng.uniform(0.001, 1.0, workers), rng.uniform(0.0, 900.0, workers)
    held = rng.integers(0, 9, workers).astype(float)
    asked = np.flatnonzero(rng.random(workers) < 0.5)
    lines = np.empty((3, asked.size))
    known = weigh_waits(prompt_s, step_s, ahead, held, asked, 1.5, 0.7, 4096.0, lines)
    pace = np.maximum(prompt_s[asked], prompt_s[prompt_s > 0].mean()) / (step_s.mean() * 4096.0)
    # To the last bit: a decision may hang on it.
    assert known == np.count_nonzero(prompt_s)
    assert lines.tolist() == np.array([pace, 1.5 + 0.7 * held[asked], 1.5 * ahead[asked]]).tolist()


def test_what_is_free_is_what_neither_we_nor_others_hold() -> None:
    rng = np.random.default_rng(2)
    held, other = rng.integers(0, 90, (2, 6, 8)).astype(float), rng.integers(0, 9, (2, 6))
    slots, tokens = rng.integers(50, 99, 6).astype(float), np.full(6, math.inf)
    tokens[:4] = rng.uniform(50, 99, 4)
    asked = np.array([4, 0, 3])
    batch, kv = np.empty((2, 3, 8))
    free_beside(asked, *held, *other.astype(float), slots, tokens, batch, kv)
    assert batch.tolist() == (slots[:, None] - (held[0] + other[0][:, None]))[asked].tolist()
    assert kv.tolist() == (tokens[:, None] - (held[1] + other[1][:, None]))[asked].tolist()


def test_workers_with_a_slot_that_somebody_wants_and_no_queue_are_startable() -> None:
    rng = np.random.default_rng(1)
    held, limit = rng.integers(0, 4, N).astype(float), rng.integers(1, 4, N).astype(float)
    lead = np.where(rng.random(N) < 0.2, 16.0, 0.0)
    wanted, empty = rng.random(N) < 0.8, rng.random(N) < 0.8
    found = np.empty(N, dtype=np.int64)
    count = startable_workers(held, limit, lead, wanted, empty, found)
    right = ((limit - held >= 1) | (lead > 0)) & wanted & empty
    assert found[:count].tolist() == np.flatnonzero(right).tolist()
    assert 0 < count < N
