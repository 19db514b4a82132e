"""Decode lengths: what is forecast, and what is left of a request that runs (spec 7.3, 7.4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control import Request
from service.control.lengths import (
    GRID_PER_OCTAVE,
    GROUPS_MAX,
    LEAVES_MAX,
    MEMORY,
    PRIOR_WEIGHT,
    LengthPredictor,
)

DEFAULT = 200


def request(hint: int | None = None, limit: int | None = None, group: str = "") -> Request:
    return Request(
        request_id="r",
        arrival_s=0.0,
        prompt_tokens=1,
        decode_tokens_hint=hint,
        decode_tokens_limit=limit,
        group=group,
    )


def learned(lengths: list[int], of: Request | None = None) -> LengthPredictor:
    """A predictor that saw requests of these lengths complete."""
    predictor = LengthPredictor(DEFAULT)
    for length in lengths:
        predictor.observe(of or request(), length)
    return predictor


def remaining(predictor: LengthPredictor, of: Request, produced: int) -> float:
    """What the predictor expects to be left of one running request."""
    forecast = predictor.forecast(of)
    left = predictor.remaining(
        np.array([forecast.pool]), np.array([forecast.scale]), np.array([float(produced)])
    )
    return float(left[0])


def survivors_left(lengths: list[int], produced: int) -> float:
    """E[o - d | o > d], by counting."""
    left = [length - produced for length in lengths if length > produced]
    return sum(left) / len(left)


def test_a_survivor_of_the_short_ones_is_one_of_the_long_ones__spec_7_3() -> None:
    predictor = learned([8] * 1000 + [64] * 1000)
    # The average is 36; whoever made 20 tokens will make 64.
    assert predictor.forecast(request()).decode_tokens == pytest.approx(36, rel=0.05)
    assert remaining(predictor, request(), 20) == pytest.approx(44, rel=0.05)
    assert remaining(predictor, request(), 60) == pytest.approx(4, abs=2)


LENGTHS = [1] * 300 + [2] * 300 + [16] * 800 + [64] * 800 + [256] * 600 + [1024] * 600


@pytest.mark.parametrize("produced", [0, 1, 2, 7, 15, 16, 20, 40, 63, 64, 100, 255, 256, 500, 900])
def test_what_is_left_is_the_mean_over_survivors__spec_7_3(produced: int) -> None:
    # Lengths on the predictor's own grid, so that nothing is lost to it; the prior is worth one.
    predictor = learned(LENGTHS)
    expected = survivors_left(LENGTHS, produced)
    assert remaining(predictor, request(), produced) == pytest.approx(expected, rel=0.02, abs=1)


@given(seed=st.integers(0, 99), spread=st.sampled_from((0.3, 1.0)), at=st.floats(0.0, 0.9))
def test_any_distribution_is_followed_to_within_its_grid__spec_7_3(
    seed: int, spread: float, at: float
) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.lognormal(5.0, spread, 1500).round(), 1).astype(int).tolist()
    predictor = learned(lengths)
    produced = int(np.quantile(lengths, at))
    expected = produced + survivors_left(lengths, produced)
    whole = produced + remaining(predictor, request(), produced)
    # One grid cell is 9 % wide.
    assert whole == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("hint", [10, 100, 3000])
def test_hinted_requests_are_judged_by_how_wrong_hints_are__spec_7_4(hint: int) -> None:
    # Half of all hints are twice too long, a quarter right, a quarter half of the truth.
    predictor = LengthPredictor(DEFAULT)
    for true in [100, 100, 200, 400] * 500:
        predictor.observe(request(hint=200), true)
    mine = request(hint=hint)
    assert predictor.forecast(mine).decode_tokens == hint
    # At half its forecast it is one of the other half, which is 1.5 x hint long in the mean.
    assert remaining(predictor, mine, hint // 2) == pytest.approx(hint, rel=0.05)
    assert remaining(predictor, mine, hint) == pytest.approx(hint, rel=0.05)


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=30),
    produced=st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    hint=st.none() | st.integers(1, 5000),
)
def test_at_least_one_token_is_always_left_and_it_is_finite(
    lengths: list[int], produced: list[int], hint: int | None
) -> None:
    predictor = learned(lengths, request(hint=hint))
    for tokens in produced:
        assert 1.0 <= remaining(predictor, request(hint=hint), tokens) < np.inf


def test_before_anything_is_seen_the_default_is_forecast() -> None:
    predictor = LengthPredictor(DEFAULT)
    assert predictor.forecast(request()).decode_tokens == pytest.approx(DEFAULT, rel=0.05)
    assert predictor.forecast(request(hint=7)).decode_tokens == 7


def test_a_limit_caps_every_forecast_and_none_is_below_one() -> None:
    predictor = learned([500] * 50)
    assert predictor.forecast(request(limit=20)).decode_tokens == 20
    assert predictor.forecast(request(hint=400, limit=20)).decode_tokens == 20
    assert predictor.forecast(request(hint=1)).decode_tokens == 1
    assert learned([1] * 500).forecast(request()).decode_tokens == 1


def test_a_group_is_shrunk_towards_all_traffic_by_a_stated_weight__spec_7_4() -> None:
    predictor = learned([64] * 2000)
    assert predictor.forecast(request(group="chat")).decode_tokens == 64
    own = 20
    for _ in range(own):
        predictor.observe(request(group="chat"), 512)
    everybody = (2000 * 64 + own * 512) / (2000 + own)
    expected = (own * 512 + PRIOR_WEIGHT * everybody) / (own + PRIOR_WEIGHT)
    # Below the group lies the prompt's octave, which has seen the same requests.
    expected = (own * 512 + PRIOR_WEIGHT * expected) / (own + PRIOR_WEIGHT)
    assert predictor.forecast(request(group="chat")).decode_tokens == pytest.approx(
        expected, rel=0.03
    )
    assert predictor.forecast(request(group="other")).decode_tokens == pytest.approx(
        everybody, rel=0.03
    )


def test_old_traffic_is_forgotten() -> None:
    predictor = learned([32] * int(MEMORY))
    for _ in range(3 * int(MEMORY)):
        predictor.observe(request(), 1024)
    assert predictor.forecast(request()).decode_tokens > 800


def test_groups_beyond_the_bound_count_as_all_traffic() -> None:
    predictor = LengthPredictor(DEFAULT)
    for i in range(GROUPS_MAX + 5):
        predictor.observe(request(group=f"g{i}"), 64)
    known = predictor.forecast(request(group="g0"))
    unknown = predictor.forecast(request(group=f"g{GROUPS_MAX + 1}"))
    assert known.pool != unknown.pool == predictor.forecast(request()).pool


def test_an_empty_answer_teaches_nothing() -> None:
    predictor = learned([64] * 100)
    before = predictor.forecast(request()).decode_tokens
    predictor.observe(request(), 0)
    assert predictor.forecast(request()).decode_tokens == before


def told(prompt: int, fingerprint: str = "", hint: int | None = None) -> Request:
    return Request(
        request_id="r",
        arrival_s=0.0,
        prompt_tokens=prompt,
        fingerprint=fingerprint,
        decode_tokens_hint=hint,
        group="chat",
    )


def test_prompts_of_other_lengths_are_told_apart__spec_7_4() -> None:
    predictor = LengthPredictor(DEFAULT)
    for _ in range(400):
        predictor.observe(told(10), 20)
        predictor.observe(told(5000), 800)
    assert predictor.forecast(told(12)).decode_tokens < 80
    assert predictor.forecast(told(6000)).decode_tokens > 700
    # Of a length never seen the group's mean is all that is known.
    assert predictor.forecast(told(200)).decode_tokens == pytest.approx(410, rel=0.05)


def test_system_prompts_are_told_apart_and_shrunk_towards_their_group__spec_7_4() -> None:
    predictor = LengthPredictor(DEFAULT)
    for _ in range(400):
        predictor.observe(told(64, "summary"), 32)
        predictor.observe(told(64, "essay"), 1024)
    assert predictor.forecast(told(64, "summary")).decode_tokens < 70
    assert predictor.forecast(told(64, "essay")).decode_tokens > 950
    assert predictor.forecast(told(3, "essay")).decode_tokens > 950
    assert predictor.forecast(told(64, "new")).decode_tokens == pytest.approx(528, rel=0.05)
    assert remaining(predictor, told(64, "summary"), 40) > 100


@pytest.mark.parametrize("seen", [0, 1, 3, 400])
def test_a_forecast_is_what_is_left_before_the_first_token(seen: int) -> None:
    rng = np.random.default_rng(seen)
    predictor = LengthPredictor(DEFAULT)
    for prompt, length in rng.integers(1, 2000, (seen, 2)).tolist():
        predictor.observe(told(prompt, str(prompt % 3)), length)
    for prompt in (1, 7, 100, 1999):
        one = told(prompt, str(prompt % 3))
        assert predictor.forecast(one).decode_tokens == round(remaining(predictor, one, 0))


def test_unique_system_prompts_cannot_fill_the_memory() -> None:
    predictor = LengthPredictor(DEFAULT)
    for i in range(2 * LEAVES_MAX):
        predictor.observe(told(64, f"unique{i}"), 64)
        predictor.observe(told(64, "steady"), 512)
    assert len(predictor._leaves) == LEAVES_MAX
    assert predictor.forecast(told(64, "steady")).decode_tokens > 480
    assert predictor.forecast(told(64, "unique0")).decode_tokens == pytest.approx(288, rel=0.1)


@pytest.mark.parametrize("level", [0.25, 0.5, 0.9])
def test_quantiles_are_those_of_what_was_seen(level: float) -> None:
    rng = np.random.default_rng(4)
    lengths = np.maximum(rng.lognormal(5.0, 0.8, 3000).round(), 1).astype(int).tolist()
    predictor = learned(lengths)
    expected = float(np.quantile(lengths, level))
    assert predictor.quantile(request(), level) == pytest.approx(expected, rel=0.1)
    wary = LengthPredictor(DEFAULT, level)
    for length in lengths:
        wary.observe(request(), length)
    assert wary.forecast(request()).decode_tokens == pytest.approx(expected, rel=0.1)
    survivors = [length for length in lengths if length > 150]
    left = float(np.quantile(survivors, level)) - 150
    assert remaining(wary, request(), 150) == pytest.approx(left, rel=0.15, abs=15)


def test_a_quantile_stretches_hints_by_how_wrong_they_were() -> None:
    wary = LengthPredictor(DEFAULT, 0.9)
    for true in [50] * 800 + [200] * 200:
        wary.observe(told(10, hint=100), true)
    assert wary.forecast(told(10, hint=40)).decode_tokens == pytest.approx(80, rel=0.1)


def test_a_length_is_in_the_last_cell_that_begins_at_it_or_before() -> None:
    predictor = LengthPredictor(256)
    for length in range(1, 3000, 7):
        predictor.observe(request(), length)
    pools = predictor.survival()
    edges = np.concatenate(
        [pools.grid * (1.0 + off) for off in (0.0, 2e-16, -2e-16, -1e-10, -1e-8)]
    )
    produced = np.concatenate([np.arange(200_000.0), edges])
    # By the logarithm; what rounding put just below a cell is in it.
    cell = (np.log2(np.maximum(produced, 1.0)) * GRID_PER_OCTAVE + 1e-9).astype(np.int64)
    cell = np.minimum(cell, pools.grid.size - 1)
    alive, work = pools.sums[:, 0, cell + (produced >= 1.0)]
    length = np.where(
        alive > 0, work / np.where(alive > 0, alive, 1.0), produced + pools.width[cell]
    )
    left = predictor.remaining(np.zeros(cell.size, dtype=np.int64), np.ones(cell.size), produced)
    assert left.tolist() == np.maximum(length - produced, 1.0).tolist()
