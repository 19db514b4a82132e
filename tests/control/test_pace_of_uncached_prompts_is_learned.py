"""How fast workers compute prompts is learned from their first tokens, each within bounds."""

from __future__ import annotations

import pytest

from service.control import FirstToken, Left, Outcome, Role, Router, WorkerJoined, WorkerSpec
from service.control.uncached_pace import OWN_ITERATIONS, PENDING_MAX, RATIO_MAX, UncachedPace
from tests.control.driving import ask, starts
from tests.control.test_cached_prompts_draw_requests_until_a_worker_is_hot import (
    CONFIG,
    fleet,
    prefix,
)

TOLD = 10_000.0
ITERATION_S = 0.02


def compute(pace: UncachedPace, worker_id: str, rate: float, *, prompts: int = 60) -> None:
    """Let a worker compute prompts of many lengths one after the other."""
    for number in range(prompts):
        tokens, began_s = 300.0 + 40 * (number % 30), 10.0 * number
        pace.start(f"{worker_id}-{number}", worker_id, tokens, began_s)
        end_s = began_s + tokens / rate + OWN_ITERATIONS * ITERATION_S
        pace.computed(f"{worker_id}-{number}", end_s, ITERATION_S)


@pytest.mark.parametrize("rate", [800.0, 10_000.0, 90_000.0])
def test_a_workers_own_pace_is_found_whatever_was_set(rate: float) -> None:
    pace = UncachedPace(TOLD)
    assert pace.tokens_per_s(["w0"]) == pytest.approx([TOLD])
    compute(pace, "w0", rate)
    assert pace.tokens_per_s(["w0"]) == pytest.approx([rate], rel=0.1)


def test_workers_differ_and_a_new_one_is_taken_for_one_like_the_others() -> None:
    pace = UncachedPace(TOLD)
    compute(pace, "slow", 2_000.0)
    compute(pace, "fast", 20_000.0)
    slow, fast, new = pace.tokens_per_s(["slow", "fast", "new"])
    assert (slow, fast) == (pytest.approx(2_000.0, rel=0.1), pytest.approx(20_000.0, rel=0.2))
    assert slow < new < fast
    pace.forget("fast")
    assert pace.tokens_per_s(["slow", "new"])[1] == pytest.approx(2_000.0, rel=0.2)


def test_a_pace_that_changes_is_followed() -> None:
    pace = UncachedPace(TOLD)
    compute(pace, "w0", 20_000.0, prompts=300)
    compute(pace, "w0", 5_000.0, prompts=300)
    assert pace.tokens_per_s(["w0"])[0] == pytest.approx(5_000.0, rel=0.15)


def test_prompts_of_a_worker_that_began_anew_teach_nothing() -> None:
    pace = UncachedPace(TOLD)
    pace.start("before", "w0", 5000.0, 0.0)
    pace.forget("w0")
    pace.start("after", "w0", 1000.0, 1.0)
    assert pace._seen["w0"].pending == 1000.0
    pace.computed("before", 100.0, ITERATION_S)
    assert pace._seen["w0"].pending == 1000.0
    assert pace.tokens_per_s(["w0"]) == pytest.approx([TOLD])


def test_absurd_times_stay_within_bounds() -> None:
    pace = UncachedPace(TOLD)
    for number in range(100):
        pace.start(f"r{number}", "w0", 5000.0, 0.0)
        pace.computed(f"r{number}", 1e9, ITERATION_S)
        pace.start(f"q{number}", "w1", 5000.0, 0.0)
        pace.computed(f"q{number}", 0.0, ITERATION_S)
    slowest, other = pace.tokens_per_s(["w0", "w1"])
    assert slowest == TOLD / RATIO_MAX
    assert TOLD / RATIO_MAX <= other <= TOLD * RATIO_MAX


def test_short_prompts_and_those_behind_others_tell_nothing() -> None:
    pace = UncachedPace(TOLD)
    pace.start("short", "w0", 20.0, 0.0)
    pace.computed("short", 5.0, ITERATION_S)
    pace.start("first", "w0", 1000.0, 10.0)
    pace.start("behind", "w0", 1000.0, 10.0)
    assert pace._seen["w0"].pending == 2000.0
    pace.drop("first")
    pace.computed("behind", 99.0, ITERATION_S)
    assert pace.tokens_per_s(["w0"]) == pytest.approx([TOLD])
    assert pace._seen["w0"].pending == 0.0


def test_what_is_followed_has_a_bound() -> None:
    pace = UncachedPace(TOLD)
    for number in range(PENDING_MAX + 10):
        pace.start(str(number), "w0", 1.0, 0.0)
    assert pace._seen["w0"].pending == PENDING_MAX
    for number in range(PENDING_MAX + 10):
        pace.drop(str(number))
    assert pace._seen["w0"].pending == 0.0


def test_the_router_tells_the_pace_it_has_seen() -> None:
    """A prompt of 6,400 tokens that takes 2.05 s on the first worker."""
    router, worker_id = fleet(CONFIG, 1), "w0"
    for turn in range(8):
        now_s = 10.0 * turn
        event = ask(f"t{turn}", now_s, prompt=6400, prefix=prefix(f"p{turn}", 100))
        router.handle(event, now_s)
        assert starts(router.tick(now_s)) == [(f"t{turn}", worker_id)]
        router.handle(FirstToken(f"t{turn}"), now_s + 2.05)
        router.handle(Left(f"t{turn}", Outcome.COMPLETED, 8), now_s + 3.0)
    told = router.stats(99.0).affinity.prefill_tokens_per_s
    assert told[worker_id] == pytest.approx(6400 / 2.05, rel=0.15)


def test_a_decode_worker_has_no_prompts_to_compute() -> None:
    router = Router(CONFIG)
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        spec = WorkerSpec(worker_id=name, batch_limit=8, kv_capacity_tokens=100_000, role=role)
        router.handle(WorkerJoined(spec), 0.0)
    router.handle(ask("first", 0.0, prompt=900, prefix=prefix("talk", 12)), 0.0)
    assert [worker_id for _, worker_id in starts(router.tick(0.0))] == ["d"]
    assert router._affinity._pace.where("first") == ""
