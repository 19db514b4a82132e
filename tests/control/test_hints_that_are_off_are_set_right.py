"""Clients whose hints are all too long or all too short, and what the fleet makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.control.events import Request
from service.control.hint_scale import KEYS_MAX, SEEN_MIN, HintScale
from service.control.lengths import LengthPredictor


def hinted(
    tokens: int, tenant: str = "", group: str = "", limit: int | None = None, floor: int = 0
) -> Request:
    return Request(
        request_id="r",
        arrival_s=0.0,
        prompt_tokens=10,
        decode_tokens_hint=tokens,
        decode_tokens_limit=limit,
        decode_tokens_floor=floor or None,
        tenant=tenant,
        group=group,
    )


def taught(ratio: float, answers: int = SEEN_MIN, tenant: str = "") -> LengthPredictor:
    predictor = LengthPredictor(default_tokens=256)
    for k in range(answers):
        hint = 200 + 10 * k
        predictor.observe(hinted(hint, tenant), round(hint * ratio))
    return predictor


@pytest.mark.parametrize("ratio", [0.1, 0.4, 3.0, 10.0])
def test_hints_that_are_off_together_are_set_right(ratio: float) -> None:
    predictor = taught(ratio, answers=300)
    assert predictor.forecast(hinted(1000)).decode_tokens == pytest.approx(1000 * ratio, rel=0.02)


@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.9])
def test_hints_within_a_factor_of_two_are_taken_as_they_are(ratio: float) -> None:
    assert taught(ratio, answers=300).forecast(hinted(1000)).decode_tokens == 1000


def test_a_few_answers_judge_nobody() -> None:
    assert taught(0.1, answers=SEEN_MIN - 1).forecast(hinted(1000)).decode_tokens == 1000


def test_one_tenants_hints_say_nothing_of_anothers() -> None:
    predictor = taught(0.1, tenant="loud")
    assert predictor.forecast(hinted(1000, tenant="loud")).decode_tokens == 100
    assert predictor.forecast(hinted(1000, tenant="exact")).decode_tokens == 1000


def test_a_length_that_the_engine_is_bound_to_is_neither_judged_nor_changed() -> None:
    predictor = taught(0.1)
    assert predictor.forecast(hinted(500, limit=500, floor=500)).decode_tokens == 500
    scale = HintScale()
    for _ in range(2 * SEEN_MIN):
        scale.note(hinted(500, limit=500, floor=500), 5)
    assert scale.of(hinted(500)) == 1.0


def test_a_client_that_mends_its_hints_is_believed_again() -> None:
    predictor = taught(0.1, answers=300)
    for _ in range(3000):
        predictor.observe(hinted(400), 400)
    assert predictor.forecast(hinted(1000)).decode_tokens == 1000


def test_what_is_kept_is_bounded_and_the_longest_unused_goes() -> None:
    scale = HintScale()
    for tenant in range(KEYS_MAX + 10):
        for _ in range(SEEN_MIN):
            scale.note(hinted(1000, tenant=str(tenant)), 10)
    assert scale.of(hinted(1000, tenant="9")) == 1.0
    assert scale.of(hinted(1000, tenant="10")) == pytest.approx(0.01)


def test_what_runs_is_judged_by_the_hint_as_it_was_set_right() -> None:
    predictor = taught(0.1, answers=300)
    told = predictor.forecast(replace(hinted(1000), request_id="other"))
    assert told.scale == pytest.approx(100.0, rel=0.02)
