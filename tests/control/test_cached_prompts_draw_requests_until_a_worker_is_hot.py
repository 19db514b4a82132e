"""Affinity: cached prompt tokens are a reward, and a hot worker's price outbids them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control import (
    AffinityConfig,
    ControlConfig,
    FirstToken,
    Left,
    Outcome,
    Prefix,
    Role,
    Router,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
)
from service.control.columns import Usage
from service.control.prefix_cache import CHUNKS_MAX, PrefixCache
from tests.control.driving import DOWN, UP, ask, router_with, spec, starts

CHUNK = 64
CONFIG = ControlConfig(horizon_iterations=1024, slow_start_s=0.0)
OFF = replace(CONFIG, affinity=AffinityConfig(weight=0.0))


def prefix(name: str, chunks: int, session: int = 0) -> Prefix:
    """A prompt of so many chunks; prompts of one name have their beginning in common."""
    hashes = tuple(hash((name, place)) for place in range(chunks))
    return Prefix(hashes, tuple(CHUNK * (place + 1) for place in range(chunks)), session)


def fleet(config: ControlConfig, workers: int = 2, batch_limit: int = 8) -> Router:
    """Equal workers."""
    specs = (spec(f"w{g}", batch_limit, kv=100_000, block=16) for g in range(workers))
    return router_with(config, *specs)


def send(router: Router, name: str, head: Prefix, now_s: float, answer: int = 64) -> str:
    """Let a request come, and say where it was started."""
    event = ask(
        name, now_s, prompt=CHUNK * len(head.hashes) or 500, decode_tokens_hint=answer, prefix=head
    )
    assert router.handle(event, now_s) == []
    ((_, worker_id),) = starts(router.tick(now_s))
    return worker_id


def finish(router: Router, name: str, now_s: float, answer: int = 64) -> None:
    """Let a started request end well."""
    router.handle(FirstToken(name), now_s)
    router.handle(Left(name, Outcome.COMPLETED, answer), now_s)


def converse(router: Router, turns: int, busy: int = 1) -> list[str]:
    """One conversation; before each turn other requests take slots on its last worker."""
    chosen: list[str] = []
    for turn in range(turns):
        chosen.append(send(router, f"t{turn}", prefix("talk", 40 * (turn + 1)), float(turn)))
        finish(router, f"t{turn}", turn + 0.5)
        for number in range(busy):
            router.handle(
                ask(f"b{turn}-{number}", turn + 0.6, prompt=16, pinned_worker=chosen[-1]),
                turn + 0.6,
            )
        router.tick(turn + 0.6)
    return chosen


def test_a_conversation_stays_where_its_prompt_is_cached() -> None:
    """Without the reward each turn goes to the emptier worker."""
    assert len(set(converse(fleet(CONFIG), 4))) == 1
    assert len(set(converse(fleet(OFF), 4))) == 2


def test_the_hit_rate_with_and_without_the_reward_is_told() -> None:
    """The counterfactual is worked out from the same decisions."""
    router = fleet(CONFIG)
    converse(router, 4)
    told = router.stats(9.0).affinity
    assert told.hit_tokens > told.hit_tokens_unswayed == 0
    plain = fleet(OFF)
    converse(plain, 4)
    assert plain.stats(9.0).affinity.prompt_tokens == 0


def test_requests_without_common_beginnings_are_decided_as_if_there_were_no_affinity() -> None:
    """Default on does no harm: no cache, no sway."""
    chosen = []
    for config in (CONFIG, OFF):
        router, rng = fleet(config, 4), np.random.default_rng(5)
        chosen.append(
            [
                send(router, f"r{i}", prefix(f"p{i}", int(rng.integers(1, 30))), i * 0.01)
                for i in range(32)
            ]
        )
    assert chosen[0] == chosen[1]


def test_a_shadow_price_outbids_the_cache() -> None:
    """Reduced cost is reward minus price: dear slots on the cached worker send the turn away."""
    router = fleet(CONFIG)
    home = send(router, "first", prefix("talk", 8), 0.0)
    finish(router, "first", 0.5)
    assert send(router, "second", prefix("talk", 12), 1.0) == home
    finish(router, "second", 1.5)
    buckets = CONFIG.horizon_iterations // CONFIG.bucket_iterations
    dear = np.zeros((2, buckets))
    dear[int(home[1:])] = 1.0
    prices = Usage(batch=dear, kv=np.zeros((2, buckets)))
    problem = router.price_problem(2.0)
    assert problem is not None
    router.adopt(replace(problem.solve(), prices=prices), 2.0)
    assert send(router, "third", prefix("talk", 16), 2.1) != home


def waits_at_home(router: Router, shared: int, computing: int) -> tuple[str, str]:
    """A prompt of 100 chunks comes, some cached where another prompt has to be computed first.

    Returns:
        The worker that has them, and where the prompt was started.
    """
    home = send(router, "first", prefix("talk", 100), 0.0)
    finish(router, "first", 0.5)
    if computing:
        router.handle(ask("busy", 1.0, prompt=computing, pinned_worker=home), 1.0)
        router.tick(1.0)
    common, own = prefix("talk", 100), prefix("mine", 100)
    head = replace(common, hashes=common.hashes[:shared] + own.hashes[shared:])
    return home, send(router, "second", head, 1.1)


def learn_pace(router: Router) -> None:
    """Both workers show the same pace at prompts: first tokens after 0.1 ms a token."""
    for turn, prompt in enumerate((200, 2000, 400, 3000)):
        for worker in ("w0", "w1"):
            name, now_s = f"{worker} {turn}", turn - 10.0
            router.handle(ask(name, now_s, prompt=prompt, pinned_worker=worker), now_s)
            assert len(starts(router.tick(now_s))) == 1
            finish(router, name, now_s + 1e-4 * prompt)


@pytest.mark.parametrize("learned", [False, True])
def test_a_cached_prefix_weighs_what_it_saves_and_the_prompts_before_it_what_they_cost(
    *, learned: bool
) -> None:
    """A little of a prompt is not worth a wait for a longer one; nearly all of it is."""
    for shared, computing, follows in (
        (5, 3000, False),
        (90, 3000, True),
        (5, 0, True),
        (90, 12_000, False),
    ):
        router = fleet(CONFIG)
        if learned:
            learn_pace(router)
        home, chosen = waits_at_home(router, shared, computing)
        assert (chosen == home) == follows, (shared, computing)


def test_what_a_cache_spares_is_waited_for_by_nobody() -> None:
    """Of a long prompt before it a request waits only for what has to be computed."""
    for name, follows in (("talk", True), ("news", False)):
        router = fleet(CONFIG)
        learn_pace(router)
        home = send(router, "first", prefix("talk", 100), 0.0)
        finish(router, "first", 0.5)
        again = ask("again", 1.0, prompt=6400, prefix=prefix(name, 100), pinned_worker=home)
        router.handle(again, 1.0)
        router.tick(1.0)
        assert (send(router, "next", prefix("talk", 60), 1.1) == home) == follows


@pytest.mark.parametrize("workers", [2, 4])
def test_one_hot_session_spills_over_the_fleet(workers: int) -> None:
    """Long answers to one common prompt do not pile up on the worker that has it."""
    router = fleet(CONFIG, workers, batch_limit=16)
    load = dict.fromkeys((f"w{g}" for g in range(workers)), 0)
    for number in range(8 * workers):
        now_s = number * 0.05
        load[send(router, f"r{number}", prefix("hot", 4), now_s, answer=400)] += 1
        router.handle(FirstToken(f"r{number}"), now_s)
    assert max(load.values()) - min(load.values()) <= 4
    assert max(load.values()) < 16


@pytest.mark.parametrize("shares", [(0.25, 0.25, 0.25, 0.25), (0.91, 0.03, 0.03, 0.03)], ids=str)
def test_sessions_crowd_on_no_worker_whatever_the_order_they_come_in(
    shares: tuple[float, ...],
) -> None:
    """As many sessions as workers, all hot or one of them: no placement is four to none."""
    for seed in range(8):
        rng, router = np.random.default_rng(seed), fleet(CONFIG, 4, batch_limit=16)
        load = dict.fromkeys((f"w{g}" for g in range(4)), 0)
        for number in range(32):
            now_s, session = number * 0.05, int(rng.choice(4, p=shares))
            head = prefix(f"talk {session}", int(rng.integers(2, 12)))
            load[send(router, f"r{number}", head, now_s, answer=400)] += 1
            router.handle(FirstToken(f"r{number}"), now_s)
        assert max(load.values()) - min(load.values()) <= 4, (seed, load)


def test_starts_of_one_tick_do_not_all_follow_one_cache() -> None:
    """Each start makes the next one's reward on that worker smaller."""
    router = fleet(CONFIG, 2, batch_limit=16)
    send(router, "first", prefix("hot", 4), 0.0, answer=400)
    router.handle(FirstToken("first"), 0.1)
    for number in range(15):
        router.handle(
            ask(f"r{number}", 1.0, prompt=300, decode_tokens_hint=400, prefix=prefix("hot", 4)), 1.0
        )
    chosen = [worker_id for _, worker_id in starts(router.tick(1.0))]
    assert len(chosen) == 15
    assert min(chosen.count("w0"), chosen.count("w1")) >= 5


def test_nothing_waits_for_a_cached_worker() -> None:
    """With its worker full a request starts elsewhere at once."""
    router = fleet(CONFIG, 2, batch_limit=1)
    home = send(router, "first", prefix("talk", 20), 0.0)
    assert send(router, "second", prefix("talk", 30), 0.1) != home


@pytest.mark.parametrize("loss", ["down", "restart", "gone"])
def test_a_worker_that_lost_its_cache_draws_nobody(loss: str) -> None:
    """Stickiness never pins to the dead, and a new process is cold."""
    router = fleet(CONFIG)
    home = send(router, "first", prefix("talk", 8, session=7), 0.0)
    finish(router, "first", 0.5)
    if loss == "restart":
        router.handle(WorkerReported(home, WorkerReport(restarted=True), 0.6), 0.6)
    elif loss == "down":
        router.handle(WorkerChanged(home, DOWN), 0.6)
    else:
        router.handle(WorkerGone(home), 0.6)
    assert not router.stats(0.6).affinity.held_tokens.get(home)
    chosen = send(router, "second", prefix("talk", 12, session=7), 1.0)
    assert router.stats(1.0).affinity.hit_tokens == 0
    assert loss == "restart" or chosen != home
    if loss == "down":
        router.handle(WorkerChanged(home, UP), 1.1)
        finish(router, "second", 1.2)
        assert send(router, "third", prefix("talk", 16, session=7), 1.3) == chosen


def test_a_prompt_that_cannot_be_hashed_is_known_by_its_session() -> None:
    """Pictures and sounds stick by the session's name alone."""
    router = fleet(CONFIG)
    home = send(router, "first", Prefix(session=9), 0.0)
    finish(router, "first", 0.4)
    router.handle(ask("other", 0.5, prompt=16, pinned_worker=home), 0.5)
    router.tick(0.5)
    assert send(router, "second", Prefix(session=9), 1.0) == home
    assert send(router, "stranger", Prefix(session=10), 1.1) != home


def test_a_decode_worker_earns_nothing_by_its_cache() -> None:
    """The prompt is computed elsewhere, so nothing is saved."""
    specs = [
        WorkerSpec(worker_id=name, batch_limit=8, kv_capacity_tokens=100_000, role=role)
        for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
    ]
    router = Router(CONFIG)
    for one in specs:
        router.handle(WorkerJoined(one), 0.0)
    send(router, "first", prefix("talk", 8), 0.0)
    router.handle(ask("second", 1.0, prompt=900, prefix=prefix("talk", 12)), 1.0)
    view = router._sight.view(1.0, 1.0)
    assert view.cached is not None
    assert not view.cached.tokens.any()


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0.04, 0.3), (1.0, 1.0, 2.0)])
def test_the_engines_counters_correct_the_guess(rate: float, low: float, high: float) -> None:
    """An engine that finds nothing makes its worker's guesses small; hits restore them."""
    router = fleet(CONFIG, 1, batch_limit=64)
    for turn in range(40):
        head = prefix("talk", 100)
        send(router, f"t{turn}", head, float(turn))
        finish(router, f"t{turn}", turn + 0.5)
        report = WorkerReport(prefix_queries=6400, prefix_hits=round(6400 * rate))
        router.handle(WorkerReported("w0", report, turn + 0.6), turn + 0.6)
    told = router.stats(50.0).affinity
    assert low <= told.correction["w0"] <= high
    assert told.observed["w0"] == pytest.approx(rate)
    assert told.queries["w0"] == 40 * 6400


def test_an_engine_that_tells_no_counters_is_believed_as_guessed() -> None:
    """Unknown is not zero."""
    router = fleet(CONFIG, 1)
    send(router, "first", prefix("talk", 100), 0.0)
    router.handle(WorkerReported("w0", WorkerReport(running=1), 0.5), 0.5)
    told = router.stats(1.0).affinity
    assert told.correction["w0"] == 1.0
    assert "w0" not in told.observed


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=60),
    st.integers(64, 1500),
)
def test_what_is_held_is_a_head_within_the_workers_memory(
    prompts: list[tuple[int, int]], capacity: int
) -> None:
    """Eviction takes the ends of chains first, so bisection finds what a plain walk finds."""
    cache = PrefixCache()
    for name, chunks in prompts:
        cache.hold(prefix(str(name), chunks), CHUNK * chunks, capacity)
        assert cache.tokens <= capacity
        for other in range(6):
            chain = prefix(str(other), 12)
            held = [one in cache._kept for one in chain.hashes]
            assert held == sorted(held, reverse=True)
            assert cache.held_chunks(chain) == sum(held)
            assert cache.held_tokens(chain) == CHUNK * sum(held)


def test_memory_is_bounded_whatever_comes() -> None:
    """Workers of unknown memory, endless new prompts, one chunk each: the cache has an end."""
    cache = PrefixCache()
    for number in range(CHUNKS_MAX + 500):
        cache.hold(Prefix((number + 1,), (1,)), 1, float("inf"))
        cache.answered(Prefix((number + 1,), (1,)), 5)
    assert len(cache) == len(cache._answers) == CHUNKS_MAX


def test_a_next_turn_finds_the_answer_too() -> None:
    """The engine keeps what it has generated; a prompt that goes on there repeats it."""
    cache = PrefixCache()
    cache.hold(prefix("talk", 4), 4 * CHUNK, 10_000)
    cache.answered(prefix("talk", 4), 50)
    assert cache.held_tokens(prefix("talk", 8)) == 4 * CHUNK + 50
    assert cache.held_tokens(prefix("talk", 4)) == 4 * CHUNK
    assert cache.held_tokens(prefix("talk", 3)) == 3 * CHUNK


def test_affinity_can_be_switched_while_requests_wait() -> None:
    """New settings hold from the next request on; books stay right."""
    router = fleet(CONFIG)
    home = send(router, "first", prefix("talk", 8), 0.0)
    router.handle(ask("second", 0.1, prompt=600, prefix=prefix("talk", 9)), 0.1)
    router.reconfigure(OFF)
    assert len(starts(router.tick(0.2))) == 1
    finish(router, "first", 0.5)
    router.reconfigure(CONFIG)
    assert send(router, "third", prefix("talk", 9), 1.0) in {home, "w0", "w1"}
    assert router.stats(2.0).entered == 3
