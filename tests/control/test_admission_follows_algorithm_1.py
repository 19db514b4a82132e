"""Greedy admission: [OLP] Algorithm 1, lines 10-16, and constraints (4)-(5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.assign import Candidates, Residual, admit, admit_balanced
from service.control.columns import Horizon, Usage
from service.control.config import Kernel
from tests.control import naive_olp
from tests.control.instances import (
    Placed,
    StartInstance,
    columns_of,
    naive_column,
    start_instances,
    sum_of,
    tensor_of,
)
from tests.control.naive_olp import NaiveRequest

Pairs = list[tuple[int, int]]


def residual_of(instance: StartInstance) -> Residual:
    return Residual(instance.free.copy(), instance.horizon)


def candidates_of(instance: StartInstance, floor: float = 0.0) -> Candidates:
    return Candidates(instance.columns(), instance.margin, instance.order, floor)


def margins_of(instance: StartInstance) -> dict[tuple[int, int], float]:
    """Every pair that is allowed, with its margin."""
    return {
        (int(row), int(g)): float(instance.margin[row, g])
        for row, g in np.argwhere(np.isfinite(instance.margin))
    }


def simple(
    lengths: list[int], margin: list[list[float]], batch: list[list[int]], kv: list[list[int]]
) -> StartInstance:
    """Requests without a prompt, decode-only, so that step theta holds theta + 1 tokens."""
    placed = [Placed(NaiveRequest(f"r{i}", 0, 0, o), 0, 0) for i, o in enumerate(lengths)]
    return StartInstance(
        horizon=Horizon(len(batch[0]), 1),
        kernel=Kernel.DECODE_ONLY,
        placed=placed,
        margin=np.array(margin, dtype=float),
        order=np.arange(len(placed)),
        free=Usage(batch=np.array(batch, dtype=float), kv=np.array(kv, dtype=float)),
    )


def test_the_largest_margin_goes_first_and_takes_the_room__algorithm_1_line_11() -> None:
    instance = simple([2, 2], [[1.0], [3.0]], batch=[[1, 1]], kv=[[9, 9]])
    assert admit(candidates_of(instance), residual_of(instance)) == [(1, 0)]


def test_margins_of_zero_are_not_worth_a_start__algorithm_1_line_11() -> None:
    instance = simple([1, 1], [[0.0], [-1.0]], batch=[[9, 9]], kv=[[9, 9]])
    assert admit(candidates_of(instance), residual_of(instance)) == []


def test_a_column_must_fit_on_all_its_future_slots_not_just_the_next__algorithm_1_line_13() -> None:
    # Three steps hold 1, 2 and 3 tokens; the third slot has room for 2 only.
    instance = simple([3, 2], [[5.0], [1.0]], batch=[[1, 1, 1]], kv=[[9, 9, 2]])
    assert admit(candidates_of(instance), residual_of(instance)) == [(1, 0)]
    roomier = simple([3, 2], [[5.0], [1.0]], batch=[[1, 1, 1]], kv=[[9, 9, 3]])
    assert admit(candidates_of(roomier), residual_of(roomier)) == [(0, 0)]


def test_a_request_that_does_not_fit_its_best_worker_takes_the_next__algorithm_1() -> None:
    instance = simple([2, 2], [[3.0, 2.0], [4.0, 1.0]], batch=[[1, 1], [1, 1]], kv=[[9, 9]] * 2)
    assert admit(candidates_of(instance), residual_of(instance)) == [(1, 0), (0, 1)]


def test_no_request_starts_twice__constraint_5() -> None:
    instance = simple([1], [[2.0, 2.0]], batch=[[9], [9]], kv=[[9], [9]])
    assert admit(candidates_of(instance), residual_of(instance)) == [(0, 0)]


def test_ties_go_to_the_earlier_request_then_to_the_lower_worker__spec_4() -> None:
    instance = simple([1, 1, 1], [[1.0, 1.0]] * 3, batch=[[1], [1]], kv=[[9], [9]])
    late_first = Candidates(instance.columns(), instance.margin, np.array([2, 0, 1]))
    assert admit(late_first, residual_of(instance)) == [(1, 0), (2, 1)]


@given(start_instances())
def test_admission_decides_as_the_loops_do_ties_included__algorithm_1(
    instance: StartInstance,
) -> None:
    residual, naive = residual_of(instance), tensor_of(instance.free)
    pairs = admit(candidates_of(instance), residual)
    expected = naive_olp.admit_greedily(
        margins_of(instance), instance.naive_columns(), instance.order.tolist(), naive
    )
    assert pairs == expected
    assert tensor_of(Usage(batch=residual.batch, kv=residual.kv)) == naive


def crowd(seed: int) -> StartInstance:
    """Hundreds of requests on a few workers, with many equal margins."""
    rng = np.random.default_rng(seed)
    n, g, horizon = 300, 4, Horizon(8, 4)
    placed = [
        Placed(
            NaiveRequest(
                f"r{i}",
                0,
                prompt=int(rng.integers(0, 30)),
                length=int(rng.integers(1, 40)),
                sequences=int(rng.choice([1, 1, 1, 1, 2, 5])),
            ),
            start=0,
            worker=0,
        )
        for i in range(n)
    ]
    return StartInstance(
        horizon,
        Kernel.MIXED,
        placed,
        margin=np.where(rng.random((n, g)) < 0.2, -np.inf, rng.integers(-4, 12, (n, g)) / 8),
        order=rng.permutation(n),
        free=Usage(
            batch=rng.integers(5, 40, (g, horizon.buckets)).astype(float),
            kv=rng.integers(200, 900, (g, horizon.buckets)).astype(float),
        ),
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_is_admitted_as_the_loops_do_however_it_is_pruned__algorithm_1(seed: int) -> None:
    instance = crowd(seed)
    pairs = admit(candidates_of(instance), residual_of(instance))
    assert len(pairs) > 20
    assert pairs == naive_olp.admit_greedily(
        margins_of(instance),
        instance.naive_columns(),
        instance.order.tolist(),
        tensor_of(instance.free),
    )
    liking = np.array([0.5, 0.25, 0.25, 0.125])
    for floor in (0.0, -np.inf):
        pairs = admit_balanced(candidates_of(instance, floor), residual_of(instance), liking)
        assert len(pairs) > 20
        assert pairs == balanced_by_loops(instance, liking.tolist(), floor)


def balanced_by_loops(instance: StartInstance, preference: list[float], floor: float) -> Pairs:
    """What `admit_balanced` promises: rows by best margin, workers by margin, then free slots."""
    free, columns = tensor_of(instance.free), instance.naive_columns()
    open_pairs = {
        (row, g): margin
        for (row, g), margin in margins_of(instance).items()
        if margin > floor and naive_olp.fits(columns[row], g, free)
    }
    best = {
        row: max(margin for (other, _), margin in open_pairs.items() if other == row)
        for row in {row for row, _ in open_pairs}
    }
    pairs: Pairs = []
    for row in sorted(best, key=lambda row: (-best[row], instance.order[row])):
        workers = [g for g in range(instance.workers) if (row, g) in open_pairs]
        workers.sort(key=lambda g: (-open_pairs[row, g], -preference[g] * free[g, 0][0], g))
        for g in workers:
            if naive_olp.fits(columns[row], g, free):
                naive_olp.subtract(columns[row], g, free)
                pairs.append((row, g))
                break
    return pairs


@given(
    instance=start_instances(),
    preference=st.lists(st.sampled_from((0.125, 0.25, 0.5)), min_size=3, max_size=3),
    floor=st.sampled_from((-np.inf, 0.0)),
)
def test_balanced_admission_ranks_requests_and_spreads_ties_over_workers(
    instance: StartInstance, preference: list[float], floor: float
) -> None:
    liking = np.array(preference[: instance.workers])
    pairs = admit_balanced(candidates_of(instance, floor), residual_of(instance), liking)
    assert pairs == balanced_by_loops(instance, preference, floor)


def admit_to_the_emptiest(candidates: Candidates, residual: Residual) -> Pairs:
    return admit_balanced(candidates, residual, np.ones(residual.batch.shape[0]))


RULES = st.sampled_from([admit, admit_to_the_emptiest])
Rule = Callable[[Candidates, Residual], Pairs]


def slot_by_slot(instance: StartInstance, placed: list[Placed]) -> Usage:
    """The true use of some starts on every single slot, not on buckets."""
    slots = Horizon(instance.horizon.iterations, 1)
    return sum_of(
        [(p.worker, naive_column(instance.kernel, p, slots)) for p in placed],
        instance.workers,
        slots,
    )


def assert_within(instance: StartInstance, placed: list[Placed]) -> None:
    """No slot that is used at all is used beyond what was free on it."""
    use = slot_by_slot(instance, placed)
    for held, free in ((use.batch, instance.free.batch), (use.kv, instance.free.kv)):
        room = np.repeat(free, instance.horizon.bucket_iterations, axis=1)
        assert (held <= np.maximum(room, 0.0)).all()


@given(instance=start_instances(), rule=RULES, floor=st.sampled_from((-np.inf, 0.0)))
def test_admitted_columns_never_exceed_what_is_free_on_any_future_slot__constraint_4(
    instance: StartInstance, rule: Rule, floor: float
) -> None:
    pairs = rule(candidates_of(instance, floor), residual_of(instance))
    placed = [Placed(instance.placed[r].request, instance.placed[r].start, g) for r, g in pairs]
    assert_within(instance, placed)
    assert len({row for row, _ in pairs}) == len(pairs)
    assert all(instance.margin[pair] > floor for pair in pairs)


@given(instance=start_instances(), rule=RULES)
def test_whoever_is_left_waiting_fits_nowhere_any_more__algorithm_1(
    instance: StartInstance, rule: Rule
) -> None:
    residual = residual_of(instance)
    started = {row for row, _ in rule(candidates_of(instance), residual)}
    left = tensor_of(Usage(batch=residual.batch, kv=residual.kv))
    columns = instance.naive_columns()
    for (row, g), margin in margins_of(instance).items():
        if row not in started and margin > 0:
            assert not naive_olp.fits(columns[row], g, left)


@given(instance=start_instances(), rule=RULES, row=st.integers(0, 7), allowed=st.integers(0, 7))
def test_room_reserved_ahead_is_kept_from_later_starts__constraint_4(
    instance: StartInstance, rule: Rule, row: int, allowed: int
) -> None:
    if row >= len(instance.placed):
        return
    one = instance.placed[row]
    may = np.array([bool(allowed >> g & 1) for g in range(instance.workers)])
    residual = residual_of(instance)
    found = residual.reserve(instance.columns(), row, may)
    taken = tensor_of(
        Usage(
            batch=instance.free.batch - residual.batch,
            kv=np.where(np.isinf(instance.free.kv), 0.0, instance.free.kv)
            - np.where(np.isinf(residual.kv), 0.0, residual.kv),
        )
    )
    earliest = earliest_room(instance, one, may)
    assert found == (earliest is not None)
    kept: list[Placed] = []
    if earliest is not None:
        start, workers = earliest
        held = {g for (g, _), (batch, _) in taken.items() if batch}
        assert len(held) == 1
        assert held <= workers
        kept = [Placed(one.request, start, held.pop())]
    others = np.where(np.arange(len(instance.placed))[:, None] == row, -np.inf, instance.margin)
    candidates = Candidates(instance.columns(), others, instance.order)
    pairs = rule(candidates, residual)
    started = [Placed(instance.placed[r].request, one.start, g) for r, g in pairs]
    assert_within(instance, kept + started)


def earliest_room(
    instance: StartInstance, one: Placed, may: np.ndarray
) -> tuple[int, set[int]] | None:
    """The first later bucket in which a column would fit, and on which workers."""
    free = tensor_of(instance.free)
    for shift in range(1, instance.horizon.buckets):
        start = one.start + shift * instance.horizon.bucket_iterations
        moved = naive_column(instance.kernel, Placed(one.request, start, 0), instance.horizon)
        workers = {g for g in range(instance.workers) if may[g] and naive_olp.fits(moved, g, free)}
        if workers:
            return start, workers
    return None


@given(start_instances())
def test_what_fits_is_what_fits_on_every_slot__algorithm_1_line_13(
    instance: StartInstance,
) -> None:
    free = tensor_of(instance.free)
    fits = residual_of(instance).fits(instance.columns())
    for row, uses in enumerate(instance.naive_columns()):
        for g in range(instance.workers):
            assert fits[row, g] == naive_olp.fits(uses, g, free)


def test_a_bucket_asks_for_more_room_than_its_slots_do_never_for_less__spec_7_1() -> None:
    # One holds 1 token on slot 0, the other 1, 2, 3 on slots 0-2: together never more than 3.
    # As a bucket of three slots they hold 1 + 3.
    requests = [Placed(NaiveRequest(f"r{o}", 0, 0, o), 0, 0) for o in (1, 3)]
    columns = columns_of(Kernel.DECODE_ONLY, requests)

    def admitted(horizon: Horizon, tokens: float) -> Pairs:
        shape = (1, horizon.buckets)
        free = Usage(batch=np.full(shape, 2.0), kv=np.full(shape, float(tokens)))
        residual = Residual(free, horizon)
        return admit(Candidates(columns, np.ones((2, 1)), np.arange(2)), residual)

    assert admitted(Horizon(3, 1), 3) == [(0, 0), (1, 0)]
    assert admitted(Horizon(1, 3), 3) == [(0, 0)]
    assert admitted(Horizon(1, 3), 4) == [(0, 0), (1, 0)]
