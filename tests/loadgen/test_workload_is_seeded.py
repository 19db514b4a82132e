"""A workload is finite, ordered and the same for the same seed; forecasts are what was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadgen.trace_errors import TraceError
from loadgen.traces import open_trace
from loadgen.workload import Prediction, WorkloadSpec, build_workload, mean_decode_tokens

if TYPE_CHECKING:
    from pathlib import Path

LMSYS = open_trace("lmsys-like")


def spec(**changes: object) -> WorkloadSpec:
    base: dict[str, object] = {"trace": LMSYS, "rate_per_s": 10.0, "requests": 500, "seed": 3}
    return WorkloadSpec(**(base | changes))  # type: ignore[arg-type]


def test_one_seed_gives_one_workload() -> None:
    assert build_workload(spec()) == build_workload(spec())
    assert build_workload(spec()) != build_workload(spec(seed=4))


def test_arrivals_rise_and_stop_at_the_duration() -> None:
    requests = build_workload(spec(requests=None, duration_s=20.0))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert times[-1] < 20.0
    assert len(requests) == pytest.approx(200, rel=0.3)


def test_the_prediction_changes_nothing_but_the_forecast() -> None:
    exact = build_workload(spec(prediction=Prediction.EXACT))
    noisy = build_workload(spec(prediction=Prediction.NOISY))
    none = build_workload(spec(prediction=Prediction.NONE))
    assert all(request.decode_tokens_hint == request.decode_tokens for request in exact)
    assert all(request.decode_tokens_hint is None for request in none)
    assert [(r.arrival_s, r.decode_tokens) for r in noisy] == [
        (r.arrival_s, r.decode_tokens) for r in exact
    ]


def test_noisy_forecasts_stay_within_their_width_and_fill_it() -> None:
    requests = build_workload(spec(requests=4000, prediction=Prediction.NOISY, noise_width=0.2))
    ratios = [
        (r.decode_tokens_hint or 0) / r.decode_tokens for r in requests if r.decode_tokens > 99
    ]
    assert 0.79 <= min(ratios) < 0.82
    assert 1.18 < max(ratios) <= 1.21


def test_a_share_of_the_forecasts_is_off_by_a_factor() -> None:
    asked = {"requests": 4000, "prediction": Prediction.EXACT}
    all_of_them = build_workload(spec(**asked, forecast_bias=10.0))
    assert all(r.decode_tokens_hint == 10 * r.decode_tokens for r in all_of_them)
    some = build_workload(spec(**asked, forecast_bias=10.0, forecast_bias_share=0.25))
    off = sum(r.decode_tokens_hint == 10 * r.decode_tokens for r in some)
    assert off == pytest.approx(1000, rel=0.1)
    assert sum(r.decode_tokens_hint == r.decode_tokens for r in some) == 4000 - off
    for wrong in ({"forecast_bias": 0.0}, {"forecast_bias_share": 1.1}):
        with pytest.raises(ValueError, match="forecast_bias"):
            spec(**wrong)


def test_recorded_times_are_scaled_to_the_asked_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n12,1,1\n10,1,2\n14,1,3\n")
    trace = open_trace(str(path))
    as_is = build_workload(WorkloadSpec(trace=trace, arrivals=None))
    assert [(r.arrival_s, r.decode_tokens) for r in as_is] == [(0.0, 2), (2.0, 1), (4.0, 3)]
    fast = build_workload(WorkloadSpec(trace=trace, arrivals=None, rate_per_s=3.0))
    assert fast[-1].arrival_s == pytest.approx(1.0)


def test_what_never_ends_or_has_no_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never ends"):
        spec(requests=None)
    with pytest.raises(ValueError, match="no recorded"):
        spec(arrivals=None)
    with pytest.raises(ValueError, match="rate"):
        spec(rate_per_s=None)
    empty = tmp_path / "e.csv"
    empty.write_text("prompt_tokens,output_tokens\n")
    with pytest.raises(TraceError, match="no request"):
        build_workload(spec(trace=open_trace(str(empty))))


def test_long_answers_are_cut_before_they_are_forecast() -> None:
    requests = build_workload(spec(decode_tokens_max=50, prediction=Prediction.EXACT))
    assert max(request.decode_tokens for request in requests) == 50
    assert max(request.decode_tokens_hint or 0 for request in requests) == 50
    assert mean_decode_tokens(LMSYS, seed=0, decode_tokens_max=50) < 50
    assert mean_decode_tokens(LMSYS, seed=0) == pytest.approx(210, rel=0.03)
