"""Engine reports against our own ledger: foreign load, limits, pace; unknown is not zero.

Seen through the router: what it says of a worker, and what it starts there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.control import (
    Left,
    Outcome,
    Request,
    Router,
    WorkerChanged,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerStats,
)
from service.control.events import Arrived
from service.control.fleet_state import KV_TOLERANCE, LAG_S, WAITING_TRUST_S
from tests.control.driving import DOWN, SMALL, UP, ask, refusals, router_with, spec, starts


def tell(router: Router, now_s: float, worker_id: str = "w0", **fields: object) -> None:
    """A scrape that was sent and came back now."""
    report = WorkerReport(**fields)  # type: ignore[arg-type]
    router.handle(WorkerReported(worker_id, report, now_s), now_s)


def worker(router: Router, now_s: float = 0.0) -> WorkerStats:
    return router.stats(now_s).workers[0]


def start(router: Router, name: str, now_s: float, **fields: object) -> bool:
    """Whether a request that arrives now starts now; if not it leaves again."""
    router.handle(ask(name, now_s, **fields), now_s)
    if starts(router.tick(now_s)):
        return True
    router.handle(Left(name, Outcome.CANCELLED), now_s)
    return False


def test_foreign_load_is_believed_when_two_reports_agree() -> None:
    router = router_with(SMALL, spec(batch_limit=4))
    seen = []
    for now_s, running in ((1.0, 3), (2.0, 3), (3.0, 1), (4.0, 4), (5.0, 0)):
        tell(router, now_s, running=running, waiting=0)
        seen.append(worker(router).foreign)
    # The smaller excess of the last two reports.
    assert seen == [0, 3, 1, 1, 0]


def test_foreign_load_takes_batch_slots() -> None:
    router = router_with(SMALL, spec(batch_limit=2))
    for now_s in (1.0, 2.0):
        tell(router, now_s, running=2, waiting=0)
    assert not start(router, "r", 2.0)
    for now_s in (3.0, 4.0):
        tell(router, now_s, running=1, waiting=0)
    assert start(router, "r2", 4.0)
    assert not start(router, "r3", 4.0)


def test_foreign_kv_takes_room_beyond_a_tolerance() -> None:
    router = router_with(SMALL, spec(batch_limit=8, kv=1000))
    slack = int(KV_TOLERANCE * 1000)
    for now_s in (1.0, 2.0):
        tell(router, now_s, running=1, waiting=0, kv_tokens_used=900 + slack)
    assert not start(router, "r", 2.0, prompt=150)
    assert start(router, "s", 2.0, prompt=50, decode_tokens_hint=20)


def test_own_load_is_not_foreign() -> None:
    router = router_with(SMALL, spec(batch_limit=8))
    for i in range(3):
        assert start(router, f"r{i}", 0.0)
    for now_s in (1.0, 2.0):
        tell(router, now_s, running=3, waiting=0, kv_tokens_used=60)
    assert (worker(router).active, worker(router).foreign) == (3, 0)


@pytest.mark.parametrize("sequences", [1, 3])
def test_an_end_that_a_late_gauge_still_counts_makes_no_ghost(sequences: int) -> None:
    router = router_with(SMALL, spec(batch_limit=8))
    assert start(router, "r", 0.0, sequences=sequences)
    router.handle(Left("r", Outcome.COMPLETED, 5), 1.0)
    for now_s in (1.0 + LAG_S / 4, 1.0 + LAG_S / 2):
        tell(router, now_s, running=sequences, waiting=0)
        assert worker(router).foreign == 0
    # Still there long after: somebody else's.
    for now_s in (2.0 + LAG_S, 3.0 + LAG_S):
        tell(router, now_s, running=sequences, waiting=0)
    assert worker(router).foreign == sequences


def test_unknown_is_not_zero() -> None:
    router = router_with(SMALL, spec(batch_limit=4))
    for now_s in (1.0, 2.0):
        tell(router, now_s, running=2, waiting=0)
    tell(router, 3.0)
    stats = worker(router)
    assert (stats.foreign, stats.batch_limit, stats.kv_capacity_tokens) == (2, 4, 1000)


def test_a_worker_that_went_down_forgets_what_was_reported() -> None:
    router = router_with(SMALL, spec(batch_limit=2))
    for now_s in (1.0, 2.0):
        tell(router, now_s, running=2, waiting=1)
    router.handle(WorkerChanged("w0", DOWN), 2.0)
    router.handle(WorkerChanged("w0", UP), 2.1)
    assert worker(router).foreign == 0
    assert start(router, "r", 2.1)


def test_a_queue_inside_the_engine_keeps_new_requests_away_until_the_report_is_stale() -> None:
    router = router_with(SMALL, spec())
    tell(router, 1.0, running=1, waiting=1)
    assert not worker(router, 1.0).startable
    assert not start(router, "r", 1.0 + WAITING_TRUST_S)
    assert start(router, "s", 1.1 + WAITING_TRUST_S)


def test_an_own_end_makes_room_for_one_that_waits_inside() -> None:
    router = router_with(SMALL, spec(batch_limit=2))
    assert start(router, "r", 0.0)
    tell(router, 1.0, running=1, waiting=1)
    assert not start(router, "s", 1.0)
    router.handle(Left("r", Outcome.COMPLETED, 5), 1.1)
    assert start(router, "t", 1.1)


def test_capacity_is_learned_when_it_was_not_configured_and_else_kept() -> None:
    router = router_with(SMALL, spec(kv=None))
    assert worker(router).kv_capacity_tokens is None
    tell(router, 1.0, kv_capacity_tokens=50, block_tokens=1)
    assert worker(router).kv_capacity_tokens == 50
    assert refusals(router.handle(ask("r", 1.0, prompt=60), 1.0)) == [("r", "too_large")]
    configured = router_with(SMALL, spec(kv=1000))
    tell(configured, 1.0, kv_capacity_tokens=50)
    assert worker(configured).kv_capacity_tokens == 1000


def test_a_smaller_batch_limit_ends_nothing_and_starts_nothing() -> None:
    router = router_with(SMALL, spec(batch_limit=4))
    for i in range(3):
        assert start(router, f"r{i}", 0.0)
    tell(router, 1.0, batch_limit=2)
    assert (worker(router).active, worker(router).batch_limit) == (3, 2)
    assert not start(router, "late", 1.0)
    for i in range(2):
        router.handle(Left(f"r{i}", Outcome.COMPLETED, 1), 2.0)
    assert start(router, "later", 2.0)


def test_iteration_time_moves_towards_what_is_measured_and_ignores_nonsense() -> None:
    router = router_with(SMALL, spec(iteration_s=0.02))
    tell(router, 1.0, iteration_s=0.0)
    assert worker(router).iteration_s == 0.02
    before = 0.02
    for _ in range(30):
        tell(router, 1.0, iteration_s=0.05)
        assert before < worker(router).iteration_s <= 0.05
        before = worker(router).iteration_s
    assert before == pytest.approx(0.05, rel=0.01)


def test_iteration_time_says_how_many_iterations_fit_into_a_time() -> None:
    router = router_with(SMALL, spec(iteration_s=0.02))
    for _ in range(20):
        # A tenth of a second each: ten iterations, then one.
        for iteration_s in (0.01, 0.1):
            tell(router, 1.0, iteration_s=iteration_s)
            learned_s = worker(router).iteration_s
    # 11 iterations in 0.2 s are 18 ms each; the mean of the two reports would be 55 ms.
    assert learned_s == pytest.approx(0.2 / 11, rel=0.2)


def test_models_are_learned_from_reports() -> None:
    router = router_with(SMALL, spec(models=frozenset({"a"})))
    assert refusals(router.handle(ask("r", model="b"), 0.0)) == [("r", "unknown_model")]
    tell(router, 1.0, models=frozenset({"a", "b"}))
    assert start(router, "s", 1.0, model="b")


def test_a_new_specification_replaces_the_old_one_and_keeps_what_runs() -> None:
    router = router_with(SMALL, spec(batch_limit=4))
    assert start(router, "r", 0.0)
    router.handle(WorkerJoined(spec(batch_limit=1)), 1.0)
    assert (worker(router).active, worker(router).batch_limit) == (1, 1)
    assert not start(router, "s", 1.0)


def test_a_request_that_does_not_stream_is_taken_to_decode_at_the_workers_pace() -> None:
    # 40 tokens each on 60 tokens of KV: the second fits once the first is known to be nearly done.
    config = replace(SMALL, horizon_iterations=64, bucket_iterations=1)
    router = router_with(config, spec(batch_limit=2, kv=60, iteration_s=0.1))
    blind = Request(
        request_id="blind",
        arrival_s=0.0,
        prompt_tokens=0,
        decode_tokens_hint=40,
        decode_tokens_limit=40,
        streams=False,
    )
    router.handle(Arrived(blind), 0.0)
    assert starts(router.tick(0.0)) == [("blind", "w0")]
    assert not start(router, "early", 0.1, prompt=0, decode_tokens_hint=40)
    assert start(router, "late", 3.0, prompt=0, decode_tokens_hint=40)
