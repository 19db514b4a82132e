"""Shadow prices: eqs. (6), (8) and (11), Algorithm 2 and the history of [OLP]."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.columns import Columns, Horizon, Usage
from service.control.config import Kernel
from service.control.prices import (
    SPARE_WORDS,
    History,
    PriceProblem,
    PriceSolution,
    mini_batches,
    random_starts,
    random_words,
)
from service.control.published import kv_scale, scarcity
from tests.control import naive_olp
from tests.control.instances import (
    Placed,
    PriceInstance,
    columns_of,
    horizons,
    price_instances,
    tensor_of,
    usage_of,
    usages,
)
from tests.control.naive_olp import NaiveRequest
from tests.control.vectorised_olp import saa_objective, subgradient


def everything(problem: PriceProblem) -> np.ndarray:
    return np.arange(problem.rewards.size)


def assert_same(ours: Usage, naive: naive_olp.Tensor) -> None:
    expected = usage_of(naive, ours.batch.shape[0], Horizon(ours.batch.shape[1], 1))
    np.testing.assert_allclose(ours.batch, expected.batch, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(ours.kv, expected.kv, rtol=1e-9, atol=1e-9)


def two_columns(**changes: object) -> PriceProblem:
    """One worker, two slots: a 2-slot column worth 3 and a 1-slot column worth 1; no prompts.

    KV use is 1, 2 and 1; one normalised KV unit is 4 tokens.
    """
    placed = [
        Placed(NaiveRequest("long", 0, prompt=0, length=2), start=0, worker=0),
        Placed(NaiveRequest("short", 0, prompt=0, length=1), start=0, worker=0),
    ]
    problem = PriceProblem(
        horizon=Horizon(2, 1),
        scarcity=Usage(batch=np.array([[0.25, 1.0]]), kv=np.array([[0.125, 0.125]])),
        columns=columns_of(Kernel.DECODE_ONLY, placed),
        rewards=np.array([3.0, 1.0]),
        warm=Usage(batch=np.array([[1.0, 0.0]]), kv=np.array([[0.0, 2.0]])),
        any_worker=False,
        steps=1,
        batch=2,
        step_size=0.5,
        averaged=False,
        seed=0,
        origin=0,
        worker_ids=("w",),
        normalizer=1.0,
        kv_scale=0.25,
    )
    return replace(problem, **changes)


def test_the_objective_is_scarcity_times_price_plus_the_mean_hinge__eq_6() -> None:
    problem = two_columns()
    # Costs: long 1 + 2 x (2/4) = 2, short 1. Hinges: 1 and 0.
    # d^T p = 0.25 x 1 + 0.125 x 2 = 0.5; the mean of the hinges is 0.5.
    assert saa_objective(problem, problem.warm) == 1.0
    # Free: (3 + 1) / 2.
    assert saa_objective(problem, Usage.zeros(1, problem.horizon)) == 2.0


def test_the_subgradient_is_scarcity_minus_mean_use_of_columns_worth_their_cost__eq_8() -> None:
    problem = two_columns()
    gradient = subgradient(problem, problem.warm, everything(problem))
    # Only "long" has r > cost: half of (1, 1) batch and of (1/4, 2/4) KV is taken off.
    assert gradient.batch.tolist() == [[0.25 - 0.5, 1.0 - 0.5]]
    assert gradient.kv.tolist() == [[0.125 - 0.125, 0.125 - 0.25]]


def test_a_column_worth_exactly_its_cost_pulls_no_price__algorithm_2_line_14() -> None:
    problem = two_columns(rewards=np.array([2.0, 1.0]))
    gradient = subgradient(problem, problem.warm, everything(problem))
    assert gradient.batch.tolist() == problem.scarcity.batch.tolist()


def test_a_step_goes_against_the_subgradient_and_stops_at_zero__algorithm_2_line_18() -> None:
    prices = two_columns().solve().prices
    # batch: 1 + 0.125, (0 - 0.25)_+; KV: 0 - 0, 2 + 0.0625.
    assert prices.batch.tolist() == [[1.125, 0.0]]
    assert prices.kv.tolist() == [[0.0, 2.0625]]


def test_without_history_every_price_is_zero__algorithm_2_lines_3_to_6() -> None:
    empty = two_columns(columns=columns_of(Kernel.MIXED, []), rewards=np.zeros(0))
    prices = empty.solve().prices
    assert not prices.batch.any()
    assert not prices.kv.any()


def test_averaged_prices_are_the_mean_of_the_iterates__spec_5() -> None:
    iterates = [two_columns(steps=k).solve().prices.batch[0, 0] for k in (1, 2, 3)]
    assert len(set(iterates)) == 3
    mean = two_columns(steps=3, averaged=True).solve().prices.batch[0, 0]
    assert mean == pytest.approx(np.mean(iterates))


def test_scarcity_shares_what_remains_among_the_arrivals_to_come__eq_11() -> None:
    residual = Usage(batch=np.array([[8.0, -1.0]]), kv=np.array([[100.0, -3.0]]))
    d = scarcity(residual, 4.0, 1 / 200)
    assert d.batch.tolist() == [[2.0, 0.0]]
    assert d.kv.tolist() == [[0.125, 0.0]]
    # max(1, n^_remain)
    assert scarcity(residual, 0.0, 1 / 200).batch.tolist() == [[8.0, 0.0]]


def test_memory_is_scaled_by_the_largest_worker__b_2() -> None:
    assert kv_scale(np.array([100.0, 400.0, np.inf])) == 1 / 400
    assert kv_scale(np.array([np.inf])) == 0.0


@given(st.data())
def test_scarcity_equals_the_loops__eq_11(data: st.DataObject) -> None:
    horizon = data.draw(horizons())
    residual = data.draw(usages(2, horizon))
    below_zero = data.draw(st.integers(0, 3))
    residual = Usage(batch=residual.batch - below_zero, kv=residual.kv - below_zero)
    n_remain, scale = data.draw(st.floats(0, 50)), data.draw(st.floats(0.001, 1))
    naive = naive_olp.scarcity(tensor_of(residual), n_remain, scale)
    assert_same(scarcity(residual, n_remain, scale), naive)


@given(price_instances())
def test_the_objective_equals_the_loops__eq_6(instance: PriceInstance) -> None:
    problem = instance.problem
    naive = naive_olp.objective(
        tensor_of(problem.scarcity), instance.history(), tensor_of(problem.warm)
    )
    assert saa_objective(problem, problem.warm) == pytest.approx(naive)


@given(price_instances())
def test_the_subgradient_equals_the_loops__eq_8(instance: PriceInstance) -> None:
    problem, history = instance.problem, instance.history()
    if not history:
        return
    naive = naive_olp.subgradient(tensor_of(problem.scarcity), history, tensor_of(problem.warm))
    assert_same(subgradient(problem, problem.warm, everything(problem)), naive)


@given(price_instances(), st.data())
def test_the_subgradient_supports_the_objective_everywhere__eq_8(
    instance: PriceInstance, data: st.DataObject
) -> None:
    # f(q) >= f(p) + g^T (q - p) for any q: what makes g a subgradient of a convex f.
    problem = instance.problem
    if not problem.rewards.size:
        return
    p, q = problem.warm, data.draw(usages(instance.workers, problem.horizon))
    g = subgradient(problem, p, everything(problem))
    slope = (g.batch * (q.batch - p.batch)).sum() + (g.kv * (q.kv - p.kv)).sum()
    assert saa_objective(problem, q) >= saa_objective(problem, p) + slope - 1e-9


@given(price_instances())
def test_solving_equals_the_loops_line_by_line__algorithm_2(instance: PriceInstance) -> None:
    problem = instance.problem
    naive = naive_olp.resolve_dual_prices(
        tensor_of(problem.scarcity),
        instance.history(),
        tensor_of(problem.warm),
        problem.steps,
        problem.step_size,
    )
    solution = problem.solve()
    assert_same(solution.prices, naive.mean if problem.averaged else naive.last)
    assert solution.is_finite()


@given(price_instances(any_worker=True))
def test_a_sample_that_may_go_anywhere_takes_the_cheapest_worker__reduced_dual(
    instance: PriceInstance,
) -> None:
    problem, prices = instance.problem, tensor_of(instance.problem.warm)
    cheapest = [
        min(options, key=lambda option: naive_olp.cost(option[2], option[1], prices))
        for options in instance.choices()
    ]
    naive = naive_olp.objective(tensor_of(problem.scarcity), cheapest, prices)
    assert saa_objective(problem, problem.warm) == pytest.approx(naive)
    if cheapest:
        step = naive_olp.subgradient(tensor_of(problem.scarcity), cheapest, prices)
        assert_same(subgradient(problem, problem.warm, everything(problem)), step)


@given(instance=st.one_of(price_instances(), price_instances(any_worker=True)))
def test_prices_are_never_negative__algorithm_2_line_18(instance: PriceInstance) -> None:
    prices = instance.problem.solve().prices
    assert (prices.batch >= 0).all()
    assert (prices.kv >= 0).all()


@given(instance=price_instances(workers_least=2), data=st.data())
def test_permuting_workers_permutes_prices__algorithm_2(
    instance: PriceInstance, data: st.DataObject
) -> None:
    problem = instance.problem
    order = np.array(data.draw(st.permutations(range(instance.workers))))
    place = np.argsort(order)  # old index -> new index

    def moved(usage: Usage) -> Usage:
        return Usage(batch=usage.batch[order], kv=usage.kv[order])

    permuted = replace(
        problem,
        scarcity=moved(problem.scarcity),
        warm=moved(problem.warm),
        columns=problem.columns.on_worker(place[problem.columns.worker]),
    )
    expected, prices = moved(problem.solve().prices), permuted.solve().prices
    np.testing.assert_allclose(prices.batch, expected.batch, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(prices.kv, expected.kv, rtol=1e-9, atol=1e-9)


@given(
    instance=st.one_of(price_instances(), price_instances(any_worker=True)),
    factor=st.sampled_from((0.25, 2.0, 8.0)),
)
def test_scaling_rewards_prices_and_step_together_scales_the_next_prices__algorithm_2(
    instance: PriceInstance, factor: float
) -> None:
    problem = instance.problem
    scaled = replace(
        problem,
        rewards=problem.rewards * factor,
        warm=Usage(batch=problem.warm.batch * factor, kv=problem.warm.kv * factor),
        step_size=problem.step_size * factor,
    )
    expected, prices = problem.solve().prices, scaled.solve().prices
    assert prices.batch.tolist() == (expected.batch * factor).tolist()
    assert prices.kv.tolist() == (expected.kv * factor).tolist()


def one_slot_each(n: int, batch: int, seed: int, steps: int = 1) -> PriceProblem:
    """Give each of n columns a slot of its own: a first step shows which ones were sampled."""
    placed = [Placed(NaiveRequest(f"r{i}", 0, 0, 1), start=i, worker=0) for i in range(n)]
    horizon = Horizon(n, 1)
    return replace(
        two_columns(),
        horizon=horizon,
        scarcity=Usage.zeros(1, horizon),
        columns=columns_of(Kernel.DECODE_ONLY, placed),
        rewards=np.full(n, 100.0),
        warm=Usage.zeros(1, horizon),
        steps=steps,
        batch=batch,
        step_size=1.0,
        seed=seed,
    )


@pytest.mark.parametrize(("n", "batch"), [(12, 1), (12, 5), (12, 11), (12, 12), (12, 99)])
def test_a_mini_batch_has_distinct_columns_and_at_most_the_history__algorithm_2_lines_7_and_10(
    n: int, batch: int
) -> None:
    size = min(n, batch)
    for seed in range(20):
        prices = one_slot_each(n, batch, seed).solve().prices.batch[0]
        # Drawn twice, a column's slot would cost 2 / B; drawn never, nothing.
        assert sorted(prices) == pytest.approx([0.0] * (n - size) + [1.0 / size] * size)


def test_every_column_is_as_likely_to_be_drawn_and_steps_draw_anew__algorithm_2_line_10() -> None:
    n, batch, seeds = 10, 3, 400
    drawn = sum(one_slot_each(n, batch, s).solve().prices.batch[0] > 0 for s in range(seeds))
    expected = seeds * batch / n
    assert np.abs(drawn - expected).max() < 5 * np.sqrt(expected)
    two_steps = [one_slot_each(n, batch, s, steps=2).solve().prices.batch[0] for s in range(50)]
    assert any(np.count_nonzero(prices) > batch for prices in two_steps)


@pytest.mark.parametrize(
    ("count", "batch"),
    [(1, 1), (2, 2), (5, 9), (64, 64), (65, 64), (700, 1), (2048, 64), (9999, 64)],
)
def test_mini_batches_are_those_that_numpy_chooses__algorithm_2_line_10(
    count: int, batch: int
) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        size = min(count, batch)
        expected = [rng.choice(count, size=size, replace=False).tolist() for _ in range(5)]
        words = random_words(seed, 5 * size + SPARE_WORDS)
        assert mini_batches(words, count, size, 5).tolist() == expected


@pytest.mark.parametrize("count", [1, 2048])
def test_columns_are_retimed_by_numpys_uniform_numbers(count: int) -> None:
    expected = np.rint(np.random.default_rng(3).uniform(0.0, 4096.0, count))
    assert random_starts(3, count + 1, count, 4096.0)[1].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "seed", [*range(20), *(2**n - s for n in (31, 32, 64, 128) for s in (1, 2))]
)
def test_random_words_are_numpys(seed: int) -> None:
    assert random_words(seed, 9).tolist() == np.random.PCG64(seed).random_raw(9).tolist()


def test_the_same_seed_draws_the_same_mini_batches() -> None:
    first, again = (one_slot_each(30, 4, 7, steps=5).solve().prices for _ in range(2))
    assert first.batch.tolist() == again.batch.tolist()
    assert one_slot_each(30, 4, 8, steps=5).solve().prices.batch.tolist() != first.batch.tolist()


def test_solving_changes_nothing_it_was_given() -> None:
    problem = two_columns(steps=3)
    before = [problem.warm.batch.copy(), problem.warm.kv.copy(), problem.scarcity.batch.copy()]
    problem.solve()
    after = [problem.warm.batch, problem.warm.kv, problem.scarcity.batch]
    assert [a.tolist() for a in before] == [a.tolist() for a in after]


def test_natural_prices_undo_the_scales__b_2() -> None:
    # Normalised prices x normaliser = reward per slot; x mem_scale too = reward per token.
    prices = Usage(batch=np.array([[0.5]]), kv=np.array([[0.25]]))
    natural = PriceSolution(prices, 0, ("w",), normalizer=100.0, kv_scale=0.01).natural()
    assert natural.batch.tolist() == [[50.0]]
    assert natural.kv.tolist() == [[0.25]]


def test_an_unknown_kv_capacity_never_gets_a_price__eq_11() -> None:
    # Worker 0 has 100 tokens, worker 1 an unknown number; its columns are far larger than 100.
    horizon = Horizon(4, 1)
    free = Usage(batch=np.full((2, 4), 8.0), kv=np.array([[100.0] * 4, [np.inf] * 4], dtype=float))
    placed = [Placed(NaiveRequest(f"r{i}", 0, 5000, 4), start=0, worker=1) for i in range(5)]
    problem = replace(
        two_columns(),
        horizon=horizon,
        scarcity=scarcity(free, 10.0, kv_scale(free.kv[:, 0])),
        columns=columns_of(Kernel.DECODE_ONLY, placed),
        rewards=np.full(5, 1.0),
        warm=Usage.zeros(2, horizon),
        steps=4,
        batch=5,
        worker_ids=("a", "b"),
        kv_scale=0.01,
    )
    solution = problem.solve()
    assert solution.is_finite()
    assert not solution.prices.kv[1].any()
    assert np.isfinite(saa_objective(problem, solution.prices))


@given(
    capacity=st.integers(1, 6),
    columns=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 9)), max_size=20
    ),
    keep=st.none() | st.integers(0, 8),
)
def test_the_history_keeps_the_newest_columns_in_a_ring(
    capacity: int, columns: list[tuple[int, int, int]], keep: int | None
) -> None:
    history, naive = History(capacity), list[tuple[float, ...]]()
    for time, (worker, steps, footprint) in enumerate(columns):
        row = Columns(
            worker=np.array([9, worker]),
            start=np.array([0.0, 0.0]),
            steps=np.array([99.0, steps]),
            footprint=np.array([99.0, footprint]),
            sequences=np.array([9.0, 2.0]),
        )
        history.record(row, float(time), 1, time / 2)
        naive = [*naive, (worker, time, steps, footprint, 2.0, time / 2)][-capacity:]
        if keep is not None and time == len(columns) // 2:
            history.forget_before(keep)
            naive = naive[len(naive) - min(keep, len(naive)) :]
    seen, rewards = history.columns(origin=3.0)
    assert len(history) == len(naive)
    rows = zip(
        seen.worker,
        seen.start + 3.0,
        seen.steps,
        seen.footprint,
        seen.sequences,
        rewards,
        strict=True,
    )
    assert sorted(tuple(map(float, row)) for row in rows) == sorted(naive)


@pytest.mark.parametrize("sizes", [[1, 2], [3, 4], [9], [4, 1, 1, 7]])
def test_columns_that_are_recorded_together_are_those_recorded_one_by_one(sizes: list[int]) -> None:
    together, one_by_one = History(5), History(5)
    for time, size in enumerate(sizes):
        numbers = np.arange(4.0 * (size + 1)).reshape(4, -1) + 100.0 * time
        start = np.zeros(size + 1)
        columns = Columns(
            worker=np.arange(size + 1),
            start=start,
            steps=numbers[0],
            footprint=numbers[1],
            sequences=numbers[2],
        )
        rows, rewards = np.arange(size)[::-1], numbers[3] - 50.0
        together.extend(columns, float(time), rows, rewards)
        for row in rows.tolist():
            one_by_one.record(columns, float(time), row, max(0.0, float(rewards[row])))
    assert together.columns(0.0)[1].tolist() == one_by_one.columns(0.0)[1].tolist()
    for name in ("worker", "start", "steps", "footprint", "sequences"):
        found, expected = (getattr(each.columns(1.0)[0], name) for each in (together, one_by_one))
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_look_at_few_buckets_are_whole_subgradient_steps_to_the_last_bit(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    workers, horizon, n = 7, Horizon(40, 4), 30
    shape = (workers, horizon.buckets)
    near, far = rng.random((workers, 1)) < 0.5, rng.random((workers, 1)) < 0.3
    held = (near & (np.arange(horizon.buckets) < 3)) | far
    problem = two_columns(
        horizon=horizon,
        scarcity=Usage(batch=rng.random(shape) * (rng.random(shape) < 0.9), kv=rng.random(shape)),
        columns=Columns(
            worker=rng.integers(0, workers, n),
            start=rng.integers(0, 150, n).astype(float),
            steps=rng.integers(1, 80, n).astype(float),
            footprint=rng.integers(0, 50, n).astype(float),
            sequences=rng.integers(1, 3, n).astype(float),
        ),
        rewards=rng.random(n) * 8,
        warm=Usage(batch=held * rng.random(shape), kv=held * rng.random(shape)),
        any_worker=bool(seed % 2),
        batch=n,
        seed=seed,
        worker_ids=tuple(f"w{g}" for g in range(workers)),
    )
    prices = problem.warm
    for step in range(5):
        found = replace(problem, steps=step + 1).solve().prices
        # A mini-batch as large as the history is a permutation of it, which sums may feel.
        order = np.random.default_rng(seed)
        sample = [order.choice(n, size=n, replace=False) for _ in range(step + 1)][-1]
        slope = subgradient(problem, prices, sample)
        prices = Usage(
            batch=np.maximum(slope.batch * -problem.step_size + prices.batch, 0.0),
            kv=np.maximum(slope.kv * -problem.step_size + prices.kv, 0.0),
        )
        assert np.array_equal(found.batch, prices.batch)
        assert np.array_equal(found.kv, prices.kv)
    assert prices.kv.any()
    assert not prices.batch.all()
