"""The light-load benchmark subtracts quantiles and judges the queue's median."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from loadgen.bench_light import DIRECT, ROUTED, LightLoadSpec, light_load_summary
from loadgen.cluster import ClusterSpec
from loadgen.outcomes import End, OutcomeRecord

if TYPE_CHECKING:
    from pathlib import Path


def record(policy: str, ttft_s: float, queue_s: float | None, end: End) -> OutcomeRecord:
    return OutcomeRecord(
        policy=policy,
        index=0,
        arrival_s=0.0,
        sent_s=0.0,
        prompt_tokens=32,
        decode_tokens=4,
        outcome=end,
        ttft_s=ttft_s,
        e2e_s=1.0,
        queue_s=queue_s,
    )


@pytest.mark.parametrize(("queue_s", "met"), [(0.001, True), (0.002, False), (None, False)])
def test_the_goal_is_about_the_median_of_completed_requests(
    tmp_path: Path, queue_s: float | None, met: bool
) -> None:
    cluster = ClusterSpec(
        workers=1, batch_limit=1, profile="llama-3-8b-a100", time_scale=1.0, log_dir=tmp_path
    )
    records = [
        *(record(ROUTED, 0.015, queue_s, End.COMPLETED) for _ in range(3)),
        record(ROUTED, 9.0, 9.0, End.FAILED),
        *(record(DIRECT, 0.012, None, End.COMPLETED) for _ in range(3)),
    ]
    summary: Any = light_load_summary(LightLoadSpec(cluster=cluster), records, "command")
    assert summary["goal_met"] is met
    assert summary["queue_s"]["p50"] == queue_s
    assert summary["added_ttft_s"]["p50"] == pytest.approx(0.003)
    assert (summary["entered"], summary["completed"]) == (7, 6)
