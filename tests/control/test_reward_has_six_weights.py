"""The reward of a start, [OLP] 3.1 after eq. (3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.config import Weights
from service.control.reward import StartTimes, largest_reward, start_reward
from tests.control.naive_olp import NaiveWeights, reward

NONE = {"throughput": 0.0, "e2e": 0.0, "ttft": 0.0}


def times(waited: int, length: int, left: int, t1: float = 20.0, t2: float = 5.0) -> StartTimes:
    return StartTimes(
        waited=np.array([waited], dtype=float),
        decode_tokens=np.array([length], dtype=float),
        left=float(left),
        e2e_bound=t1,
        ttft_bound=t2,
    )


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("throughput", 2.0 * 10),  # alpha min(o^, T-k+1): 10 tokens, 100 slots left
        ("e2e", 2.0 * 90),  # beta (T-(k+o^-1))_+: it ends 90 slots early
        ("ttft", 2.0 * 100),  # gamma (T-k+1)
        ("queries", 2.0),  # sigma
        ("tail_e2e", 2.0),  # zeta_1: 3 + 10 < 20
        ("tail_ttft", 2.0),  # zeta_2: 3 < 5
    ],
)
def test_each_weight_alone_pays_its_own_term__reward_3_1(weight: str, expected: float) -> None:
    weights = Weights(**{**NONE, weight: 2.0})
    assert start_reward(weights, times(waited=3, length=10, left=100)).tolist() == [expected]


def test_a_request_longer_than_the_horizon_saves_no_steps_but_fills_it__reward_3_1() -> None:
    late = times(waited=0, length=30, left=12)
    assert start_reward(Weights(**{**NONE, "throughput": 1.0}), late).tolist() == [12.0]
    assert start_reward(Weights(**{**NONE, "e2e": 1.0}), late).tolist() == [0.0]
    assert start_reward(Weights(**{**NONE, "ttft": 1.0}), late).tolist() == [12.0]


def test_tail_bounds_are_strict__reward_3_1() -> None:
    e2e, ttft = Weights(**{**NONE, "tail_e2e": 1.0}), Weights(**{**NONE, "tail_ttft": 1.0})
    assert start_reward(e2e, times(waited=9, length=10, left=50)).tolist() == [1.0]
    assert start_reward(e2e, times(waited=10, length=10, left=50)).tolist() == [0.0]
    assert start_reward(ttft, times(waited=4, length=10, left=50)).tolist() == [1.0]
    assert start_reward(ttft, times(waited=5, length=10, left=50)).tolist() == [0.0]


def test_all_six_terms_add_up__reward_3_1() -> None:
    weights = Weights(throughput=1, e2e=2, ttft=3, queries=4, tail_e2e=5, tail_ttft=6)
    # 10 + 2 x 90 + 3 x 100 + 4 + 5 + 6
    assert start_reward(weights, times(waited=3, length=10, left=100)).tolist() == [505.0]


WEIGHT = st.one_of(st.just(0.0), st.floats(0, 10))


@given(
    weights=st.tuples(WEIGHT, WEIGHT, WEIGHT, WEIGHT, WEIGHT, WEIGHT),
    bounds=st.tuples(st.integers(1, 40), st.integers(1, 20)),
    left=st.integers(0, 50),
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), max_size=6),
)
def test_reward_equals_the_formula_term_by_term_and_is_bounded__reward_3_1(
    weights: tuple[float, ...],
    bounds: tuple[int, int],
    left: int,
    requests: list[tuple[int, int]],
) -> None:
    names = ("throughput", "e2e", "ttft", "queries", "tail_e2e", "tail_ttft")
    ours = Weights(**dict(zip(names, weights, strict=True)))
    naive = NaiveWeights(*weights, *map(float, bounds))
    rewards = start_reward(
        ours,
        StartTimes(
            waited=np.array([w for _, w in requests], dtype=float),
            decode_tokens=np.array([o for o, _ in requests], dtype=float),
            left=float(left),
            e2e_bound=float(bounds[0]),
            ttft_bound=float(bounds[1]),
        ),
    )
    assert rewards == pytest.approx([reward(naive, left, o, w) for o, w in requests])
    assert (rewards >= 0).all()
    assert (rewards <= largest_reward(ours, left) * (1 + 1e-12)).all()


def test_no_weight_at_all_pays_nothing_and_still_has_a_normaliser__b_2() -> None:
    zero = Weights(**NONE)
    assert start_reward(zero, times(waited=0, length=5, left=10)).tolist() == [0.0]
    assert largest_reward(zero, 10) > 0


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights\.e2e"):
        Weights(e2e=-1.0)
    with pytest.raises(ValueError, match=r"weights\.ttft_bound_s"):
        Weights(ttft_bound_s=0.0)
