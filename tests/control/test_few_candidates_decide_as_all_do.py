"""A decision looks at few of those who wait, and keeps what stays of them: it decides the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from service.control.assign import Candidates, admit_balanced
from service.control.columns import Columns, Horizon, Usage
from service.control.foremost import Foremost, foremost
from service.control.forward import ForwardLp
from service.control.residual import Residual
from service.control.spans import PrefixPrices, Spans
from service.control.standing import Settled, Standing
from service.control.view import Pair, View
from tests.control.driving import ask, spec

HORIZON = Horizon(8, 4)


def crowd(rng: np.random.Generator, workers: int) -> tuple[Candidates, Residual, np.ndarray]:
    """Hundreds of requests, some of several sequences, many equal margins, and their bounds."""
    n = int(rng.integers(150, 400))
    columns = Columns(
        worker=np.zeros(n, dtype=np.int64),
        start=np.zeros(n),
        steps=rng.integers(1, 40, n).astype(float),
        footprint=rng.integers(0, 30, n).astype(float),
        sequences=rng.choice([1.0, 1.0, 1.0, 2.0], n),
    )
    margin = rng.integers(-4, 60, (n, workers)) / 8
    margin[rng.random((n, workers)) < 0.2] = -np.inf
    bound = margin.max(axis=1) + rng.integers(0, 3, n) * rng.choice([0.0, 1 / 8, 8.0])
    most = int(rng.choice([1, 3, 1000]))
    toll = rng.integers(0, 3, (n, workers)) / 8 if rng.random() < 0.5 else None
    candidates = Candidates(columns, margin, rng.permutation(n), -np.inf, most, toll)
    slots = rng.integers(0, 4, (workers, 1))
    free = Usage(
        batch=slots + rng.integers(0, 3, (workers, HORIZON.buckets)).cumsum(axis=1).astype(float),
        kv=rng.integers(20, 400, (workers, HORIZON.buckets)).astype(float),
    )
    nothing = Usage.zeros(workers, HORIZON)
    return candidates, Residual(free, nothing, HORIZON), np.asarray(bound)


def few_of(candidates: Candidates, places: np.ndarray) -> Candidates:
    return replace(
        candidates,
        columns=candidates.columns.take(places),
        margin=candidates.margin[places],
        arrival_order=candidates.arrival_order[places],
        toll=None if candidates.toll is None else candidates.toll[places],
    )


def test_the_foremost_start_as_in_the_whole_pass_or_say_that_they_cannot_tell() -> None:
    told = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        candidates, residual, bound = crowd(rng, int(rng.integers(1, 4)))
        liking = rng.choice([0.125, 0.25, 0.5], candidates.margin.shape[1])
        places, others = foremost(bound)
        pass_of_few = Foremost(few_of(candidates, places), residual, liking)
        started = pass_of_few.admit(others)
        if started is None:
            continue
        told += 1
        everyone = admit_balanced(candidates, residual, liking)
        assert [(int(places[row]), worker) for row, worker in started] == everyone
        assert pass_of_few.left.batch.tolist() == residual.batch.tolist()
        assert pass_of_few.left.kv.tolist() == residual.kv.tolist()
    assert told > 50


def test_bounds_leave_out_only_what_is_below_them() -> None:
    bound = np.random.default_rng(1).permutation(1000) / 8
    places, others = foremost(bound)
    assert sorted(places.tolist()) == np.flatnonzero(bound > others).tolist()
    assert np.delete(bound, places).max() == others


def test_of_a_crowd_of_equals_nobody_is_looked_at() -> None:
    places, others = foremost(np.full(1000, 0.5))
    assert (places.size, others) == (0, 0.5)


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
    """The policy without a look at the foremost alone."""

    def _start_foremost(self, *_: object) -> None:  # type: ignore[override]
        return None


class Pruned(ForwardLp):
    """The policy as it is; counts how often the foremost told."""

    told = 0

    def _start_foremost(self, *args: Any) -> list[Pair] | None:
        pairs = super()._start_foremost(*args)
        self.told += pairs is not None
        return pairs


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
    pruned = Pruned(config)
    commands = driven(pruned, config, seed)
    assert len(commands) > 60
    assert pruned.told > 5
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
