"""The tick benchmark drives a real router in a busy state, beside the published method in loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen import bench_tick
from loadgen.array_memory import array_bytes
from loadgen.tick_command import tick
from loadgen.tick_page import page


def test_the_summary_has_every_size_with_both_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_tick, "TICKS_MAX", 5)
    monkeypatch.setattr(bench_tick, "REFRESHES_MAX", 2)
    monkeypatch.setattr(bench_tick, "LOOP_TICKS_MAX", 1)
    monkeypatch.setattr(bench_tick, "WARM_UP", 1)
    docs = tmp_path / "tick.md"
    assert tick(out=tmp_path, docs=docs, cases=1, rounds=2) == 0
    (case,) = json.loads((tmp_path / "summary.json").read_text())["cases"]
    assert (case["workers"], case["waiting"]) == (4, 64)
    assert case["ticks"] == 5
    assert case["refreshes"] == 2
    for key in ("decision_p50_ms", "decision_p99_ms", "refresh_p50_ms", "published_loop_p50_ms"):
        assert case[key] > 0
    assert case["ratio"] > 1
    sums = [one["decision_p50_ms"] + one["refresh_p50_ms"] for one in case["rounds"]]
    assert len(sums) == 2
    assert case["decision_p50_ms"] + case["refresh_p50_ms"] == min(sums)
    assert 0 < case["refresh_loop_p50_ms"] < case["refresh_p50_ms"]
    assert 0 < case["price_state_mb"] < case["router_arrays_mb"]
    written = docs.read_text()
    assert f"| 4 x 64 | {case['decision_p50_ms']:.2f} | {case['decision_p99_ms']:.2f} |" in written
    assert "| 64 x 1024 | decision p50, ms | 0.5 | - | **not measured** |" in written


def sized(workers: int, waiting: int, **numbers: float) -> dict[str, object]:
    return {"workers": workers, "waiting": waiting, **numbers, "rounds": [numbers]}


def test_an_aim_that_some_rounds_miss_is_not_called_met() -> None:
    quickest: dict[str, object] = {"decision_p50_ms": 0.4, "refresh_p50_ms": 1.6}
    rounds = [quickest, {"decision_p50_ms": 0.6, "refresh_p50_ms": 1.7}]
    case = {"workers": 64, "waiting": 1024, **quickest, "rounds": rounds}
    summary = {"command": "", "processors": 2, "others_share": 0.0, "cases": [case]}
    written = page(summary)  # type: ignore[arg-type]
    assert "decision p50, ms | 0.5 | 0.40 | **met in 1 of 2 rounds** |" in written
    assert "price refresh p50, ms | 1.5 | 1.60 | **missed** |" in written
    assert "| 64 x 1024 | 0.40, 0.60 |" in written


def test_the_page_judges_aims_and_growth_by_the_numbers() -> None:
    summary = {
        "command": "bidgate-load bench tick",
        "processors": 2,
        "load_average": 0.5,
        "others_share": None,
        "cases": [
            sized(64, 1024, decision_p50_ms=0.4, decision_p99_ms=1.6, refresh_p50_ms=1.0),
            sized(1024, 10_000, decision_p50_ms=4.0, refresh_p50_ms=128.0, price_memory_mb=80.0),
        ],
    }
    written = page(summary)  # type: ignore[arg-type]
    assert "| 64 x 1024 | decision p50, ms | 0.5 | 0.40 | **met** |" in written
    assert "| 64 x 1024 | decision p99, ms | 1.5 | 1.60 | **missed** |" in written
    assert "together, MB | 100 | 80.00 | **met** |" in written
    assert "decision with waiting requests: exponent 1.01, at most near-linear" in written
    assert "refresh with workers: exponent 1.75, more than linear" in written


def test_a_busy_machine_allows_no_verdict_on_times() -> None:
    cases = [
        sized(64, 1024, decision_p50_ms=0.4),
        sized(1024, 10_000, decision_p50_ms=4.0, price_memory_mb=80.0),
    ]
    summary = {"command": "", "processors": 2, "others_share": 0.8, "cases": cases}
    written = page(summary)  # type: ignore[arg-type]
    assert "| 64 x 1024 | decision p50, ms | 0.5 | 0.40 | **no verdict** |" in written
    assert "together, MB | 100 | 80.00 | **met** |" in written
    assert "too much of the processors for a verdict" in written


def test_memory_is_that_of_the_arrays_behind_views_each_counted_once() -> None:
    kept = np.zeros(1000)
    holder = {"some": kept[:10], "other": [kept[5:], (np.zeros(3, dtype=np.int8),)]}
    assert array_bytes(holder, kept) == 8000 + 3
    assert array_bytes(lambda: kept) == 8000


def test_no_round_at_all_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1\.\.20"):
        tick(out=tmp_path, rounds=0)


def test_more_sizes_than_there_are_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1\.\.5"):
        tick(out=tmp_path, cases=6)
