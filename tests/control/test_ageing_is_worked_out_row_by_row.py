"""Compiled loops of the age bound give what array formulas give, to the last bit."""

import numpy as np
import pytest

from service.control.kernels.fleet import sum_over, work_and_pace
from service.control.kernels.queue import extent, find_aged
from service.control.tiers import levels

N = 80


@pytest.mark.parametrize("lowest", [-9, 0, 1, 5])
@pytest.mark.parametrize("workers", [1, 3, 30, 200, 1024])
def test_work_of_the_tiers_that_count_meets_what_the_wanted_workers_can_do(
    lowest: int, workers: int
) -> None:
    rng = np.random.default_rng(workers)
    sequences, tier = rng.integers(1, 5, N).astype(float), rng.integers(-2, 3, N)
    prompt, decode = rng.integers(1, 9000, (2, N)).astype(float)
    limit = rng.integers(1, 256, workers).astype(float)
    capacity = np.where(rng.random(workers) < 0.2, np.inf, rng.integers(100, 99999, workers))
    step_s, prompt_s = rng.uniform(0.001, 0.1, workers), rng.uniform(0.0, 0.01, workers)
    wanted = rng.random(workers) < 0.7
    wanted[0] = True
    requests, fleet = (sequences, decode + 1.0, prompt, decode), (limit, capacity, step_s, prompt_s)
    here = tier >= lowest
    work = (sequences * (decode + 1.0))[here]
    found = work_and_pace(*requests, tier, lowest, True, 0.5, *fleet, wanted)
    if not here.any():
        assert found == (0.0, 0.0, 0.0, 0.0, 0.0)
        return
    mean_kv = (work * (prompt + decode / 2.0)[here]).sum() / work.sum()
    unused = 0.5 * (mean_kv + (work * decode[here]).sum() / work.sum() / 2.0)
    slots = np.minimum(limit, np.maximum(capacity - unused, 1.0) / max(mean_kv, 1.0))[wanted]
    count = float(np.count_nonzero(wanted))
    busy = work.sum(), count, slots.sum(), (slots / step_s[wanted]).sum()
    assert found == (*busy, prompt[here].sum() * prompt_s[wanted].mean() / count)
    # Where prompts are computed elsewhere, they take no time here.
    assert work_and_pace(*requests, tier, lowest, False, 0.5, *fleet, wanted) == (*busy, 0.0)


def test_where_nobody_may_go_nothing_is_done() -> None:
    three, nobody = np.ones(3), np.zeros(3, dtype=np.bool_)
    requests = (three, three, three, three, np.zeros(3, dtype=np.int64))
    found = work_and_pace(*requests, 0, True, 0.5, three, three, three, three, nobody)
    assert found == (3.0, 0.0, 0.0, 0.0, 0.0)
    assert sum_over(three, nobody) == 0.0


def test_some_of_the_workers_are_added_up() -> None:
    assert sum_over(np.array([1.0, 20.0, 300.0, 4000.0]), np.array([True, False, True])) == 301.0


@pytest.mark.parametrize("tier", [[3], [2, 2, 2], [-1, 5, 0, 5]])
def test_tiers_are_told_highest_first(tier: list[int]) -> None:
    assert extent(np.array(tier)) == (min(tier), max(tier))
    assert levels(np.array(tier)) == sorted(set(tier), reverse=True)


def test_nobody_has_no_tier() -> None:
    assert levels(np.zeros(0, dtype=np.int64)) == []


@pytest.mark.parametrize("seed", range(10))
def test_who_waited_its_bound_is_told_and_who_would_wait_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    order, shared = rng.permutation(N), bool(seed % 2)
    arrival_s, discount = rng.uniform(0.0, 90.0, N), rng.uniform(0.5, 1.0, N)
    bounds_s = {2: 5.0, 0: 30.0, -1: 50.0}
    tier = rng.choice(list(bounds_s), N)
    steps, prompt = rng.integers(1, 500, (2, N)).astype(float)
    # Some of those who were spared wait no more.
    spared = np.unique(np.append(rng.choice(order, seed), [N + 3]))
    aged = np.empty(N, dtype=np.bool_)
    still, asking = np.empty((2, N), dtype=np.int64)
    kept, asked = find_aged(
        *(order, arrival_s, discount, shared, 100.0, tier, steps, prompt, 0.5, 400.0),
        *(np.array(list(bounds_s)), np.array(list(bounds_s.values())), 3.0, 80.0, spared),
        *(aged, still, asking),
    )
    age_s = (100.0 - arrival_s) * (discount if shared else 1.0)
    bound_s = np.array([bounds_s[level] for level in tier.tolist()])
    before, large = np.isin(order, spared), steps + 0.5 * prompt > 400.0
    assert still[:kept].tolist() == np.flatnonzero(before).tolist()
    assert asking[:asked].tolist() == np.flatnonzero((age_s >= bound_s) & large & ~before).tolist()
    own_s = np.minimum(np.where(before, 3.0 * bound_s, bound_s), 80.0)
    assert aged.tolist() == (age_s >= own_s).tolist()
