"""A prefill starts only when a decode slot will be there, and what it pins is never forgotten.

Engines here are events written by hand: the tests say when a prompt is computed and a token comes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.control import (
    Command,
    FirstToken,
    HandoffConfig,
    Kernel,
    Left,
    Outcome,
    PolicyName,
    Prefill,
    Prefilled,
    PrefillFailed,
    PrefillStats,
    Progressed,
    Returned,
    Role,
    Router,
    Start,
    WorkerChanged,
    WorkerGone,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
    WorkerState,
)
from service.control.prefill import PrefillPace
from tests.control.driving import CENTRAL, POLICIES, SMALL, accounted, ask, refusals, router_with

ITERATION_S = 0.02
FCFS = replace(SMALL, policy=PolicyName.CENTRAL_FCFS, max_wait_s=60.0)
HANDOFF = HandoffConfig(
    prefill_tokens_max=100, prefill_tokens_per_s=1000.0, lease_s=30.0, transfer_s=1.0
)


def worker(worker_id: str, role: Role, batch_limit: int = 2, kv: int | None = 1000) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        batch_limit=batch_limit,
        kv_capacity_tokens=kv,
        block_tokens=1,
        iteration_s=ITERATION_S,
        role=role,
    )


P0, P1 = worker("p0", Role.PREFILL), worker("p1", Role.PREFILL)
D0 = worker("d0", Role.DECODE)


def pair(handoff: HandoffConfig = HANDOFF, *specs: WorkerSpec) -> Router:
    """A router in front of a prefill and a decode worker of two slots, or of these workers."""
    return router_with(replace(FCFS, handoff=handoff), *(specs or (P0, D0)))


def legs(commands: list[Command]) -> list[tuple[str, str, str]]:
    """(request, prefill worker, decode worker) of the starts among some commands."""
    return [(c.request_id, c.prefill_id, c.worker_id) for c in commands if isinstance(c, Start)]


def prefiller(router: Router, worker_id: str = "p0", now_s: float = 0.0) -> PrefillStats:
    return next(one for one in router.stats(now_s).prefillers if one.worker_id == worker_id)


def pinned(router: Router, now_s: float = 0.0) -> tuple[int, int]:
    """(KV tokens charged to p0, of them orphaned)."""
    stats = prefiller(router, now_s=now_s)
    return stats.kv_tokens, stats.orphaned_kv_tokens


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_starts_a_request_on_a_pair(name: str) -> None:
    router = router_with(replace(POLICIES[name], handoff=HANDOFF), P0, D0)
    router.handle(ask("a"), 0.0)
    assert legs(router.tick(0.0)) == [("a", "p0", "d0")]
    router.handle(Prefilled("a"), 0.1)
    router.handle(FirstToken("a"), 0.2)
    router.handle(Left("a", Outcome.COMPLETED, 4), 0.3)
    assert accounted(router, 0.3)
    assert prefiller(router).legs == 0
    assert pinned(router) == (0, 0)


@pytest.mark.parametrize("name", CENTRAL)
def test_no_prefill_starts_while_no_decode_slot_will_be_free(name: str) -> None:
    router = router_with(replace(POLICIES[name], handoff=HANDOFF), P0, D0)
    for request_id in "abc":
        router.handle(ask(request_id, decode_tokens_hint=50), 0.0)
    assert len(legs(router.tick(0.0))) == 2
    for request_id in "ab":
        router.handle(Prefilled(request_id), 0.05)
        router.handle(FirstToken(request_id), 0.06)
    assert legs(router.tick(0.06)) == []
    assert prefiller(router).legs == 0
    router.handle(Left("a", Outcome.COMPLETED, 50), 1.0)
    assert legs(router.tick(1.0)) == [("c", "p0", "d0")]


def busy_pair(handoff: HandoffConfig) -> Router:
    """Two requests of 100 tokens decode; a third with a prompt of 80 tokens waits."""
    router = pair(replace(handoff, prefill_tokens_per_s=100.0))
    for request_id in "ab":
        router.handle(ask(request_id, decode_tokens_hint=100, decode_tokens_limit=100), 0.0)
    assert len(legs(router.tick(0.0))) == 2
    for request_id in "ab":
        router.handle(Prefilled(request_id), 0.2)
        router.handle(FirstToken(request_id), 0.2)
    router.handle(ask("c", 0.3, prompt=80, decode_tokens_hint=8), 0.3)
    return router


def seen(router: Router, tokens: int, now_s: float) -> list[tuple[str, str, str]]:
    router.handle(Progressed({"a": tokens, "b": tokens}), now_s)
    return legs(router.tick(now_s))


def test_a_prefill_starts_when_a_slot_will_be_free_at_its_end() -> None:
    router = busy_pair(HANDOFF)
    # A prompt of 80 tokens takes about 0.8 s, 40 iterations; a and b have 98 left, then 10.
    assert seen(router, 2, 0.4) == []
    assert seen(router, 90, 2.2) == [("c", "p0", "d0")]


def test_without_a_lead_the_slot_must_be_free_when_the_prefill_starts() -> None:
    router = busy_pair(replace(HANDOFF, lead_max_s=0.0))
    assert seen(router, 90, 2.2) == []
    assert seen(router, 99, 2.3) == []
    router.handle(Left("a", Outcome.COMPLETED, 100), 2.4)
    assert legs(router.tick(2.4)) == [("c", "p0", "d0")]


def test_slots_that_become_free_within_the_lead_are_given_out_once() -> None:
    router = busy_pair(HANDOFF)
    for request_id in "def":
        router.handle(ask(request_id, 0.3, prompt=80, decode_tokens_hint=8), 0.3)
    started = seen(router, 90, 2.2)
    # c and d will have the two slots; e and f wait.
    assert [request_id for request_id, _, _ in started] == ["c", "d"]


def test_prompts_are_sent_while_less_than_the_bound_is_unanswered() -> None:
    router = pair(HANDOFF, P0, worker("d0", Role.DECODE, batch_limit=8))
    for request_id in "abc":
        router.handle(ask(request_id, prompt=60), 0.0)
    # 60 < 100: a second one goes; 120 >= 100: a third does not.
    assert [one[0] for one in legs(router.tick(0.0))] == ["a", "b"]
    assert (prefiller(router).legs, prefiller(router).leg_tokens) == (2, 120)
    router.handle(Prefilled("a"), 0.1)
    assert [one[0] for one in legs(router.tick(0.1))] == ["c"]


def test_the_prefill_worker_that_is_done_first_is_chosen() -> None:
    router = pair(HANDOFF, P0, P1, worker("d0", Role.DECODE, batch_limit=8))
    for request_id, prompt in (("a", 50), ("b", 10), ("c", 10)):
        router.handle(ask(request_id, prompt=prompt), 0.0)
    chosen = {request_id: prefill for request_id, prefill, _ in legs(router.tick(0.0))}
    assert chosen == {"a": "p0", "b": "p1", "c": "p1"}


def test_memory_is_charged_to_the_prefill_worker_until_the_first_token() -> None:
    router = pair()
    router.handle(ask("a", prompt=40), 0.0)
    router.tick(0.0)
    assert pinned(router) == (40, 0)
    router.handle(Prefilled("a"), 0.1)
    assert pinned(router) == (40, 0)
    router.handle(FirstToken("a"), 0.2)
    assert pinned(router) == (0, 0)


def test_memory_of_a_request_that_does_not_stream_is_charged_for_the_transfer_time() -> None:
    router = pair()
    router.handle(ask("a", prompt=40, streams=False), 0.0)
    router.tick(0.0)
    router.handle(Prefilled("a"), 0.1)
    router.tick(1.0)
    assert pinned(router) == (40, 0)
    router.tick(1.2)
    assert pinned(router) == (0, 0)


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.FAILED])
def test_what_nobody_fetches_is_charged_until_the_lease_ends(outcome: Outcome) -> None:
    router = pair()
    router.handle(ask("a", prompt=40), 0.0)
    router.tick(0.0)
    router.handle(Prefilled("a"), 0.1)
    router.handle(Left("a", outcome), 1.0)
    assert pinned(router) == (40, 40)
    router.tick(30.9)
    assert pinned(router) == (40, 40)
    router.tick(31.1)
    assert pinned(router) == (0, 0)
    assert accounted(router, 31.1)


def test_a_client_that_leaves_during_the_prefill_frees_everything_at_once() -> None:
    router = pair()
    router.handle(ask("a", prompt=40), 0.0)
    router.tick(0.0)
    router.handle(Left("a", Outcome.CANCELLED), 0.05)
    assert pinned(router) == (0, 0)
    assert prefiller(router).legs == 0
    assert router.stats(0.1).workers[0].active == 0


@pytest.mark.parametrize(("kept", "orphaned"), [(False, 0), (True, 40)])
def test_a_failed_prefill_is_tried_on_another_worker(kept: bool, orphaned: int) -> None:
    router = pair(HANDOFF, P0, P1, D0)
    router.handle(ask("a", prompt=40), 0.0)
    assert legs(router.tick(0.0)) == [("a", "p0", "d0")]
    router.handle(PrefillFailed("a", kept), 0.1)
    assert router.handle(Returned("a", "p0"), 0.1) == []
    assert pinned(router) == (orphaned, orphaned)
    assert legs(router.tick(0.1)) == [("a", "p1", "d0")]
    assert accounted(router, 0.1)


def test_a_decode_worker_that_did_not_take_it_leaves_an_orphan_and_leg_1_is_redone() -> None:
    router = pair(HANDOFF, P0, D0, worker("d1", Role.DECODE))
    router.handle(ask("a", prompt=40), 0.0)
    ((_, _, first),) = legs(router.tick(0.0))
    router.handle(Prefilled("a"), 0.1)
    router.handle(Returned("a"), 0.2)
    assert pinned(router) == (40, 40)
    ((_, prefill_id, second),) = legs(router.tick(0.2))
    assert prefill_id == "p0"
    assert {first, second} == {"d0", "d1"}
    assert pinned(router) == (80, 40)


def test_orphans_leave_less_room_for_prompts() -> None:
    small = worker("p0", Role.PREFILL, kv=100)
    router = pair(HANDOFF, small, worker("d0", Role.DECODE, batch_limit=8))
    router.handle(ask("a", prompt=60), 0.0)
    router.tick(0.0)
    router.handle(Prefilled("a"), 0.1)
    router.handle(Left("a", Outcome.CANCELLED), 0.1)
    router.handle(ask("b", 0.1, prompt=60), 0.1)
    assert legs(router.tick(0.2)) == []
    assert legs(router.tick(30.2)) == [("b", "p0", "d0")]


def test_a_prefill_worker_whose_engine_restarted_holds_nothing() -> None:
    router = pair()
    router.handle(ask("a", prompt=40), 0.0)
    router.tick(0.0)
    router.handle(Prefilled("a"), 0.1)
    router.handle(Left("a", Outcome.CANCELLED), 0.1)
    router.handle(WorkerReported("p0", WorkerReport(restarted=True), 0.5), 0.5)
    assert pinned(router) == (0, 0)


def test_memory_the_engine_reports_beyond_ours_counts_while_the_report_is_fresh() -> None:
    router = pair(HANDOFF, worker("p0", Role.PREFILL, kv=100), worker("d0", Role.DECODE, 8))
    router.handle(ask("a", prompt=10), 0.0)
    router.tick(0.0)
    router.handle(WorkerReported("p0", WorkerReport(kv_tokens_used=80), 0.1), 0.1)
    router.handle(ask("b", 0.1, prompt=30), 0.1)
    assert legs(router.tick(0.1)) == []
    assert legs(router.tick(2.2)) == [("b", "p0", "d0")]


@pytest.mark.parametrize("fields", [{"whole": True}, {"sequences": 2}])
def test_what_cannot_be_split_is_kept_off_the_pair(fields: dict[str, object]) -> None:
    both = worker("b0", Role.BOTH)
    router = pair(HANDOFF, P0, D0, both)
    router.handle(ask("a", **fields), 0.0)
    assert legs(router.tick(0.0)) == [("a", "", "b0")]
    # Where nothing else serves it, the decode worker computes its prompt, which is counted.
    router = pair()
    router.handle(ask("a", **fields), 0.0)
    assert legs(router.tick(0.0)) == [("a", "", "d0")]
    assert router.stats(0.0).whole_on_decode == 1


def test_a_worker_that_does_both_needs_no_prefill_worker() -> None:
    router = pair(HANDOFF, worker("b0", Role.BOTH), D0)
    router.handle(ask("a"), 0.0)
    assert legs(router.tick(0.0)) == [("a", "", "b0")]


def test_without_a_prefill_worker_requests_wait_for_one_and_are_then_refused() -> None:
    router = pair()
    router.handle(WorkerChanged("p0", WorkerState.DOWN), 0.0)
    router.handle(ask("a", 1.0), 1.0)
    assert router.tick(1.0) == []
    assert refusals(router.tick(6.1)) == [("a", "no_worker")]
    router.handle(ask("b", 7.0), 7.0)
    router.handle(WorkerChanged("p0", WorkerState.UP), 7.0)
    assert legs(router.tick(7.0)) == [("b", "p0", "d0")]


def test_a_prefill_worker_that_goes_for_good_takes_no_request_with_it() -> None:
    router = pair(HANDOFF, P0, P1, D0)
    router.handle(ask("a"), 0.0)
    assert legs(router.tick(0.0)) == [("a", "p0", "d0")]
    router.handle(WorkerGone("p0"), 0.1)
    router.handle(PrefillFailed("a", kept=True), 0.2)
    router.handle(Returned("a", "p0"), 0.2)
    assert legs(router.tick(0.2)) == [("a", "p1", "d0")]
    assert accounted(router, 0.2)


def test_a_pair_is_priced_by_the_decode_only_kernel() -> None:
    router = pair()
    assert router._sight.kernel is Kernel.DECODE_ONLY
    mixed = pair(HANDOFF, P0, D0, worker("b0", Role.BOTH))
    assert mixed._sight.kernel is Kernel.MIXED


# The paper's setting: prefill first, then queue.

HOLD = replace(HANDOFF, hold_s=2.0)


def held(router: Router) -> None:
    """Three requests come; all are prefilled, two decode, one waits for a slot."""
    for request_id in "abc":
        router.handle(ask(request_id, decode_tokens_hint=20), 0.0)
    commands = router.tick(0.0)
    assert [(c.request_id, c.worker_id) for c in commands if isinstance(c, Prefill)] == [
        ("a", "p0"),
        ("b", "p0"),
    ]
    for request_id in "ab":
        router.handle(Prefilled(request_id), 0.1)
    commands = router.tick(0.1)
    assert legs(commands) == [("a", "", "d0"), ("b", "", "d0")]
    assert [c.request_id for c in commands if isinstance(c, Prefill)] == ["c"]
    router.handle(Prefilled("c"), 0.2)
    assert legs(router.tick(0.2)) == []
    assert (router.stats(0.2).waiting, router.stats(0.2).running) == (1, 2)


def test_with_a_hold_requests_queue_after_their_prefill() -> None:
    router = pair(HOLD)
    held(router)
    router.handle(Left("a", Outcome.COMPLETED, 20), 1.0)
    assert router.tick(1.0) == [Start("c", "d0", handed=True)]
    assert accounted(router, 1.0)


def test_a_hold_that_is_passed_redoes_the_prefill_with_a_slot_set_aside() -> None:
    router = pair(HOLD)
    held(router)
    assert router.tick(3.0) == []
    assert router.stats(3.0).holds_passed == 1
    for request_id in "ab":
        router.handle(FirstToken(request_id), 3.0)
    assert pinned(router, 3.0) == (10, 10)
    router.handle(Left("a", Outcome.COMPLETED, 20), 3.5)
    assert legs(router.tick(3.5)) == [("c", "p0", "d0")]
    assert router.stats(3.5).prefills == 4


def test_a_client_that_leaves_while_held_leaves_an_orphan_and_nothing_else() -> None:
    router = pair(HOLD)
    held(router)
    for request_id in "ab":
        router.handle(FirstToken(request_id), 0.3)
    router.handle(Left("c", Outcome.CANCELLED), 0.5)
    assert pinned(router, 0.5) == (10, 10)
    assert accounted(router, 0.5)
    router.handle(ask("d", 0.6), 0.6)
    router.tick(0.6)
    router.handle(Left("d", Outcome.CANCELLED), 0.7)
    assert pinned(router, 0.7) == (10, 10)
    assert accounted(router, 0.7)


def test_a_failed_prefill_of_a_held_request_is_tried_again() -> None:
    router = pair(HOLD, P0, P1, D0)
    router.handle(ask("a"), 0.0)
    (command,) = router.tick(0.0)
    assert isinstance(command, Prefill)
    router.handle(PrefillFailed("a"), 0.1)
    router.handle(Returned("a", command.worker_id), 0.1)
    (again,) = router.tick(0.1)
    assert isinstance(again, Prefill)
    assert {command.worker_id, again.worker_id} == {"p0", "p1"}
    assert accounted(router, 0.1)


def test_the_pace_of_prefills_is_learned_as_a_base_and_a_rate() -> None:
    pace, rng = PrefillPace(1000.0), np.random.default_rng(0)
    assert pace.predict_s(500) == pytest.approx(0.5)
    for tokens in rng.integers(10, 4000, size=200):
        pace.observe(float(tokens), 0.015 + tokens / 8000.0)
    assert pace.predict_s(20) == pytest.approx(0.0175, rel=0.05)
    assert pace.predict_s(4000) == pytest.approx(0.515, rel=0.02)
    assert pace.tokens_per_s == pytest.approx(8000.0, rel=0.02)


def test_the_pace_is_never_negative_whatever_is_observed() -> None:
    pace = PrefillPace(1000.0)
    for tokens, elapsed_s in ((4000.0, 0.001), (10.0, 5.0), (20.0, 0.0), (4000.0, 0.002)) * 20:
        pace.observe(tokens, elapsed_s)
        assert all(pace.predict_s(size) >= 0 for size in (0, 1, 100, 100_000))
        assert pace.tokens_per_s > 0
