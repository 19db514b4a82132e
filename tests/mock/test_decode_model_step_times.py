"""The profiles against measured step times, where the measurements are at hand."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path
from statistics import fmean

import pytest

from service.mock.profiles import PROFILES, DecodeProfile

DATA = Path(os.environ.get("BIDGATE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
MEASURED = DATA / "a100_lambda_llama3_8b_steps.csv"
BY_LAYER = DATA / "a100_iter_llama2_7b.csv.gz"


@pytest.mark.skipif(not MEASURED.exists(), reason=f"no measured step times at {MEASURED}")
def test_llama_3_8b_steps_are_within_three_percent_of_the_measured_ones_on_average() -> None:
    """Bias +0.4 %, mean absolute error 2.7 %, largest 7.5 % over 72 points of an A100-80GB."""
    with MEASURED.open(newline="") as file:
        points = [
            (int(row["batch"]), int(row["kv_total"]), float(row["ms_per_step"]))
            for row in csv.DictReader(file)
        ]
    profile = PROFILES["llama-3-8b-a100"]
    errors = [1e3 * profile.iteration_s(b, kv, 0) / measured - 1 for b, kv, measured in points]
    assert len(errors) >= 70
    assert abs(fmean(errors)) < 0.01
    assert fmean(abs(error) for error in errors) < 0.03
    assert max(abs(error) for error in errors) < 0.08


@pytest.mark.skipif(not BY_LAYER.exists(), reason=f"no step times at {BY_LAYER}")
def test_llama_2_7b_steps_lie_between_those_of_the_gpu_alone_and_with_the_cpus_part() -> None:
    """Bias +4.5 % and -9.4 % over 127 points made from layers measured on an A100-80GB."""
    with gzip.open(BY_LAYER, "rt", newline="") as file:
        points = list(csv.DictReader(file))
    profile = PROFILES["llama-2-7b-a100"]
    told_ms = [
        1e3 * profile.iteration_s(int(row["batch"]), int(row["kv_total"]), 0) for row in points
    ]
    assert len(points) >= 120
    bias = {
        column: fmean(
            told / float(row[column]) - 1 for told, row in zip(told_ms, points, strict=True)
        )
        for column in ("gpu_ms", "gpu_cpu_ms")
    }
    assert 0 < bias["gpu_ms"] < 0.05
    assert -0.10 < bias["gpu_cpu_ms"] < 0


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_an_iteration_never_gets_shorter_by_holding_more(profile: DecodeProfile) -> None:
    light = profile.iteration_s(1, 100, 0)
    assert 0 < light <= profile.iteration_s(2, 100, 0)
    assert light <= profile.iteration_s(1, 200, 0)
    assert light <= profile.iteration_s(1, 100, 100)


def test_a_unit_iteration_is_ten_milliseconds_whatever_it_holds() -> None:
    unit = PROFILES["unit"]
    assert unit.iteration_s(0, 0, 0) == unit.iteration_s(256, 400_000, 10_000) == 0.01


def test_a_profile_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="base_ms must be positive"):
        DecodeProfile(
            name="x",
            base_ms=0,
            per_request_ms=0,
            per_kv_token_ms=0,
            prefill_ms_per_token=0,
            kv_capacity_tokens=1,
        )
