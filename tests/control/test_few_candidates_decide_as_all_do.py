"""A decision looks at few of those who wait, and keeps what stays of them: it decides the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.control import (
    ControlConfig,
    Kernel,
    Left,
    Outcome,
    Router,
    Weights,
    WorkerJoined,
)
from service.control.assign import Asking, Offer, admit_priced
from service.control.columns import Columns, Horizon, Usage
from service.control.delay import Waits
from service.control.forward import ForwardLp
from service.control.kernels.room import start_oldest
from service.control.residual import Residual
from service.control.room import Room
from service.control.spans import PrefixPrices, Spans
from service.control.standing import Settled, Standing
from service.control.view import Pair, View
from tests.control.driving import ask, router_with, spec
from tests.control.whole_pass import fits, liked_best, use_of, whole_pass

HORIZON = Horizon(8, 4)


def crowd(rng: np.random.Generator, workers: int) -> tuple[Asking, Offer, Usage]:
    """Hundreds of requests, some of several sequences, many equal margins, bounds near and far."""
    n, reach = int(rng.integers(50, 200)), HORIZON.buckets
    columns = Columns(
        worker=np.zeros(n, dtype=np.int64),
        start=np.zeros(n),
        steps=rng.integers(1, 40, n).astype(float),
        footprint=rng.integers(0, 30, n).astype(float),
        sequences=rng.choice([1.0, 1.0, 1.0, 2.0], n),
    )
    priced = int(rng.integers(0, reach + 1))
    prices = rng.integers(0, 3, (workers + 2, 2, priced)) / rng.choice([8.0, 512.0])
    prices[:, 1] /= 16.0
    least = PrefixPrices.stacked(prices.min(axis=0, keepdims=True), HORIZON)
    cost = least.cost_of_starts(columns)[:, 0] - rng.integers(0, 3, n) * rng.choice([0.0, 1.0, 8.0])
    swayed = rng.random() < 0.4
    asking = Asking(
        columns=columns,
        rewards=rng.integers(-4, 60, n) / 8,
        least_cost=cost,
        asks=rng.random(n) < rng.choice([0.5, 1.0]),
        order=rng.permutation(n),
        kind=rng.integers(0, 3, n),
        prompt=rng.integers(1, 9, n).astype(float),
        most=int(rng.choice([1, 3, 1000])),
        floor=float(rng.choice([-np.inf, 0.0, 2.0])),
    )
    lines = rng.integers(0, 4, (3, workers)) / 16
    waits = Waits(lines, rng.choice([1.0, 2.0], n), toll=0.25)
    offer = Offer(
        reach=rng.random((3, workers + 2)) < 0.8,
        liking=rng.choice([0.125, 0.25, 0.5], workers),
        prices=prices,
        workers=rng.permutation(workers + 2)[:workers],
        extra=rng.integers(-3, 9, (n if swayed else 0, workers)) / 8,
        toll=rng.integers(0, 5, (n if swayed else 0, workers))
        / 8
        * (rng.random((n if swayed else 0, 1)) < 0.5),
        waits=waits if rng.random() < 0.5 else None,
    )
    slots = rng.integers(0, 4, (workers, 1))
    free = Usage(
        batch=slots + rng.integers(0, 3, (workers, reach)).cumsum(axis=1).astype(float),
        kv=rng.integers(20, 400, (workers, reach)).astype(float),
    )
    return asking, offer, free


def test_the_few_who_are_looked_at_start_as_in_a_pass_over_everybody() -> None:
    starts = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        workers = int(rng.integers(1, 5))
        asking, offer, free = crowd(rng, workers)
        pruned, whole = (Residual(free.copy(), HORIZON) for _ in range(2))
        started = admit_priced(asking, offer, pruned)
        assert started == whole_pass(asking, offer, whole, HORIZON)
        assert pruned.batch.tolist() == whole.batch.tolist()
        assert pruned.kv.tolist() == whole.kv.tolist()
        starts += len(started)
    assert starts > 300


@pytest.mark.parametrize("liked", [False, True])
def test_the_oldest_start_where_they_are_liked_most_until_one_fits_nowhere(liked: bool) -> None:
    starts = stuck = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        asking, _, free = crowd(rng, 4)
        n, columns = asking.asks.size, asking.columns
        rows, age_s = rng.permutation(n)[: n // 2], rng.integers(0, 3, n).astype(float)
        first, most = int(rng.integers(0, 3)), int(rng.integers(1, 6))
        limit = rng.choice([4.0, 8.0], 9)
        reach, workers = rng.random((3, 9)) < 0.6, rng.permutation(9)[:4]
        liking = rng.integers(0, 4, (n, 4)) / 2.0 if liked else np.zeros((n, 4))
        toll = rng.integers(0, 2, (n, 4)) / 2.0 if liked else np.zeros((n, 4))
        fast, slow = (Residual(free.copy(), HORIZON) for _ in range(2))
        moved, some = rows.copy(), n if liked else 0
        drawn = liking[:some].copy()
        started = start_oldest(
            *(moved, first, age_s, asking.order, asking.kind, reach, workers, limit),
            *(columns.start, columns.steps, columns.footprint, columns.sequences),
            *(drawn, toll[:some], fast.batch, fast.kv),
            fast.bucket_iterations,
            most,
        )
        oldest = sorted(rows[first:], key=lambda row: (-age_s[row], asking.order[row]))
        may = reach[asking.kind][:, workers]
        expected = in_turn(oldest[:most], columns, may, (liking, toll, 1.0 / limit[workers]), slow)
        assert started.tolist() == expected
        assert fast.batch.tolist() == slow.batch.tolist()
        assert fast.kv.tolist() == slow.kv.tolist()
        end = first + len(expected)
        assert moved[:first].tolist() == rows[:first].tolist()
        assert moved[first:end].tolist() == [row for row, _, _ in expected]
        assert sorted(moved) == sorted(rows)
        starts += len(expected)
        if len(expected) < min(most, len(oldest)) and not slow.is_full():
            assert moved[end] == oldest[len(expected)]
            stuck += 1
    assert starts > 150
    assert stuck > 20


def in_turn(
    rows: list[int],
    columns: Columns,
    may: np.ndarray,
    liked: tuple[np.ndarray, np.ndarray, np.ndarray],
    residual: Residual,
) -> list[list[int]]:
    """(row, worker, worker if all were liked the same) of each until one fits nowhere."""
    (liking, toll, free_share), started = liked, []
    for row in rows:
        use, free = use_of(columns, row, HORIZON), (residual.batch, residual.kv)
        able = [g for g in range(4) if may[row, g] and fits(use, free, g)]
        if not able or residual.is_full():
            break
        slots = residual.batch[:, 0]
        plain = liked_best(dict.fromkeys(able, 0.0), free_share, slots)
        best = liked_best({g: liking[row, g] for g in able}, free_share, slots)
        started.append([row, best, plain])
        liking[:, best] -= toll[:, best]
        residual.subtract(columns, row, best)
    return started


def test_a_fleet_is_full_when_nobody_has_a_whole_slot_now() -> None:
    for slots, full in [([0.0, 0.5], True), ([-1.0, 1.0], False), ([], True)]:
        free = Usage(batch=np.array(slots)[:, None] + [0.0, 9.0], kv=np.ones((len(slots), 2)))
        assert Residual(free, HORIZON).is_full() is full


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_a_start_costs_what_its_column_costs_to_the_last_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    horizon = Horizon(int(rng.integers(1, 12)), int(rng.choice([1, 4, 16])))
    shape = (3, horizon.buckets)
    prices = Usage(batch=rng.random(shape), kv=rng.random(shape) * (rng.random(shape) < 0.7))
    n = 40
    columns = Columns(
        worker=np.zeros(n, dtype=np.int64),
        start=np.zeros(n),
        steps=rng.integers(1, 250, n).astype(float),
        footprint=rng.integers(0, 300, n).astype(float),
        sequences=rng.integers(1, 4, n).astype(float),
    )
    sums = PrefixPrices.of(prices, horizon)
    every = sums.cost_on_every_worker(Spans.of(columns, horizon))
    assert np.array_equal(sums.cost_of_starts(columns), every)


class Watching(Standing):
    """Compares what is kept with what is made anew for everybody, at every tick."""

    looks = 0

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        self.config = config

    def look(self, view: View, cheapest: PrefixPrices | None) -> Settled:
        kept, anew = super().look(view, cheapest), Standing(self.config).look(view, cheapest)
        whole = view.columns()
        for name in ("start", "steps", "footprint", "sequences"):
            assert np.array_equal(getattr(kept.columns, name), getattr(whole, name))
        for name in ("steps", "rewards", "worth"):
            assert np.array_equal(getattr(kept, name), getattr(anew, name))
        assert (kept.cost <= anew.cost).all()
        self.looks += len(view.waiting) > 8
        return kept


class Unpruned(ForwardLp):
    """The policy with passes over everybody."""

    def _start_young(self, view: View, asking: Asking, room: Room) -> list[Pair]:
        offer = self._offer(view, room)
        started = whole_pass(asking, offer, room.residual, view.horizon)
        return [(row, int(room.workers[worker])) for row, worker, _ in started]


def driven(policy: ForwardLp, config: ControlConfig, seed: int) -> list[str]:
    """Commands of a full fleet while requests end and arrive, and prices are learned."""
    rng, told = np.random.default_rng(seed), []
    router, running = Router(config), []
    router._policy = policy
    for worker in range(3):
        limit = int(rng.choice([8, 16]))
        router.handle(WorkerJoined(spec(f"w{worker}", limit, 250 * limit)), 0.0)
    for tick in range(40):
        now_s = 0.1 * tick
        for number in range(260 if tick == 0 else 3):
            event = ask(
                f"r{tick}-{number}",
                now_s,
                prompt=int(rng.integers(1, 300)),
                decode_tokens_hint=int(rng.integers(1, 400)),
                sequences=int(rng.choice([1, 1, 1, 2])),
                value=float(rng.choice([1.0, 3.0, 3.0])) if seed % 2 else 1.0,
            )
            router.handle(event, now_s)
        commands = router.tick(now_s)
        told += [repr(command) for command in commands]
        running += [command.request_id for command in commands]
        for _ in range(min(len(running), int(rng.integers(0, 5)))):
            ended = running.pop(int(rng.integers(len(running))))
            router.handle(Left(ended, Outcome.COMPLETED, 5), now_s)
        snapshot = router.price_problem(now_s)
        if snapshot is not None:
            router.adopt(snapshot.solve(), now_s)
    return told


@pytest.mark.parametrize("seed", range(4))
def test_a_router_decides_alike_with_pruning_and_without(seed: int) -> None:
    config = ControlConfig(kernel=list(Kernel)[seed // 2], age_floor_s=1.0)
    commands = driven(ForwardLp(config), config, seed)
    assert len(commands) > 60
    assert commands == driven(Unpruned(config), config, seed)


@pytest.mark.parametrize(
    "weights", [Weights(), Weights(throughput=0.5, ttft=2.0, queries=3.0), Weights(tail_ttft=5.0)]
)
@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("bucket_iterations", [16, 24])
def test_what_is_kept_of_a_waiting_request_is_what_would_be_made_anew(
    weights: Weights, kernel: Kernel, bucket_iterations: int
) -> None:
    config = ControlConfig(kernel=kernel, weights=weights, bucket_iterations=bucket_iterations)
    policy = ForwardLp(config)
    policy._standing = Watching(config)
    driven(policy, config, seed=1)
    assert policy._standing.looks > 30


def test_what_is_shown_of_the_queue_is_true_at_every_length_that_it_had_before() -> None:
    held: list[str] = []
    rng, came = np.random.default_rng(3), 0
    router = router_with(ControlConfig(), spec())
    standing = Watching(ControlConfig())
    for length in (0, 3, 60, 3, 70, 60, 3, 140, 70, 3, 60, *rng.integers(1, 200, 90).tolist()):
        while len(held) < length:
            came += 1
            held.append(f"r{came}")
            sequences, prompt = int(rng.integers(1, 4)), int(rng.integers(1, 200))
            assert not router.handle(ask(held[-1], prompt=prompt, sequences=sequences), 0.0)
        while len(held) > length:
            ended = held.pop(int(rng.integers(len(held))))
            router.handle(Left(ended, Outcome.COMPLETED, None), 0.0)
        view, room = router._sight.view(0.0, 0.0), router._waiting
        waiting = [room.entries[request_id] for request_id in room.ids]
        assert view.waiting.order.tolist() == [entry.order for entry in waiting]
        assert view.waiting.sequences.tolist() == [entry.sequences for entry in waiting]
        standing.look(view, None)
    assert standing.looks > 80
