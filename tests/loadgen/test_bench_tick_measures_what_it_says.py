"""The tick benchmark drives a real router in a busy state, beside the published method in loops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen import bench_tick
from loadgen.tick_command import tick


def test_the_summary_has_every_size_with_both_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_tick, "TICKS_MAX", 5)
    monkeypatch.setattr(bench_tick, "REFRESHES_MAX", 2)
    monkeypatch.setattr(bench_tick, "LOOP_TICKS_MAX", 1)
    monkeypatch.setattr(bench_tick, "WARM_UP", 1)
    assert tick(out=tmp_path, cases=1) == 0
    (case,) = json.loads((tmp_path / "summary.json").read_text())["cases"]
    assert (case["workers"], case["waiting"]) == (4, 64)
    assert case["ticks"] == 5
    assert case["refreshes"] == 2
    for key in ("decision_p50_ms", "decision_p99_ms", "refresh_p50_ms", "published_loop_p50_ms"):
        assert case[key] > 0
    assert case["ratio"] > 1


def test_more_sizes_than_there_are_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1\.\.5"):
        tick(out=tmp_path, cases=6)
