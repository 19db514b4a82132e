"""What first come first served would make a newcomer wait, told from what waits and what runs."""

import numpy as np
import pytest

from service.control.usual_work import SEEN_MIN, UsualWork

LENGTHS = [5, 8, 13, 40, 90, 300] * 4


def naive_left(lives: list[tuple[int, int]]) -> float:
    """Mean, over all iterations of lives (forecast, true length), of what is left by forecast."""
    left = [max(forecast - (done + 0.5), 0.0) for forecast, true in lives for done in range(true)]
    return sum(left) / len(left)


def learned(lives: list[tuple[int, int]]) -> UsualWork:
    usual = UsualWork()
    for forecast, true in lives:
        usual.came(forecast)
        usual.ended(forecast, true)
    return usual


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param([(length, length) for length in LENGTHS], id="exact forecasts"),
        pytest.param([(60, length) for length in LENGTHS], id="one forecast for all"),
        pytest.param([(2 * length, length) for length in LENGTHS], id="twice too long"),
        pytest.param([(length, 2 * length) for length in LENGTHS], id="half of the length"),
    ],
)
def test_a_running_request_is_met_in_proportion_to_its_length(
    lives: list[tuple[int, int]],
) -> None:
    # The newest weigh most; with lengths that repeat that moves the mean a little.
    assert learned(lives).left_steps() == pytest.approx(naive_left(lives), rel=0.03)


def test_requests_that_still_run_are_counted_by_their_forecasts() -> None:
    usual = UsualWork()
    for length in LENGTHS:
        usual.came(length)
        if length < 50:
            usual.ended(length, length)
    exact = [(length, length) for length in LENGTHS]
    assert usual.left_steps() == pytest.approx(naive_left(exact), rel=0.03)


def test_nothing_is_told_after_a_few_arrivals() -> None:
    usual = UsualWork()
    for _ in range(int(SEEN_MIN) - 1):
        usual.came(100)
    assert usual.left_steps() == 0.0
    usual.came(100)
    usual.came(100)
    assert usual.left_steps() == pytest.approx(50.0)
    assert np.isfinite(usual.left_steps())
