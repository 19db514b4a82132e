"""The tally of waits: any share of any number of requests, in bounded memory."""

import numpy as np
import pytest

from service.control.wait_tally import BINS, LONGEST_S, RATIO, WaitTally, within_s


@pytest.mark.parametrize("share", [0.5, 0.9, 0.981, 1.0])
def test_a_share_of_all_stays_within_the_wait_that_is_told(share: float) -> None:
    rng = np.random.default_rng(3)
    waits_s, tallies = rng.lognormal(-1.0, 2.0, 3000), [WaitTally(), WaitTally()]
    for number, wait_s in enumerate(waits_s.tolist()):
        tallies[number % 2].note(wait_s, 1)
    true_s = float(np.quantile(waits_s, share, method="inverted_cdf"))
    assert true_s <= within_s(share, tallies) <= RATIO * true_s


def test_several_requests_of_one_wait_count_each() -> None:
    tally = WaitTally()
    tally.note(1.0, 9)
    tally.note(5.0, 1)
    assert within_s(0.9, [tally]) == pytest.approx(1.0, rel=RATIO - 1.0)
    assert within_s(0.91, [tally]) == 5.0


def test_whatever_is_noted_takes_the_same_room() -> None:
    tally = WaitTally()
    for wait_s in (0.0, 1e-9, 1e9):
        tally.note(wait_s, 10**9)
    assert tally.counts.shape == (BINS,)
    assert within_s(0.3, [tally]) < 0.01
    assert within_s(1.0, [tally]) >= LONGEST_S


def test_before_anybody_came_there_is_no_wait() -> None:
    assert within_s(0.9, [WaitTally()]) == 0.0
