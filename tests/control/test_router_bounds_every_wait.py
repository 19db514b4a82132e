"""Nobody waits for ever: refusals with their reasons, ageing, and room reserved for large requests.

The head-of-line test: one request that needs nearly a whole worker's KV, and a stream of small ones
that never lets up. The small ones keep flowing and the large one starts within a stated bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from service.control import (
    ControlConfig,
    Left,
    Outcome,
    Refusal,
    Refuse,
    Request,
    Returned,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
)
from service.control.router import RETURNS_MAX
from tests.control.driving import (
    CENTRAL,
    DOWN,
    POLICIES,
    SMALL,
    UP,
    PlainFleet,
    accounted,
    ask,
    refusals,
    router_with,
    spec,
    starts,
    with_prices,
)

AGEING = ("forward", "forward, zero prices")


def only(commands: list[object]) -> Refuse:
    (command,) = commands
    assert isinstance(command, Refuse)
    return command


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_can_never_fit_is_refused_at_once_with_the_reason(policy: str) -> None:
    router = router_with(POLICIES[policy], spec(kv=100), spec("w1", kv=50))
    refusal = only(router.handle(ask("r", prompt=100), 0.0))
    assert refusal.reason is Refusal.TOO_LARGE
    assert "100 tokens" in refusal.detail
    assert router.handle(ask("s", prompt=99), 0.0) == []
    assert accounted(router, 0.0)


def test_room_counts_in_whole_blocks() -> None:
    router = router_with(SMALL, spec(kv=100, block=16))  # six blocks of 16: 96 tokens
    assert refusals(router.handle(ask("r", prompt=96), 0.0)) == [("r", "too_large")]
    assert router.handle(ask("s", prompt=95), 0.0) == []


@pytest.mark.parametrize(
    ("served", "told"),
    [
        ((), ""),
        (("b", "a"), "; served: a, b"),
        ([f"m{n}" for n in range(9)], "; served: m0, m1, m2, m3, m4 and 4 more"),
    ],
    ids=["none", "few", "many"],
)
def test_an_unknown_model_is_told_what_is_served(served: Sequence[str], told: str) -> None:
    router = router_with(SMALL)
    for place, model in enumerate(served):
        router.handle(WorkerJoined(spec(f"w{place}", models=frozenset({model}))), 0.0)
    if not served:
        router.handle(WorkerJoined(spec(models=frozenset())), 0.0)
    refusal = only(router.handle(ask("r", model="x"), 0.0))
    assert refusal.detail == f"no worker serves the model 'x'{told}"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unknown_model_is_refused_at_once_but_not_before_any_worker_is_known(
    policy: str,
) -> None:
    router = router_with(POLICIES[policy])
    assert router.handle(ask("early", model="b"), 0.0) == []
    router.handle(WorkerJoined(spec(models=frozenset({"a"}))), 0.0)
    refusal = only(router.handle(ask("r", model="b"), 0.0))
    assert refusal.reason is Refusal.UNKNOWN_MODEL
    assert "'b'" in refusal.detail
    assert router.tick(0.0) == []
    assert refusals(router.tick(SMALL.no_worker_hold_s)) == [("early", "no_worker")]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_queue_refuses_the_newcomer_and_keeps_the_others(policy: str) -> None:
    router = router_with(POLICIES[policy])
    for i in range(SMALL.queue_max):
        assert router.handle(ask(f"r{i}"), 0.0) == []
    refusal = only(router.handle(ask("late"), 0.0))
    assert (refusal.request_id, refusal.reason) == ("late", Refusal.QUEUE_FULL)
    router.handle(Left("r0", Outcome.CANCELLED), 0.0)
    assert router.handle(ask("next"), 0.0) == []
    assert router.stats(0.0).waiting == SMALL.queue_max


@pytest.mark.parametrize("policy", CENTRAL)
def test_a_wait_ends_with_a_refusal_when_its_time_is_up(policy: str) -> None:
    router = router_with(POLICIES[policy], spec(batch_limit=1))
    router.handle(ask("running"), 0.0)
    router.tick(0.0)
    router.handle(ask("patient"), 0.0)
    router.handle(ask("hasty", max_wait_s=1.0), 0.0)
    assert router.next_tick_s(0.0) == 1.0
    assert router.tick(0.9) == []
    refusal = only(router.tick(1.0))
    assert (refusal.request_id, refusal.reason) == ("hasty", Refusal.WAITED_TOO_LONG)
    assert "1.0 s" in refusal.detail
    assert router.next_tick_s(1.0) == SMALL.max_wait_s
    assert refusals(router.tick(SMALL.max_wait_s)) == [("patient", "waited_too_long")]
    assert router.next_tick_s(SMALL.max_wait_s) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_without_any_worker_a_request_is_held_for_a_while_and_then_refused(policy: str) -> None:
    router = router_with(POLICIES[policy])
    router.handle(ask("r"), 1.0)
    # Its arrival was stamped 0.
    assert router.next_tick_s(1.0) == SMALL.no_worker_hold_s
    assert router.tick(4.9) == []
    assert only(router.tick(5.0)).reason is Refusal.NO_WORKER


@pytest.mark.parametrize("policy", [name for name in POLICIES if "fixed" not in name])
def test_the_hold_begins_when_the_last_worker_went_down(policy: str) -> None:
    router = router_with(POLICIES[policy], spec(batch_limit=1))
    router.handle(ask("first"), 0.0)
    router.tick(0.0)
    router.handle(WorkerChanged("w0", DOWN), 8.0)
    router.handle(ask("second"), 8.0)
    router.handle(Returned("first"), 8.0)
    assert router.tick(8.0 + 4.9) == []
    router.handle(WorkerChanged("w0", UP), 12.95)
    assert len(starts(router.tick(12.95))) >= 1


def test_the_hold_begins_when_the_last_worker_of_its_model_went_down() -> None:
    # A worker of another model stays up, and is no reason for impatience.
    mine = spec("mine", batch_limit=1, models=frozenset({"a"}))
    router = router_with(SMALL, mine, spec("other", models=frozenset({"b"})))
    router.handle(ask("running", model="a"), 0.0)
    router.tick(0.0)
    router.handle(ask("r", model="a"), 0.0)
    router.handle(WorkerChanged("mine", DOWN), 8.0)
    assert router.tick(8.1) == []
    assert router.tick(12.9) == []
    assert refusals(router.tick(13.0)) == [("r", "no_worker")]


@pytest.mark.parametrize("policy", CENTRAL)
def test_a_request_that_every_worker_turns_away_is_refused_in_the_end(policy: str) -> None:
    specs = [spec(f"w{g}") for g in range(RETURNS_MAX + 2)]
    router = router_with(POLICIES[policy], *specs)
    router.handle(ask("r"), 0.0)
    commands: list[object] = []
    tried: list[str] = []
    while not commands:
        ((_, worker_id),) = starts(router.tick(0.0))
        tried.append(worker_id)
        commands = list(router.handle(Returned("r"), 0.0))
    assert only(commands).reason is Refusal.NO_WORKER
    assert len(set(tried)) == len(tried) == RETURNS_MAX + 1
    assert accounted(router, 0.0)


def test_what_is_not_held_is_a_key_error_and_changes_nothing() -> None:
    router = router_with(SMALL, spec())
    router.handle(ask("r"), 0.0)
    for event in (Left("x", Outcome.FAILED), Returned("r"), WorkerGone("x"), ask("r")):
        with pytest.raises(KeyError):
            router.handle(event, 0.0)  # type: ignore[arg-type]
    stats = router.stats(0.0)
    assert (stats.entered, stats.waiting, stats.running) == (1, 1, 0)
    assert accounted(router, 0.0)


def test_requests_on_a_worker_that_was_removed_still_end_through_their_connections() -> None:
    router = router_with(SMALL, spec("w0"), spec("w1"))
    for name in ("a", "b"):
        router.handle(ask(name), 0.0)
    placed = dict(starts(router.tick(0.0)))
    router.handle(WorkerGone(placed["a"]), 0.1)
    (left,) = router.stats(0.1).workers
    assert left.active == list(placed.values()).count(left.worker_id)
    router.handle(Left("a", Outcome.FAILED), 0.2)
    router.handle(Left("b", Outcome.COMPLETED, 3), 0.2)
    stats = router.stats(0.2)
    assert stats.running == 0
    assert stats.ended == {Outcome.COMPLETED: 1, Outcome.FAILED: 1, Outcome.CANCELLED: 0}
    assert accounted(router, 0.2)


@pytest.mark.parametrize("policy", [*AGEING, "central_shortest_first"])
def test_whoever_waited_the_age_bound_goes_first_oldest_first(policy: str) -> None:
    router = router_with(POLICIES[policy], spec(batch_limit=1))
    router.handle(ask("running"), 0.0)
    router.tick(0.0)
    router.handle(ask("long", decode_tokens_hint=60), 0.0)
    router.handle(ask("longer", 0.1, decode_tokens_hint=70), 0.1)
    router.handle(ask("short", SMALL.age_bound_s, decode_tokens_hint=1), SMALL.age_bound_s)
    order = []
    for now_s in (SMALL.age_bound_s + 0.1, SMALL.age_bound_s + 0.2, SMALL.age_bound_s + 0.3):
        running = "running" if not order else order[-1]
        router.handle(Left(running, Outcome.COMPLETED, 1), now_s)
        order += [name for name, _ in starts(router.tick(now_s))]
    assert order == ["long", "longer", "short"]


AGE_BOUND_S = 1.0
ITERATION_S = 0.02
LOOK_AHEAD = {"horizon_iterations": 512, "bucket_iterations": 16}


def head_of_line(
    config: ControlConfig, workers: int, lengths: tuple[int, int], seed: int
) -> PlainFleet:
    """A full house of small requests, one large one at step 50, and 230 steps more of small ones.

    Each worker has room for 400 tokens; a small request holds about 30 and there are always more of
    them than fit; the large one needs 360.
    """
    rng = np.random.default_rng(seed)
    config = replace(
        with_prices(config, refresh_s=0.1), **LOOK_AHEAD, age_bound_s=AGE_BOUND_S, queue_max=10**6
    )
    specs = [spec(f"w{g}", batch_limit=20, kv=400) for g in range(workers)]
    fleet = PlainFleet(router_with(config, *specs), ITERATION_S)
    for step in range(280):
        waiting = fleet.router.stats(fleet.now_s).waiting
        for i in range(max(0, 6 - waiting)):
            length = int(rng.integers(lengths[0], lengths[1] + 1))
            fleet.arrive(small(f"small{step}.{i}", fleet.now_s, length), length)
        if step == 50:
            large = Request(
                request_id="large",
                arrival_s=fleet.now_s,
                prompt_tokens=280,
                decode_tokens_hint=80,
            )
            fleet.arrive(large, 80)
        fleet.tick()
        fleet.iterate()
    return fleet


def small(name: str, now_s: float, length: int) -> Request:
    return Request(request_id=name, arrival_s=now_s, prompt_tokens=20, decode_tokens_hint=length)


@pytest.mark.parametrize(
    ("policy", "workers", "lengths"),
    [
        ("forward", 1, (1, 8)),
        ("forward", 1, (1, 16)),
        ("forward", 1, (10, 40)),
        ("forward", 3, (1, 16)),
        ("forward, zero prices", 1, (10, 40)),
        ("forward, zero prices", 1, (60, 64)),
        ("forward, zero prices", 3, (10, 40)),
    ],
)
def test_a_large_request_starts_while_small_ones_keep_flowing(
    policy: str, lengths: tuple[int, int], workers: int
) -> None:
    longest = lengths[1]
    fleet = head_of_line(POLICIES[policy], workers, lengths, seed=5)
    arrived_s = 50 * ITERATION_S
    waited = (fleet.started_s["large"] - arrived_s - AGE_BOUND_S) / ITERATION_S
    # Once aged it waits for those that run, rounded up to buckets, and for nobody else.
    assert waited <= longest + LOOK_AHEAD["bucket_iterations"]
    assert max(fleet.peak_kv.values()) <= 400
    # Meanwhile, from the large one's arrival to its end, others were started all the time.
    began = sorted(s for name, s in fleet.started_s.items() if name != "large")
    between = np.diff([s for s in began if arrived_s <= s]) / ITERATION_S
    quiet = longest + 80 + 2 * LOOK_AHEAD["bucket_iterations"] if workers == 1 else longest
    assert between.max() <= quiet


@pytest.mark.parametrize("policy", AGEING)
def test_an_aged_request_that_fits_beside_reservations_does_not_wait_for_them(policy: str) -> None:
    # Three aged giants want a worker each; an aged dwarf and a young one need next to nothing.
    config = replace(POLICIES[policy], **LOOK_AHEAD, age_bound_s=1.0)
    router = router_with(config, spec(batch_limit=8, kv=1000))
    router.handle(ask("running", prompt=500, decode_tokens_hint=400), 0.0)
    router.tick(0.0)
    for i in range(3):
        router.handle(ask(f"giant{i}", 0.0, prompt=800, decode_tokens_hint=100), 0.0)
    router.handle(ask("dwarf", 0.0, prompt=10, decode_tokens_hint=20), 0.0)
    router.handle(ask("young", 1.5, prompt=10, decode_tokens_hint=20), 1.5)
    assert [name for name, _ in starts(router.tick(1.6))] == ["dwarf", "young"]
