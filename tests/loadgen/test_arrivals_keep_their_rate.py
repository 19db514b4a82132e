"""Arrival processes have the asked rate and shape, and are seeded."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest

from loadgen.arrivals import (
    ArrivalProcess,
    Diurnal,
    Gamma,
    Piecewise,
    Poisson,
    load_to_rate,
    parse_arrivals,
)


def gaps_of(process: ArrivalProcess, rate_per_s: float, arrivals: int = 20_000) -> np.ndarray:
    times = np.array(list(islice(process.times(rate_per_s, np.random.default_rng(3)), arrivals)))
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize(
    ("process", "cv"), [(Poisson(), 1.0), (Gamma(3.0), 3.0), (Gamma(0.5), 0.5)]
)
def test_gaps_have_the_asked_mean_and_variation(process: ArrivalProcess, cv: float) -> None:
    gaps = gaps_of(process, rate_per_s=8.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_piecewise_steps_change_the_rate_where_they_say() -> None:
    process = Piecewise(starts_s=(0.0, 100.0, 200.0), factors=(0.5, 0.0, 2.0))
    times = np.cumsum(gaps_of(process, rate_per_s=20.0, arrivals=5000))
    assert np.sum(times < 100) == pytest.approx(1000, rel=0.1)
    assert np.sum((times >= 100) & (times < 200)) == 0
    assert np.sum((times >= 200) & (times < 250)) == pytest.approx(2000, rel=0.1)


def test_diurnal_peaks_in_the_first_half_of_its_period() -> None:
    times = np.cumsum(gaps_of(Diurnal(amplitude=0.8, period_s=10.0), 20.0))
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.05)
    day, night = np.sum(times % 10 < 5), np.sum(times % 10 >= 5)
    # integral of 1 + a sin over a half period: 1 +- 2 a / pi
    assert day / night == pytest.approx((1 + 1.6 / np.pi) / (1 - 1.6 / np.pi), rel=0.1)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    def first(seed: int) -> list[float]:
        return list(islice(Gamma(2.0).times(1.0, np.random.default_rng(seed)), 5))

    assert first(1) == first(1) != first(2)
    assert all(early < late for early, late in pairwise(first(1)))


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("poisson", Poisson()),
        ("gamma:2.5", Gamma(2.5)),
        ("piecewise:0=1,30=1.5", Piecewise((0.0, 30.0), (1.0, 1.5))),
        ("diurnal:0.5,60", Diurnal(0.5, 60.0)),
        ("recorded", None),
    ],
)
def test_processes_are_read_from_text(text: str, process: ArrivalProcess | None) -> None:
    assert parse_arrivals(text) == process


@pytest.mark.parametrize(
    "text",
    ["", "uniform", "gamma", "gamma:0", "piecewise:5=1", "piecewise:0=1,0=2", "diurnal:2,60"],
)
def test_text_that_is_no_process_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        parse_arrivals(text)


def test_load_one_offers_what_full_batches_decode() -> None:
    rate = load_to_rate(1.0, mean_decode_tokens=200, workers=4, batch_limit=16, iteration_s=0.0125)
    assert rate * 200 == pytest.approx(4 * 16 / 0.0125)
    with pytest.raises(ValueError, match="positive"):
        load_to_rate(0.0, 200, 4, 16, 0.0125)
