"""Slots kept for the next arrivals of a higher tier: when, how many, and when none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson

from service.control.config import ControlConfig, Kernel, PolicyName, PriceConfig, Weights
from service.control.events import (
    Arrived,
    Left,
    Outcome,
    Request,
    Start,
    WorkerJoined,
    WorkerSpec,
    WorkerState,
)
from service.control.forward import ForwardLp
from service.control.kernels.tiers import free_sequences
from service.control.router import Router
from service.control.tiers import PoissonTail, Stakes, delay_worth, tiers

SLOTS = 8


def router(*, models: tuple[str, ...] = ("",), zero: bool = False) -> Router:
    config = ControlConfig(
        policy=PolicyName.ONLINE_LP,
        kernel=Kernel.DECODE_ONLY,
        horizon_iterations=512,
        prices=PriceConfig(zero=zero),
    )
    made = Router(config)
    for number, model in enumerate(models):
        spec = WorkerSpec(
            worker_id=f"w{number}",
            batch_limit=SLOTS,
            kv_capacity_tokens=100_000,
            iteration_s=0.01,
            models=frozenset({model}) if model else None,
        )
        made.handle(WorkerJoined(spec, WorkerState.UP), 0.0)
    return made


def request(
    number: int, at_s: float, *, value: float = 1.0, length: int = 100, model: str = ""
) -> Request:
    return Request(
        request_id=f"{model}{number}",
        model=model,
        arrival_s=at_s,
        prompt_tokens=10,
        decode_tokens_hint=length,
        value=value,
    )


def serve_interactive(made: Router, *, model: str = "", count: int = 40) -> float:
    """Let a steady stream of valuable requests, 0.02 s apart, start and end; returns the time."""
    now_s = 0.0
    for number in range(count):
        now_s = 0.02 * (number + 1)
        arriving = request(number, now_s, value=16.0, length=8, model=model)
        made.handle(Arrived(arriving), now_s)
        for command in made.tick(now_s):
            made.handle(Left(command.request_id, Outcome.COMPLETED, 8), now_s + 0.01)
    return now_s


def batch_starts(made: Router, now_s: float, *, model: str = "", count: int = SLOTS) -> int:
    for number in range(1000, 1000 + count):
        made.handle(Arrived(request(number, now_s, length=400, model=model)), now_s)
    return sum(isinstance(command, Start) for command in made.tick(now_s))


def test_long_batch_requests_leave_slots_for_the_interactive_ones_to_come() -> None:
    made = router()
    now_s = serve_interactive(made)
    started = batch_starts(made, now_s)
    assert 0 < started < SLOTS
    made.handle(Arrived(request(1, now_s + 0.01, value=16.0, length=8)), now_s + 0.01)
    assert [command.request_id for command in made.tick(now_s + 0.01)] == ["1"]


def test_without_prices_nothing_is_kept() -> None:
    made = router(zero=True)
    assert batch_starts(made, serve_interactive(made)) == SLOTS


def test_traffic_of_one_tier_keeps_nothing() -> None:
    made = router()
    for number in range(50):
        made.handle(Arrived(request(number, 0.0, value=1.5, length=1)), 0.0)
    made.tick(0.0)
    other = router()
    assert batch_starts(other, 0.0) == SLOTS


def test_a_higher_tier_is_known_for_as_long_as_one_of_it_is_among_the_last_arrivals() -> None:
    config = ControlConfig(policy=PolicyName.ONLINE_LP, prices=PriceConfig(history_max=4))
    full, policy = Router(config), ForwardLp(config)
    full._policy = policy
    full.handle(WorkerJoined(WorkerSpec(worker_id="w", batch_limit=1), WorkerState.UP), 0.0)
    seen, rng = [], np.random.default_rng(2)
    for number in range(80):
        seen.append(float(rng.choice([1.0, 1.0, 1.0, 1.0, 4.0, 16.0])))
        full.handle(Arrived(request(number, 0.0, value=seen[-1])), 0.0)
        full.tick(0.0)
        last = tiers(np.array(seen[-4:]))
        asked = rng.permutation(6) - 1
        known = [policy._seen.knows_above(tier) for tier in asked.tolist()]
        assert known == [bool((last > tier).any()) for tier in asked]


def test_slots_are_kept_only_on_workers_that_the_valuable_requests_may_use() -> None:
    made = router(models=("chat", "code"))
    now_s = serve_interactive(made, model="chat")
    assert batch_starts(made, now_s, model="code") == SLOTS
    assert batch_starts(made, now_s + 0.01, model="chat") < SLOTS


def test_a_higher_tier_goes_before_an_aged_request_of_a_lower_one() -> None:
    made = router()
    for number in range(SLOTS):
        made.handle(Arrived(request(number, 0.0, value=16.0, length=50)), 0.0)
    made.tick(0.0)
    made.handle(Arrived(request(100, 0.0)), 0.0)
    now_s = 50.0
    made.handle(Arrived(request(200, now_s, value=16.0)), now_s)
    assert made.tick(now_s) == []
    made.handle(Left("0", Outcome.COMPLETED, 50), now_s)
    assert made.tick(now_s) == [Start("200", "w0")]


def test_under_endless_higher_traffic_a_lower_tier_still_gets_its_share_of_starts() -> None:
    """Interactive requests alone would take every slot; nobody of the batch tier waits for ever."""
    made, now_s = router(), 0.0
    for number in range(20):
        made.handle(Arrived(request(1000 + number, 0.0, length=5)), 0.0)
    ends: dict[str, float] = {}
    started: list[tuple[float, str]] = []
    for step in range(6000):
        now_s = 0.05 * step
        made.handle(Arrived(request(10_000 + 2 * step, now_s, value=16.0, length=20)), now_s)
        made.handle(Arrived(request(10_001 + 2 * step, now_s, value=16.0, length=20)), now_s)
        for name in [name for name, end_s in ends.items() if end_s <= now_s]:
            del ends[name]
            made.handle(Left(name, Outcome.COMPLETED, 20), now_s)
        for command in made.tick(now_s):
            if isinstance(command, Start):
                ends[command.request_id] = now_s + 0.2
                started.append((now_s, command.request_id))
    batch = [at_s for at_s, name in started if 1000 <= int(name) < 2000]
    assert len(batch) == 20
    assert min(batch) >= 60.0
    assert max(batch) < 65.0


@given(st.floats(0.0, 500.0), st.integers(-3, 900))
def test_poisson_tail_is_close_to_the_exact_one(mean: float, count: int) -> None:
    told = PoissonTail(np.array([mean])).at_least(np.array([float(count)]))[0]
    assert told == pytest.approx(float(poisson.sf(count - 1, mean)), abs=0.01)


@given(
    free=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    wanted=st.floats(0.0, 30.0),
    idle_cost=st.floats(0.01, 30.0),
)
def test_startable_is_the_largest_number_of_starts_each_of_which_pays(
    free: list[int], wanted: float, idle_cost: float
) -> None:
    """Against a loop over starts and over the time each could be put off."""
    slots = np.maximum.accumulate(np.array(free, dtype=float))
    means = wanted * np.arange(1, slots.size + 1) / slots.size
    stakes = Stakes(free=slots, wanted=PoissonTail(means), wait_cost=10.0, idle_cost=idle_cost)

    def pays(starts: int) -> bool:
        gain = 0.0
        for slot, mean in zip(slots, means, strict=True):
            left = np.array([slot - (starts - 1)])
            gain += 10.0 * PoissonTail(np.array([mean])).at_least(left)[0] - idle_cost
            if gain > 0:
                return False
        return True

    expected = 0
    while expected < int(slots[0]) and pays(expected + 1):
        expected += 1
    assert stakes.startable() == expected


def test_sequences_that_fit_are_counted_worker_by_worker() -> None:
    limit, capacity = np.array([4.0, 8.0]), np.array([100.0, np.inf])
    batch, kv = (
        np.array([[1.0, 5.0, 0.0], [2.0, 2.0, 9.0]]),
        np.array([[75.0, 0.0, 120.0], [9.0] * 3]),
    )
    told = free_sequences(limit, capacity, batch, kv, 10.0, 3)
    expected = [0.0, 0.0, 0.0]
    for g in range(2):
        for b in range(3):
            fit = min(
                limit[g] - batch[g, b], (capacity[g] - kv[g, b]) // 10.0 if g == 0 else np.inf
            )
            expected[b] += max(fit, 0.0)
    assert told.tolist() == expected == [8.0, 6.0, 0.0]


def test_a_tier_begins_where_the_value_has_doubled() -> None:
    found = tiers(np.array([0.25, 0.5, 0.99, 1.0, 1.99, 2.0, 64.0, 0.0]))
    assert found.tolist()[:7] == [-2, -1, -1, 0, 0, 1, 6]
    assert found[7] < -2


def test_the_worth_of_a_delay_is_the_slope_of_the_reward() -> None:
    weights = Weights(
        e2e=2.0, ttft=3.0, tail_e2e=10.0, tail_ttft=4.0, e2e_bound_s=1.0, ttft_bound_s=0.5
    )
    assert delay_worth(weights, pace_s=0.01) == pytest.approx(2.0 + 3.0 + 10.0 / 100 + 4.0 / 50)
