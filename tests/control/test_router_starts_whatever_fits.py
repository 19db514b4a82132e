"""An idle fleet starts a request in the next tick, under every policy and whatever its size.

A column is a forecast; a request whose prompt fits some worker must never wait because the column
does not. Also: what central policies start never overfills an engine, and bad iteration times or a
broken policy change nothing of that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.control import (
    Arrived,
    Command,
    ControlConfig,
    Kernel,
    Left,
    Outcome,
    PolicyName,
    Progressed,
    Request,
    Returned,
    Router,
    WorkerChanged,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
)
from service.control.view import Pair, Unpriced, View
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
)


@dataclass(frozen=True)
class Case:
    """A fleet at rest and one request."""

    specs: list[WorkerSpec]
    told_late: bool
    arrives_first: bool
    request: Request
    kernel: Kernel

    def can_be_held(self, one: WorkerSpec) -> bool:
        """Whether the prompt and one token fit the KV blocks of an empty worker."""
        if one.models is not None and self.request.model not in one.models:
            return False
        if one.kv_capacity_tokens is None:
            return True
        blocks = one.kv_capacity_tokens // one.block_tokens
        return self.request.prompt_tokens + 1 <= blocks * one.block_tokens


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three unlike workers; prompts around their capacities; any forecast."""
    specs = [
        spec(
            f"w{g}",
            batch_limit=draw(st.sampled_from((1, 2, 8))),
            kv=draw(st.sampled_from((None, 32, 48, 50, 64, 640))),
            block=draw(st.sampled_from((1, 4, 16))),
            models=draw(st.sampled_from((None, frozenset({"a"}), frozenset({"b"})))),
        )
        for g in range(draw(st.integers(1, 3)))
    ]
    return Case(
        specs=specs,
        told_late=draw(st.booleans()),
        arrives_first=draw(st.booleans()),
        request=Request(
            request_id="r",
            arrival_s=0.0,
            prompt_tokens=draw(st.integers(0, 70)),
            decode_tokens_hint=draw(st.none() | st.sampled_from((1, 5, 40, 3000))),
            decode_tokens_limit=draw(st.none() | st.sampled_from((1, 30, 5000))),
            model=draw(st.sampled_from(("a", "b"))),
            sequences=draw(st.sampled_from((1, 1, 2, 5, 30))),
        ),
        kernel=draw(st.sampled_from(list(Kernel))),
    )


def join(router: Router, one: WorkerSpec, told_late: bool) -> list[Command]:
    """A worker comes up; its KV capacity is known at once or only from its first report."""
    if not told_late or one.kv_capacity_tokens is None:
        return router.handle(WorkerJoined(one), 0.0)
    commands = router.handle(WorkerJoined(replace(one, kv_capacity_tokens=None)), 0.0)
    report = WorkerReport(running=0, waiting=0, kv_capacity_tokens=one.kv_capacity_tokens)
    return commands + router.handle(WorkerReported(one.worker_id, report, 0.0), 0.0)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=max(12, settings().max_examples // 3))
@given(case=cases())
def test_an_idle_fleet_starts_in_the_next_tick_what_an_empty_worker_can_hold(
    policy: str, case: Case
) -> None:
    router = Router(replace(POLICIES[policy], kernel=case.kernel))
    commands: list[Command] = []
    if case.arrives_first:
        commands += router.handle(Arrived(case.request), 0.0)
    for one in case.specs:
        commands += join(router, one, case.told_late)
    if not case.arrives_first:
        commands += router.handle(Arrived(case.request), 0.0)
    commands += router.tick(0.01)
    assert router.stats(0.01).fallback_ticks == 0
    serving = [one for one in case.specs if one.models is None or case.request.model in one.models]
    if any(case.can_be_held(one) for one in case.specs):
        assert len(starts(commands)) == 1
        assert refusals(commands) == []
        return
    # Nobody can ever take it: at once or, while workers still come and go, after the hold.
    commands += router.tick(SMALL.no_worker_hold_s + 0.01)
    if serving:
        # A pushing policy may have left it to a worker that serves the model; none may start it.
        assert refusals(commands) == [("r", "too_large")]
    else:
        assert [request_id for request_id, _ in refusals(commands)] == ["r"]
    assert starts(commands) == []
    assert accounted(router, 10.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_column_is_capped_to_one_worker_not_to_the_best_of_each(policy: str) -> None:
    # Many slots with little KV here, few slots with much KV there: no worker has both.
    wide = spec("wide", batch_limit=64, kv=1000)
    deep = spec("deep", batch_limit=2, kv=100_000)
    router = router_with(POLICIES[policy], wide, deep)
    router.handle(ask("r", prompt=500, sequences=32, decode_tokens_hint=4000), 0.0)
    assert len(starts(router.tick(0.0))) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_forecast_beyond_every_worker_still_starts(policy: str) -> None:
    router = router_with(POLICIES[policy], spec(kv=100), spec("w1", kv=64))
    router.handle(ask("r", prompt=50, decode_tokens_hint=10**6), 0.0)
    assert len(starts(router.tick(0.0))) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_whose_large_worker_is_down_starts_on_a_smaller_one(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("small", kv=100), spec("large", kv=10_000))
    router.handle(WorkerChanged("large", DOWN), 0.0)
    router.handle(ask("r", prompt=50, decode_tokens_hint=5000), 0.0)
    assert starts(router.tick(0.0)) == [("r", "small")]


def run_to_the_end(
    config: ControlConfig, specs: list[WorkerSpec], iteration_s: float, seed: int
) -> PlainFleet:
    """A few hundred requests with exact forecasts, more than the fleet can take at once."""
    rng = np.random.default_rng(seed)
    fleet = PlainFleet(router_with(config, *specs), iteration_s, config.kernel)
    for step in range(400):
        for i in range(rng.poisson(0.8) if step < 60 else 0):
            length = int(rng.integers(1, 25))
            request = Request(
                request_id=f"r{step}.{i}",
                arrival_s=fleet.now_s,
                prompt_tokens=int(rng.integers(0, 40)),
                decode_tokens_hint=length,
                sequences=int(rng.choice([1, 1, 1, 2])),
            )
            fleet.arrive(request, length)
        fleet.tick()
        fleet.iterate()
        if step > 60 and not fleet.decoding and len(fleet.order) == len(fleet.lengths):
            break
    return fleet


BUSY = {"queue_max": 10**6, "max_wait_s": 1e6, "age_bound_s": 0.5}


@pytest.mark.parametrize(
    ("policy", "kernel"),
    [(name, Kernel.MIXED) for name in CENTRAL]
    + [(name, Kernel.DECODE_ONLY) for name in ("forward", "published", "central_fcfs")],
)
def test_with_exact_forecasts_no_engine_is_ever_overfilled_and_everybody_is_served__constraint_4(
    policy: str, kernel: Kernel
) -> None:
    config = replace(POLICIES[policy], kernel=kernel, **BUSY)
    specs = [spec("w0", 5, 160), spec("w1", 3, 300, block=4)]
    fleet = run_to_the_end(config, specs, iteration_s=0.02, seed=1)
    assert not fleet.decoding
    assert fleet.refused == {}
    assert sorted(fleet.lengths) == sorted(fleet.started_s)
    assert len(fleet.order) == len(fleet.lengths)
    for one in specs:
        assert fleet.peak_batch[one.worker_id] <= one.batch_limit
        assert fleet.peak_kv[one.worker_id] <= (one.kv_capacity_tokens or 0)
    assert max(fleet.peak_batch.values()) == 5  # the load was worth the name
    stats = fleet.router.stats(fleet.now_s)
    assert stats.ended[Outcome.COMPLETED] == len(fleet.lengths)
    assert stats.fallback_ticks == 0


@pytest.mark.parametrize(
    "policy", ["central_fcfs", "central_shortest_first", "forward, zero prices"]
)
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_wrong_iteration_time_changes_no_start(policy: str, factor: float) -> None:
    # The look-ahead is counted in tokens seen; seconds only age the requests.
    config = replace(POLICIES[policy], **BUSY | {"age_bound_s": 0.0})
    orders = [
        run_to_the_end(config, [spec("w0", 5, 160, iteration_s=believed_s)], 0.02, seed=2).order
        for believed_s in (0.02, 0.02 * factor)
    ]
    assert orders[0] == orders[1]


class Broken(Unpriced):
    """A policy that fails on every decision."""

    def decide(self, view: View) -> list[Pair]:
        raise ZeroDivisionError("no luck")


def test_a_policy_that_raises_is_replaced_by_first_come_first_served_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.control.router.make_policy", lambda _: Broken())
    router = router_with(SMALL, spec(batch_limit=2))
    for name, hint in (("long", 20), ("short", 1), ("late", 1)):
        router.handle(ask(name, decode_tokens_hint=hint), 0.0)
    assert starts(router.tick(0.0)) == [("long", "w0"), ("short", "w0")]
    stats = router.stats(0.0)
    assert stats.fallback_ticks == 1
    assert "no luck" in stats.last_fault
    assert accounted(router, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_returned_request_keeps_its_place_and_avoids_the_worker(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("w0", 1))
    router.handle(ask("first", decode_tokens_hint=5), 0.0)
    assert starts(router.tick(0.0)) == [("first", "w0")]
    router.handle(Returned("first"), 0.1)
    stats = router.stats(0.1)
    assert (stats.waiting, stats.running, stats.returns) == (1, 0, 1)
    # Alone with the worker that turned it away, it waits; the next one does not.
    router.handle(ask("second", 0.2, decode_tokens_hint=5), 0.2)
    assert starts(router.tick(0.2)) == [("second", "w0")]
    router.handle(Left("second", Outcome.COMPLETED, 5), 0.3)
    # On another worker it goes before an equal request that came later.
    router.handle(WorkerJoined(spec("w1", 1)), 0.3)
    router.handle(ask("third", 0.3, decode_tokens_hint=5), 0.3)
    assert ("first", "w1") in starts(router.tick(0.3))
    assert accounted(router, 0.3)


@pytest.mark.parametrize("policy", CENTRAL)
def test_a_returned_request_is_first_again_among_equals(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("w0", 1), spec("w1", 1))
    for name in ("a", "b", "c"):
        router.handle(ask(name, decode_tokens_hint=5), 0.0)
    placed = dict(starts(router.tick(0.0)))
    assert sorted(placed) == ["a", "b"]
    router.handle(Left("b", Outcome.COMPLETED, 5), 0.1)
    router.handle(Returned("a"), 0.1)
    assert starts(router.tick(0.1))[0] == ("a", placed["b"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_comes_back_may_be_tried_again(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("w0"))
    router.handle(ask("r"), 0.0)
    router.tick(0.0)
    router.handle(WorkerChanged("w0", DOWN), 0.1)
    router.handle(Returned("r"), 0.1)
    assert router.tick(0.2) == []
    router.handle(WorkerChanged("w0", UP), 0.3)
    assert starts(router.tick(0.3)) == [("r", "w0")]


@pytest.mark.parametrize("policy", CENTRAL)
def test_nothing_starts_on_a_worker_whose_own_queue_is_not_empty(policy: str) -> None:
    router = router_with(POLICIES[policy], spec("w0"))
    busy = WorkerReport(running=1, waiting=1)
    router.handle(WorkerReported("w0", busy, 0.0), 0.0)
    router.handle(ask("r"), 0.0)
    assert router.tick(0.1) == []
    router.handle(WorkerReported("w0", WorkerReport(running=1, waiting=0), 0.2), 0.2)
    assert starts(router.tick(0.2)) == [("r", "w0")]


def test_tokens_of_a_request_are_totals_and_never_fall() -> None:
    router = router_with(SMALL, spec())
    router.handle(ask("r", prompt=10), 0.0)
    router.tick(0.0)
    for tokens, held in ((5, 15), (3, 15), (6, 16)):
        router.handle(Progressed({"r": tokens}), 0.1)
        assert router.stats(0.1).workers[0].kv_tokens == held


@pytest.mark.parametrize("name", [p for p in PolicyName if p is not PolicyName.ONLINE_LP])
def test_policies_without_prices_have_nothing_to_refresh(name: PolicyName) -> None:
    router = router_with(replace(SMALL, policy=name), spec())
    assert router.price_problem(0.0) is None
    assert router.stats(0.0).workers[0].price_batch == 0.0


def test_prices_are_not_refreshed_more_often_than_asked() -> None:
    config = replace(SMALL, prices=replace(SMALL.prices, refresh_s=0.5))
    router = router_with(config, spec())
    router.handle(ask("r"), 0.0)
    router.tick(0.0)
    router.handle(ask("waiting", prompt=995), 0.0)
    assert router.price_problem(0.0) is not None
    assert router.price_problem(0.4) is None
    assert router.price_problem(0.5) is not None
