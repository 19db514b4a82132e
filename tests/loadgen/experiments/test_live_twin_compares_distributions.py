"""The twin of a live run: the same requests in virtual time, and when two distributions agree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from loadgen.demo import build_demo_workload
from loadgen.experiments.document import Verdict
from loadgen.experiments.live_twin import (
    ITERATION_S,
    Twin,
    distance,
    simulated_twin,
    twin_claim,
    twin_spec,
)
from loadgen.outcomes import End
from service.control.config import PolicyName

if TYPE_CHECKING:
    from pathlib import Path


def twin(
    live: np.ndarray,
    simulated: np.ndarray,
    others_share: float = 0.02,
    late_p99_s: float = 0.001,
    cpu_share: float = 0.3,
) -> Twin:
    return Twin(
        "round_robin",
        tuple(live.tolist()),
        tuple(simulated.tolist()),
        cpu_share=cpu_share,
        others_share=others_share,
        late_p99_s=late_p99_s,
    )


def test_twins_agree_within_the_tolerance_and_not_beyond() -> None:
    waits = np.random.default_rng(1).exponential(0.2, 400)
    assert twin_claim(twin(waits, waits)).verdict is Verdict.CONFIRMED
    assert twin_claim(twin(waits + 0.004, waits)).verdict is Verdict.CONFIRMED
    assert twin_claim(twin(waits * 1.6, waits)).verdict is Verdict.NOT_REPRODUCED
    spread = np.where(waits < 0.2, 0.01, waits * 1.3)
    assert twin_claim(twin(spread, waits)).verdict is Verdict.NOT_REPRODUCED


@given(
    first=st.lists(st.floats(0, 10), min_size=4, max_size=30),
    second=st.lists(st.floats(0, 10), min_size=4, max_size=30),
)
def test_without_slack_the_distance_is_that_of_kolmogorov_and_smirnov(
    first: list[float], second: list[float]
) -> None:
    known = ks_2samp(first, second, method="asymp").statistic
    assert distance(first, second, 0.0) == pytest.approx(known)
    assert distance(first, second, 0.0) == distance(second, first, 0.0)
    assert distance(first, second, 0.5) <= distance(first, second, 0.1) <= known + 1e-12


def test_waits_that_differ_by_less_than_an_iteration_are_equal() -> None:
    waits = np.random.default_rng(1).exponential(0.02, 400)
    assert distance(waits + 0.01, waits, 0.0) > 0.3
    assert distance(waits + 0.01, waits, ITERATION_S) == 0.0
    assert twin_claim(twin(waits + 0.01, waits)).verdict is Verdict.CONFIRMED
    assert twin_claim(twin(waits + 0.03, waits)).verdict is Verdict.NOT_REPRODUCED


def test_a_busy_machine_can_confirm_but_not_refute() -> None:
    waits = np.random.default_rng(1).exponential(0.2, 400)
    for busy in ({"others_share": 0.3}, {"late_p99_s": 0.02}, {"cpu_share": 0.9}):
        assert twin_claim(twin(waits, waits, **busy)).verdict is Verdict.CONFIRMED
        claim = twin_claim(twin(waits * 1.6, waits, **busy))
        assert claim.verdict is Verdict.SKIPPED
        assert "Too busy a machine" in claim.evidence


def test_the_simulated_twin_serves_the_live_runs_requests(tmp_path: Path) -> None:
    spec = twin_spec(tmp_path, 3.0, seed=1)
    requests = build_demo_workload(spec)
    for policy in (PolicyName.LEAST_OUTSTANDING, PolicyName.ONLINE_LP):
        records = simulated_twin(policy, spec, requests)
        assert [record.arrival_s for record in records] == [r.arrival_s for r in requests]
        assert {record.outcome for record in records} == {End.COMPLETED}


def test_a_faster_cluster_has_a_faster_twin(tmp_path: Path) -> None:
    spec = twin_spec(tmp_path, 2.0, seed=1)
    fast = replace(spec, cluster=replace(spec.cluster, time_scale=4.0))
    requests = build_demo_workload(spec)
    mean_e2e_s = [
        np.mean([r.e2e_s for r in simulated_twin(PolicyName.ROUND_ROBIN, each, requests)])
        for each in (spec, fast)
    ]
    assert mean_e2e_s[1] < mean_e2e_s[0] / 3
