"""The watch over the arrival rate: false alarms, delays, bursts, and what a change does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.control import ControlConfig, Left, Outcome, RateConfig
from service.control.rate import BINS, REFERENCE_WINDOWS, RateMonitor, RateShift
from tests.control.driving import PUBLISHED, SMALL, ask, router_with, spec

WINDOW_S = 8.0
WATCH = RateConfig(window_s=WINDOW_S)


def gamma(rate_per_s: float, seconds: float, seed: int, cv: float = 1.0) -> np.ndarray:
    """Arrival times whose gaps vary by cv; 1 is Poisson."""
    shape = 1.0 / cv**2
    gaps = np.random.default_rng(seed).gamma(
        shape, 1.0 / (rate_per_s * shape), int(1.5 * rate_per_s * seconds) + 2000
    )
    times = gaps.cumsum()
    return times[times < seconds]


def watched(times: np.ndarray, config: RateConfig = WATCH) -> list[RateShift]:
    """The changes that a monitor notices among some arrivals, looking at each of them."""
    monitor, found = RateMonitor(config), []
    for now_s in times.tolist():
        shift = monitor.look(now_s)
        if shift is not None:
            found.append(shift)
        monitor.arrive(now_s)
    assert monitor.rises + monitor.falls == len(found)
    return found


def changed(factor: float, seed: int, cv: float = 1.0) -> list[RateShift]:
    """What is noticed after 40 s at 40/s when the rate is multiplied for another 16 s."""
    before = gamma(40.0, 40.0, seed, cv)
    after = 40.0 + gamma(40.0 * factor, 16.0, 1000 + seed, cv)
    return [shift for shift in watched(np.concatenate([before, after])) if shift.seen_s > 40.0]


def test_steady_traffic_is_seldom_taken_for_a_change() -> None:
    # 150 windows of steady arrivals at a significance of 0.01 may give 1.5 alarms; the bound is
    # not tight, as neighbouring looks see mostly the same arrivals.
    alarms = sum(len(watched(gamma(rate, 50 * WINDOW_S, 3))) for rate in (2.0, 8.0, 30.0))
    assert alarms <= 1


def test_a_loose_significance_does_raise_alarms() -> None:
    # The test above can fail: without a strict level chance alone looks like change.
    assert watched(gamma(8.0, 100 * WINDOW_S, 3), replace(WATCH, significance=0.999)) or watched(
        gamma(30.0, 100 * WINDOW_S, 3), replace(WATCH, significance=0.999, window_s=1.0)
    )


@pytest.mark.parametrize("cv", [2.0, 3.0])
def test_bursts_are_no_change(cv: float) -> None:
    alarms = sum(len(watched(gamma(20.0, 40 * WINDOW_S, seed, cv))) for seed in range(2))
    assert alarms <= 1


@pytest.mark.parametrize(
    ("factor", "within_s"),
    [
        pytest.param(1.5, 8.0, id="half more"),
        pytest.param(3.0, 1.5, id="three times as many: soon"),
        pytest.param(0.5, 4.0, id="half"),
        pytest.param(0.0, 2.0, id="nothing at all"),
    ],
)
def test_a_change_is_noticed_and_its_time_and_size_are_told(factor: float, within_s: float) -> None:
    for seed in range(3):
        if factor:
            found = changed(factor, seed)
        else:
            before = gamma(40.0, 40.0, seed)
            monitor = RateMonitor(WATCH)
            for now_s in before.tolist():
                monitor.look(now_s)
                monitor.arrive(now_s)
            looks = (monitor.look(40.0 + 0.1 * i) for i in range(1, 100))
            found = [shift for shift in looks if shift is not None]
        first = found[0]
        assert first.seen_s - 40.0 <= within_s
        assert first.rose == (factor > 1)
        assert first.before_per_s == pytest.approx(40.0, rel=0.15)
        assert first.since_s == pytest.approx(40.0, abs=within_s)


def test_a_change_is_told_once() -> None:
    assert [len(changed(2.0, seed)) for seed in range(3)] == [1, 1, 1]


def test_the_measured_rate_forgets_what_was_before_a_change() -> None:
    monitor = RateMonitor(WATCH)
    for now_s in np.concatenate([gamma(40.0, 40.0, 1), 40.0 + gamma(10.0, 5.0, 2)]).tolist():
        monitor.look(now_s)
        monitor.arrive(now_s)
    assert monitor.falls == 1
    # The last 256 arrivals alone would span the change and say about 25.
    assert monitor.per_s(45.0) == pytest.approx(10.0, rel=0.35)


def test_memory_is_bounded_whatever_comes() -> None:
    monitor = RateMonitor(WATCH)
    for now_s in (0.0, 0.0, 1e-9, 5.0, 4.0, 1e6, 1e6, 1e9):
        monitor.arrive(now_s)
        monitor.look(now_s)
    assert monitor._bins.shape == (2, BINS * (1 + REFERENCE_WINDOWS))
    assert monitor.per_s(1e9) > 0


def test_no_significance_means_no_watch() -> None:
    off = replace(WATCH, significance=0.0)
    assert watched(np.concatenate([gamma(5.0, 20.0, 1), 20.0 + gamma(80.0, 20.0, 2)]), off) == []


@pytest.mark.parametrize("name", ["published", "forward"])
@pytest.mark.parametrize("rises", [True, False])
def test_a_rise_drops_the_columns_recorded_before_it__olp_4(name: str, rises: bool) -> None:
    base: ControlConfig = PUBLISHED if name == "published" else SMALL
    config = replace(
        base,
        queue_max=1000,
        prices=replace(base.prices, history_max=2048),
        rate=WATCH if rises else replace(WATCH, significance=0.0),
    )
    router = router_with(config, spec("w0", batch_limit=1000, kv=None, iteration_s=0.01))
    times = np.concatenate([gamma(10.0, 40.0, 1), 40.0 + gamma(60.0, 4.0, 2)])
    for index, now_s in enumerate(times.tolist()):
        router.handle(ask(f"r{index}", now_s, decode_tokens_hint=4), now_s)
        router.tick(now_s)
        router.handle(Left(f"r{index}", Outcome.COMPLETED, 4), now_s)
    recorded = len(router._policy._history)  # type: ignore[attr-defined]
    before = int((times < 39.0).sum())
    assert router.stats(44.0).rate_rises == int(rises)
    assert (recorded <= times.size - before) if rises else (recorded == times.size)
    # What came since the change is kept.
    assert recorded >= int((times > 41.0).sum())
