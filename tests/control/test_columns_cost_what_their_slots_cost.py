"""Columns, their sums and their costs: eq. (1), appendix A and eq. (10) of [OLP]."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.columns import (
    Columns,
    Horizon,
    Usage,
    kv_footprint,
    service_steps,
)
from service.control.config import Kernel
from service.control.spans import PrefixPrices, Spans, total_usage
from tests.control.instances import (
    KERNELS,
    Placed,
    columns_of,
    horizons,
    naive_column,
    placements,
    sum_of,
    tensor_of,
    usages,
)
from tests.control.naive_olp import NaiveRequest, cost


def one(kernel: Kernel, prompt: int, length: int, start: int = 0, sequences: int = 1) -> Columns:
    request = NaiveRequest("r", 0, prompt, length, sequences)
    return columns_of(kernel, [Placed(request, start, 0)])


def test_decode_only_kv_grows_from_prompt_plus_one_for_o_steps__eq_1() -> None:
    use = total_usage(one(Kernel.DECODE_ONLY, prompt=10, length=3), Horizon(6, 1), 1)
    assert use.batch.tolist() == [[1, 1, 1, 0, 0, 0]]
    assert use.kv.tolist() == [[11, 12, 13, 0, 0, 0]]


def test_mixed_kv_begins_with_a_prefill_step_and_lasts_one_plus_o_steps__appendix_a() -> None:
    use = total_usage(one(Kernel.MIXED, prompt=10, length=3), Horizon(6, 1), 1)
    assert use.batch.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert use.kv.tolist() == [[10, 11, 12, 13, 0, 0]]


def test_a_bucket_holds_the_largest_use_inside_it__spec_7_1() -> None:
    # Slots 1..5 use 11..15; buckets are {0,1,2}, {3,4,5}, {6,7,8}.
    use = total_usage(one(Kernel.DECODE_ONLY, prompt=10, length=5, start=1), Horizon(3, 3), 1)
    assert use.batch.tolist() == [[1, 1, 0]]
    assert use.kv.tolist() == [[12, 15, 0]]


def test_a_request_that_runs_already_keeps_only_its_future__spec_7_2() -> None:
    # Started two slots ago: theta is 2, 3, 4 on the slots to come.
    use = total_usage(one(Kernel.DECODE_ONLY, prompt=10, length=5, start=-2), Horizon(4, 1), 1)
    assert use.kv.tolist() == [[13, 14, 15, 0]]


def test_a_request_longer_than_the_horizon_is_cut_at_its_end() -> None:
    use = total_usage(one(Kernel.MIXED, prompt=4, length=99), Horizon(3, 1), 1)
    assert use.batch.tolist() == [[1, 1, 1]]
    assert use.kv.tolist() == [[4, 5, 6]]


def test_parallel_sequences_multiply_both_resources() -> None:
    use = total_usage(one(Kernel.DECODE_ONLY, 10, 2, sequences=3), Horizon(2, 1), 1)
    assert use.batch.tolist() == [[3, 3]]
    assert use.kv.tolist() == [[33, 36]]


def test_a_column_costs_its_batch_slots_and_its_tokens_at_their_prices__eq_10() -> None:
    prices = Usage(batch=np.array([[1.0, 2.0, 4.0]]), kv=np.array([[0.5, 0.0, 0.25]]))
    prefix = PrefixPrices.of(prices, Horizon(3, 1))
    column = one(Kernel.DECODE_ONLY, prompt=10, length=2)
    # 1 + 2 for the slots, 0.5 x 11 + 0 x 12 for the tokens.
    assert prefix.cost_on_every_worker(Spans.of(column, prefix.horizon)).tolist() == [[8.5]]
    mixed = one(Kernel.MIXED, prompt=10, length=2)
    # 1 + 2 + 4 for the slots, 0.5 x 10 + 0 x 11 + 0.25 x 12 for the tokens.
    assert prefix.cost_on_every_worker(Spans.of(mixed, prefix.horizon)).tolist() == [[15.0]]


@given(
    kernel=KERNELS, prompt=st.integers(0, 50), length=st.integers(1, 60), start=st.integers(0, 9)
)
def test_every_step_of_a_column_follows_its_kernel__eq_1_and_appendix_a(
    kernel: Kernel, prompt: int, length: int, start: int
) -> None:
    placed = Placed(NaiveRequest("r", 0, prompt, length), start, 0)
    horizon = Horizon(80, 1)
    use = total_usage(columns_of(kernel, [placed]), horizon, 1)
    naive = sum_of([(0, naive_column(kernel, placed, horizon))], 1, horizon)
    assert use.batch.tolist() == naive.batch.tolist()
    assert use.kv.tolist() == naive.kv.tolist()


@given(st.data())
def test_total_usage_equals_the_sum_over_columns_and_slots__b_2(data: st.DataObject) -> None:
    horizon, kernel, workers = data.draw(horizons()), data.draw(KERNELS), 3
    placed = data.draw(placements(horizon, workers))
    use = total_usage(columns_of(kernel, placed), horizon, workers)
    naive = sum_of([(p.worker, naive_column(kernel, p, horizon)) for p in placed], workers, horizon)
    assert use.batch.tolist() == naive.batch.tolist()
    assert use.kv.tolist() == naive.kv.tolist()


@given(st.data())
def test_prefix_sums_price_a_column_on_every_worker__eq_10(data: st.DataObject) -> None:
    horizon, kernel, workers = data.draw(horizons()), data.draw(KERNELS), 3
    placed = data.draw(placements(horizon, workers))
    prices = data.draw(usages(workers, horizon))
    tensor = tensor_of(prices)
    spans = Spans.of(columns_of(kernel, placed), horizon)
    costs = PrefixPrices.of(prices, horizon).cost_on_every_worker(spans)
    assert costs.shape == (len(placed), workers)
    assert costs.tolist() == [
        [cost(naive_column(kernel, p, horizon), g, tensor) for g in range(workers)] for p in placed
    ]


@given(st.data())
def test_cost_is_what_the_prices_take_of_the_total_usage__eq_10(data: st.DataObject) -> None:
    # a^T p, with a from total_usage: the cost and the use are of one and the same column.
    horizon, kernel, workers = data.draw(horizons()), data.draw(KERNELS), 2
    placed = data.draw(placements(horizon, workers))
    prices = data.draw(usages(workers, horizon))
    columns = columns_of(kernel, placed)
    use = total_usage(columns, horizon, workers)
    inner = (use.batch * prices.batch).sum() + (use.kv * prices.kv).sum()
    costs = PrefixPrices.of(prices, horizon).cost_on_every_worker(Spans.of(columns, horizon))
    priced = costs[np.arange(len(placed)), columns.worker]
    assert priced.sum() == pytest.approx(inner)


def test_service_steps_and_footprints_accept_empty_arrays() -> None:
    empty = np.zeros(0)
    for kernel in Kernel:
        assert service_steps(kernel, empty).shape == (0,)
        assert kv_footprint(kernel, empty).shape == (0,)


def test_a_horizon_without_slots_and_columns_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one bucket"):
        Horizon(0, 1)
    with pytest.raises(ValueError, match="one shape"):
        Columns(
            worker=np.zeros(2, dtype=np.int64),
            start=np.zeros(2),
            steps=np.ones(1),
            footprint=np.zeros(2),
            sequences=np.ones(2),
        )
