"""The relative age bound: a share of what first come first served would have made one wait."""

from dataclasses import replace

import pytest

from service.control import (
    ControlConfig,
    Left,
    Outcome,
    PriceConfig,
    Progressed,
    Router,
    WorkerChanged,
    WorkerJoined,
    WorkerState,
)
from tests.control.driving import ask, router_with, spec, starts

CONFIG = ControlConfig(
    horizon_iterations=512,
    age_bound_s=100.0,
    age_factor=1.0,
    age_floor_s=0.5,
    age_memory_s=10.0,
    max_wait_s=1e6,
    prices=PriceConfig(zero=True),
)


def _busy(config: ControlConfig, router: Router | None = None) -> Router:
    """One worker of one slot at 0.01 s a token, taken; ten requests of 100 tokens wait.

    Their decode work is 1,000 tokens, so draining them takes 10 s.
    """
    if router is None:
        router = router_with(config, spec("w0", batch_limit=1, kv=10**6, iteration_s=0.01))
    router.handle(ask("first", decode_tokens_hint=50), 0.0)
    assert starts(router.tick(0.0)) == [("first", "w0")]
    for index in range(10):
        router.handle(ask(f"long{index}", decode_tokens_hint=100), 0.0)
    router.tick(0.0)
    return router


def _who_is_next(router: Router, now_s: float) -> str:
    """Free the slot, let a short request arrive in the same instant, and see who starts."""
    # A token came every 0.01 s, as the worker's iteration time says.
    router.handle(Progressed({"first": round(now_s / 0.01)}), now_s)
    router.tick(now_s - 0.001)
    router.handle(ask("short", now_s, decode_tokens_hint=1, model="m"), now_s)
    router.handle(Left("first", Outcome.COMPLETED, 50), now_s)
    return starts(router.tick(now_s))[0][0]


@pytest.mark.parametrize(
    ("factor", "now_s", "first"),
    [
        pytest.param(1.0, 4.0, "short", id="waited 4 s of a 10 s backlog: still overtaken"),
        pytest.param(1.0, 11.0, "long0", id="waited longer than the backlog: goes first"),
        pytest.param(0.3, 4.0, "long0", id="a smaller factor spares the tail"),
        pytest.param(5.0, 11.0, "short", id="a larger one spares the mean"),
        pytest.param(0.0, 99.0, "short", id="without a factor only the absolute bound counts"),
        pytest.param(0.0, 100.0, "long0", id="which counts at last"),
        pytest.param(50.0, 100.0, "long0", id="and caps every factor"),
    ],
)
def test_a_request_goes_first_after_its_share_of_the_backlog(
    factor: float, now_s: float, first: str
) -> None:
    assert _who_is_next(_busy(replace(CONFIG, age_factor=factor)), now_s) == first


@pytest.mark.parametrize(("now_s", "first"), [(1.6, "short"), (1.8, "long0")])
def test_where_kv_memory_binds_the_backlog_drains_in_the_slots_that_fit(
    now_s: float, first: str
) -> None:
    # 1,000 KV tokens; each of ten holds 100 + 50 on average and 200 at its end, half of which the
    # head of a queue leaves unused: (1,000 - 100) / 150 = 6 slots. Ten of 100 tokens and a prefill
    # are 1,010 steps of 0.01 s in 6 slots: 1.68 s.
    router = router_with(CONFIG, spec("w0", batch_limit=10, kv=1000, iteration_s=0.01))
    router.handle(ask("first", prompt=940, decode_tokens_hint=50), 0.0)
    router.tick(0.0)
    for index in range(10):
        router.handle(ask(f"long{index}", prompt=100, decode_tokens_hint=100), 0.0)
    router.tick(0.0)
    assert _who_is_next(router, now_s) == first


def test_the_bound_never_falls_below_its_floor() -> None:
    config = replace(CONFIG, age_factor=0.001, age_floor_s=2.0)
    assert _who_is_next(_busy(config), 1.9) == "short"
    assert _who_is_next(_busy(config), 2.1) == "long0"


@pytest.mark.parametrize(
    ("now_s", "first"),
    [
        pytest.param(1.0, "short", id="first come first served would take 1.1 s: still overtaken"),
        pytest.param(1.3, "long0", id="waited longer than that, if shorter than the queue's 1.6 s"),
    ],
)
def test_what_waits_because_less_runs_than_usual_does_not_count(now_s: float, first: str) -> None:
    """Ten slots run requests of 2 tokens; first come first served would run some of 100 as well."""
    router = router_with(CONFIG, spec("w0", batch_limit=10, kv=10**6, iteration_s=0.01))
    for index in range(10):
        router.handle(ask(f"running{index}", decode_tokens_hint=2), 0.0)
    assert len(starts(router.tick(0.0))) == 10
    for index in range(16):
        router.handle(ask(f"long{index}", decode_tokens_hint=100), 0.0)
    router.tick(0.0)
    router.handle(ask("short", now_s, decode_tokens_hint=1), now_s)
    router.handle(Left("running0", Outcome.CANCELLED, None), now_s)
    assert starts(router.tick(now_s))[0][0] == first


@pytest.mark.parametrize(
    ("age_share", "first"),
    [
        pytest.param(0.95, "short", id="10 of 71 are more than twice a twentieth: 10 s"),
        pytest.param(0.9, "long0", id="but fewer than twice a tenth: hardly any wait"),
    ],
)
def test_a_backlog_that_few_would_have_met_is_no_bound_for_them(
    age_share: float, first: str
) -> None:
    config = replace(CONFIG, age_share=age_share)
    router = router_with(config, spec("w0", batch_limit=1, kv=10**6, iteration_s=0.01))
    for index in range(60):
        router.handle(ask(f"at once{index}", decode_tokens_hint=1), 0.0)
        router.tick(0.0)
        router.handle(Left(f"at once{index}", Outcome.COMPLETED, 1), 0.0)
    assert _who_is_next(_busy(config, router), 4.0) == first


def test_ageing_can_be_switched_off() -> None:
    assert _who_is_next(_busy(replace(CONFIG, age_bound_s=0.0)), 1e5) == "short"


def _crowd(config: ControlConfig, router: Router | None = None, **huge: int) -> Router:
    """As `_busy`, with one request that is larger than the twenty others of 100 tokens."""
    if router is None:
        router = router_with(config, spec("w0", batch_limit=1, kv=10**6, iteration_s=0.01))
    router.handle(ask("first", decode_tokens_hint=50), 0.0)
    router.tick(0.0)
    router.handle(ask("huge", **huge), 0.0)
    for index in range(20):
        router.handle(ask(f"usual{index}", 0.001, decode_tokens_hint=100), 0.001)
    router.tick(0.001)
    return router


def test_the_largest_few_wait_a_multiple_so_that_the_others_need_not() -> None:
    # 22 came, of whom a tenth may wait longer: two. 24 s of work: the bound is 7.3 s, twice 14.5 s.
    config = replace(CONFIG, age_factor=0.3, age_share=0.9, age_stretch=2.0)
    router = _crowd(config, decode_tokens_hint=400)
    assert _who_is_next(router, 8.0) == "usual0"
    router.handle(Left("usual0", Outcome.COMPLETED, 650), 14.6)
    assert starts(router.tick(14.6))[0][0] == "huge"


def test_nobody_waits_longer_before_enough_have_come() -> None:
    # One in a hundred of 22 is nobody.
    config = replace(CONFIG, age_factor=0.3, age_share=0.99, age_stretch=2.0)
    assert _who_is_next(_crowd(config, decode_tokens_hint=400), 8.0) == "huge"


def test_a_rule_that_begins_in_a_running_service_counts_those_who_came_since() -> None:
    config = replace(CONFIG, age_factor=0.3, age_share=0.99, age_stretch=2.0)
    worker = spec("w0", batch_limit=1, kv=10**6, iteration_s=0.01)
    router = router_with(replace(config, age_factor=0.5), worker)
    for index in range(2000):
        router.handle(ask(f"old{index}", 0.0), 0.0)
        router.handle(Left(f"old{index}", Outcome.CANCELLED), 0.0)
    router.reconfigure(config)
    # One in a hundred of 22 is nobody, of 2,022 it would be twenty.
    assert _who_is_next(_crowd(config, router, decode_tokens_hint=400), 8.0) == "huge"


def test_a_worker_that_was_away_says_nothing_of_waits() -> None:
    """While nobody could start, draining takes for ever; that is no wait to be remembered."""
    served = replace(spec("w0", batch_limit=1, iteration_s=0.01), models=frozenset({"m"}))
    router = router_with(replace(CONFIG, age_factor=1.0), served)
    router.handle(WorkerJoined(replace(served, worker_id="w1", models=frozenset({"n"}))), 0.0)
    router.handle(ask("first", 0.0, decode_tokens_hint=50, model="m"), 0.0)
    router.tick(0.0)
    for index in range(10):
        router.handle(ask(f"long{index}", 0.0, decode_tokens_hint=100, model="m"), 0.0)
    router.handle(WorkerChanged("w0", WorkerState.DOWN), 0.5)
    router.tick(0.5)
    router.handle(WorkerChanged("w0", WorkerState.UP), 0.6)
    assert _who_is_next(router, 11.0) == "long0"


def test_those_of_usual_size_never_wait_a_multiple() -> None:
    # All are of one size, so that letting one wait would gain nothing.
    config = replace(CONFIG, age_factor=0.3, age_share=0.9, age_stretch=2.0)
    assert _who_is_next(_crowd(config, decode_tokens_hint=100), 8.0) == "huge"


@pytest.mark.parametrize(
    ("now_s", "first"),
    [
        pytest.param(27.0, "short", id="remembered: of the 10 s a wait of 2 s is little"),
        pytest.param(41.0, "last", id="forgotten after twice the memory: 2 s is long"),
    ],
)
def test_the_longest_wait_is_remembered_for_one_to_two_memories(now_s: float, first: str) -> None:
    config = replace(CONFIG, age_memory_s=20.0)
    router = _busy(config)  # a backlog of 10 s
    for index in range(10):
        router.handle(Left(f"long{index}", Outcome.CANCELLED), 0.1)
    router.tick(0.2)
    router.handle(ask("last", now_s - 2.0, decode_tokens_hint=100), now_s - 2.0)
    router.handle(Progressed({"first": round((now_s - 2.0) / 0.01)}), now_s - 2.0)
    router.tick(now_s - 2.0)
    assert _who_is_next(router, now_s) == first


@pytest.mark.parametrize("told_s", [0.005, 0.02])
@pytest.mark.parametrize(("waited_s", "first"), [(9.0, "short"), (11.0, "long0")])
def test_the_backlog_drains_at_the_pace_that_was_seen_whatever_was_told(
    told_s: float, waited_s: float, first: str
) -> None:
    config = replace(CONFIG, age_bound_s=1000.0)
    router = router_with(config, spec("w0", batch_limit=1, kv=10**6, iteration_s=told_s))
    router.handle(ask("first", decode_tokens_hint=20_000), 0.0)
    router.tick(0.0)
    for second in range(1, 101):
        router.handle(Progressed({"first": 100 * second}), float(second))
    # 1,000 tokens at the 0.01 s each that were seen: 10 s of backlog.
    for index in range(10):
        router.handle(ask(f"long{index}", 100.0, decode_tokens_hint=100), 100.0)
    router.tick(100.0)
    assert _who_is_next(router, 100.0 + waited_s) == first
