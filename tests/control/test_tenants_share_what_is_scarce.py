"""Weighted fair shares between tenants, and what neither tenants nor priorities may do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulate_command import SimulateOptions, make_plan
from loadgen.simulate_options import FleetOptions, LoadOptions, PolicyOptions, SightOptions
from loadgen.simulation_records import SimulatedRequest
from loadgen.simulator import simulate
from loadgen.workload import Prediction
from service.control import (
    Arrived,
    ControlConfig,
    Kernel,
    Left,
    Outcome,
    PriceConfig,
    Request,
    Router,
    TenantConfig,
)
from tests.control.driving import PlainFleet, accounted, ask, router_with, spec, starts

EQUAL = TenantConfig(weights="*=1")
CONFIG = ControlConfig(
    kernel=Kernel.DECODE_ONLY,
    horizon_iterations=64,
    bucket_iterations=4,
    age_factor=0.0,
    age_bound_s=5.0,
    max_wait_s=1e6,
    tenants=EQUAL,
    prices=PriceConfig(zero=True),
)


def served(
    weights: str,
    shares: str,
    load: float,
    values: str = "",
    prediction: str = "exact",
    requests: int = 900,
) -> dict[str, float]:
    """Tokens of each tenant that the simulator serves until the last arrival."""
    plan = make_plan(
        SimulateOptions(
            fleet=FleetOptions(profile="unit", workers=2, batch_limit=4, decode_only=True),
            load=LoadOptions(
                trace="fixed:20x20",
                load=load,
                requests=requests,
                tenants=shares,
                values=values,
                prediction=Prediction(prediction),
            ),
            policy=PolicyOptions(tenant_weights=weights, horizon_iterations=256, max_wait_s=1e6),
            sight=SightOptions(),
        )
    )
    result = simulate(plan.requests, plan.config)
    assert result.router is not None
    assert result.router.fallback_ticks == 0
    until_s = plan.requests[-1].arrival_s

    def tokens(request: SimulatedRequest) -> float:
        return float(request.output_tokens) if (request.end_s or 0.0) <= until_s else 0.0

    names = {request.trace.tenant for request in result.requests}
    return {
        name: sum(tokens(r) for r in result.requests if r.trace.tenant == name) for name in names
    }


def share(tokens: dict[str, float], name: str) -> float:
    return tokens[name] / sum(tokens.values())


def test_nine_to_one_is_served_one_to_one_while_both_have_a_backlog() -> None:
    assert share(served("*=1", "heavy=9,light=1", 8.0), "light") == pytest.approx(0.5, abs=0.07)
    # Without weights tenants make no difference.
    assert share(served("", "heavy=9,light=1", 8.0, requests=450), "light") < 0.2


def test_weights_say_how_much_each_gets() -> None:
    tokens = served("gold=3,*=1", "gold=1,plain=1", 5.0)
    assert share(tokens, "gold") == pytest.approx(0.75, abs=0.07)


def test_a_high_value_orders_a_tenants_own_requests_and_buys_no_share() -> None:
    tokens = served("*=1", "heavy=9,light=1", 8.0, values="heavy=64,light=1")
    assert share(tokens, "light") > 0.4


def test_a_lone_tenant_may_use_everything() -> None:
    alone, nobody = (served(weights, "one=1", 3.0, requests=300) for weights in ("*=1", ""))
    assert alone == nobody


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.sampled_from((0.25, 1.0, 8.0))),
        min_size=1,
        max_size=25,
    ),
    weights=st.sampled_from(("*=1", "a=5,*=1", "a=0.01,b=100")),
)
def test_no_slot_stays_free_for_the_sake_of_shares(
    arrivals: list[tuple[str, int, float]], weights: str
) -> None:
    config = replace(CONFIG, tenants=TenantConfig(weights=weights))
    router = router_with(config, spec("w0", batch_limit=2, kv=None, iteration_s=0.01))
    fleet = PlainFleet(router, 0.01, kernel=Kernel.DECODE_ONLY)
    for index, (tenant, length, value) in enumerate(arrivals):
        request = Request(
            request_id=f"r{index}",
            arrival_s=fleet.now_s,
            prompt_tokens=3,
            decode_tokens_hint=length,
            tenant=tenant,
            value=value,
        )
        fleet.arrive(request, length)
        fleet.tick()
        waiting = len(arrivals[: index + 1]) - len(fleet.started_s)
        assert len(fleet.decoding) == 2 or not waiting
        if index % 3 == 0:
            fleet.iterate()
            fleet.tick()
    for _ in range(sum(length for _, length, _ in arrivals) + 5):
        fleet.iterate()
        fleet.tick()
    assert len(fleet.started_s) == len(arrivals)
    assert accounted(router, fleet.now_s)
    assert all(one.waiting == 0 for one in router.stats(fleet.now_s).tenants)


def named(request_id: str, tenant: str, now_s: float = 0.0, length: int = 4) -> Arrived:
    return ask(request_id, now_s, prompt=3, tenant=tenant, decode_tokens_hint=length)


def used_up_by(router: Router, tenant: str, number: int = 4) -> None:
    """One tenant has the only slot again and again."""
    for index in range(number):
        router.handle(named(f"{tenant}{index}", tenant), 0.0)
        assert len(starts(router.tick(0.0))) == 1
        router.handle(Left(f"{tenant}{index}", Outcome.COMPLETED, 4), 0.0)


def weighted(weights: str) -> ControlConfig:
    return replace(CONFIG, tenants=TenantConfig(weights=weights))


def started(router: Router, now_s: float) -> list[str]:
    return [request_id for request_id, _ in starts(router.tick(now_s))]


def contested(weights: str) -> Router:
    """Both tenants have had as much, a request of each waits, and the one slot is taken."""
    router = router_with(weighted(weights), spec("w0", batch_limit=1, kv=None, iteration_s=0.01))
    used_up_by(router, "a")
    used_up_by(router, "b")
    router.handle(named("taken", "c"), 0.0)
    router.tick(0.0)
    router.handle(named("of-a", "a"), 0.0)
    router.handle(named("of-b", "b"), 0.0)
    return router


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ("a=8,b=1,*=1", "a=1,b=8,*=1", "of-b"),
        ("a=1,b=8,*=1", "a=8,b=1,*=1", "of-a"),
        ("*=1", "b=8,*=1", "of-b"),
        ("b=8,*=1", "a=8,*=1", "of-a"),
        ("b=8,*=1", "a=64,*=8,b=8", "of-a"),
    ],
)
def test_weights_that_change_hold_at_once_for_those_who_wait(
    before: str, after: str, first: str
) -> None:
    router = contested(before)
    router.reconfigure(weighted(after))
    router.handle(Left("taken", Outcome.COMPLETED, 4), 0.01)
    assert started(router, 0.01) == [first]
    assert accounted(router, 0.01)


def test_weights_set_for_the_first_time_divide_the_queue_that_is_there() -> None:
    router = router_with(weighted(""), spec("w0", batch_limit=1, kv=None, iteration_s=0.01))
    router.handle(named("running", "a", length=400), 0.0)
    router.tick(0.0)
    for index in range(3):
        router.handle(named(f"a{index}", "a"), 0.0)
    router.handle(named("b", "b"), 0.0)
    router.reconfigure(weighted("*=1"))
    # What was not charged is not given back: it ends far before its forecast.
    router.handle(Left("running", Outcome.COMPLETED, 1), 0.1)
    order: list[str] = []
    for _ in range(4):
        (request_id,) = started(router, 0.1)
        order.append(request_id)
        router.handle(Left(request_id, Outcome.COMPLETED, 4), 0.1)
    assert order.index("b") <= 1
    assert accounted(router, 0.1)


def test_weights_taken_away_make_no_difference_any_more_and_come_back_with_all_use() -> None:
    router = contested("*=1")
    used = [one.decode_tokens for one in router.stats(0.0).tenants]
    router.reconfigure(weighted(""))
    assert router.stats(0.0).tenants == ()
    router.handle(Left("taken", Outcome.COMPLETED, 4), 0.0)
    (first,) = started(router, 0.0)
    router.reconfigure(weighted("*=1"))
    router.handle(Left(first, Outcome.COMPLETED, 4), 0.0)
    (second,) = started(router, 0.0)
    assert {first, second} == {"of-a", "of-b"}
    assert [one.decode_tokens for one in router.stats(0.0).tenants] >= used


def test_no_counter_of_tokens_falls_or_jumps_when_a_tenant_gets_a_weight_or_loses_it() -> None:
    router = contested("a=2,*=1")

    def tokens() -> dict[str, int]:
        return {one.tenant: one.decode_tokens for one in router.stats(0.0).tenants}

    assert tokens() == {"a": 16, "other": 16}
    router.reconfigure(weighted("b=2,*=1"))
    assert tokens() == {"b": 0, "other": 16}


def test_every_tenant_with_a_weight_has_a_place_however_often_weights_change() -> None:
    few = TenantConfig(weights="*=1", tracked_max=3)
    router = router_with(
        replace(CONFIG, tenants=few), spec("w0", batch_limit=1, kv=None, iteration_s=0.01)
    )
    router.handle(named("taken", "z"), 0.0)
    router.tick(0.0)
    for index in range(6):
        router.handle(named(f"r{index}", f"t{index}"), 0.0)
    for number in range(50):
        weights = f"n{number}=1,m{number}=1,*=1"
        router.reconfigure(replace(CONFIG, tenants=replace(few, weights=weights)))
        assert {one.tenant for one in router.stats(0.0).tenants} == {
            f"n{number}",
            f"m{number}",
            "other",
        }
        assert sum(one.waiting for one in router.stats(0.0).tenants) == 6
    assert router._tenants._size <= 1 + few.tracked_max + 2


def test_settings_that_stay_change_no_order() -> None:
    alone, again = contested("a=3,*=1"), contested("a=3,*=1")
    again.reconfigure(weighted("a=3,*=1"))
    for router in (alone, again):
        router.handle(Left("taken", Outcome.COMPLETED, 4), 0.0)
    assert started(alone, 0.0) == started(again, 0.0)
    assert alone.stats(0.0) == again.stats(0.0)


@pytest.mark.parametrize("weights", ["", "*=1"])
def test_a_request_of_low_value_starts_within_the_age_bound(weights: str) -> None:
    config = replace(CONFIG, tenants=TenantConfig(weights=weights))
    router = router_with(config, spec("w0", batch_limit=1, kv=None, iteration_s=0.1))
    fleet = PlainFleet(router, 0.1, kernel=Kernel.DECODE_ONLY)
    low = Request(
        request_id="low", arrival_s=0.0, prompt_tokens=3, decode_tokens_hint=4, value=1 / 64
    )
    # Valuable requests of the same tenant come faster than they are served, without end.
    for index in range(80):
        request = Request(
            request_id=f"r{index}",
            arrival_s=fleet.now_s,
            prompt_tokens=3,
            decode_tokens_hint=2,
            value=64.0,
        )
        fleet.arrive(request, 2)
        if index == 0:
            fleet.arrive(low, 4)
        fleet.tick()
        fleet.iterate()
    assert CONFIG.age_bound_s <= fleet.started_s["low"] <= CONFIG.age_bound_s + 0.5


def test_a_small_tenant_does_not_wait_behind_a_large_ones_backlog() -> None:
    router = router_with(CONFIG, spec("w0", batch_limit=1, kv=None, iteration_s=0.01))
    fleet = PlainFleet(router, 0.01, kernel=Kernel.DECODE_ONLY)

    def send(name: str, tenant: str, length: int) -> None:
        request = Request(
            request_id=name,
            arrival_s=fleet.now_s,
            prompt_tokens=3,
            decode_tokens_hint=length,
            tenant=tenant,
        )
        fleet.arrive(request, length)
        fleet.tick()

    for index in range(200):
        send(f"large{index}", "large", 2)
    for _ in range(100):
        fleet.iterate()
        fleet.tick()
    # Longer than every other, so by reduced cost alone it would be the last.
    send("small", "small", 10)
    began_s = fleet.now_s
    for _ in range(5):
        fleet.iterate()
        fleet.tick()
    assert fleet.started_s["small"] - began_s <= 0.03


def test_a_large_tenants_old_requests_are_served_in_the_end() -> None:
    # Two tenants with a backlog that never ends; the large one's oldest waits for its own turn.
    router = router_with(CONFIG, spec("w0", batch_limit=1, kv=None, iteration_s=0.05))
    fleet = PlainFleet(router, 0.05, kernel=Kernel.DECODE_ONLY)
    for step in range(400):
        for tenant, many in (("large", 3), ("small", 1)):
            for k in range(many):
                request = Request(
                    request_id=f"{tenant}{step}-{k}",
                    arrival_s=fleet.now_s,
                    prompt_tokens=3,
                    decode_tokens_hint=1 if step else 3,
                    tenant=tenant,
                )
                fleet.arrive(request, 1 if step else 3)
        fleet.tick()
        fleet.iterate()
    first = [fleet.started_s.get(f"large0-{k}") for k in range(3)]
    assert all(start_s is not None and start_s <= 15.0 for start_s in first)


def test_tenants_beyond_the_bound_share_one_account_and_no_series() -> None:
    config = replace(CONFIG, tenants=TenantConfig(weights="vip=2,*=1", tracked_max=4))
    router = router_with(config, spec("w0", batch_limit=2, kv=None))
    for index in range(50):
        router.handle(ask(f"r{index}", 0.0, tenant=f"t{index}", decode_tokens_hint=5), 0.0)
    router.handle(ask("v", 0.0, tenant="vip", decode_tokens_hint=5), 0.0)
    assert len(starts(router.tick(0.0))) == 2
    told = {one.tenant: one for one in router.stats(0.0).tenants}
    assert set(told) == {"vip", "other"}
    assert told["vip"].waiting + told["other"].waiting == 49
    assert len(router._tenants._index) <= 4


def test_use_is_charged_by_what_was_produced_and_forgotten() -> None:
    router = router_with(CONFIG, spec("w0", batch_limit=2, kv=None))
    for name in ("a", "b"):
        router.handle(ask(name, 0.0, tenant=name, decode_tokens_hint=100), 0.0)
    assert len(starts(router.tick(0.0))) == 2
    router.handle(Left("a", Outcome.COMPLETED, 300), 0.0)
    router.handle(Left("b", Outcome.CANCELLED, 0), 0.0)
    use = router._tenants._use
    assert sorted(use[use > 0]) == [300.0]
    router._tenants.discounts(router._waiting.tenants, 600.0)
    assert router._tenants._use.max() < 0.02


@pytest.mark.parametrize(
    "weights", ["a", "a=0", "a=-1", "a=x", "a=1,a=2", "a=inf", "=", "other=1", "a=nan"]
)
def test_weights_that_are_none_are_refused(weights: str) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        TenantConfig(weights=weights)


def test_discounts_are_one_when_off_or_alone_and_fall_with_excess() -> None:
    router = router_with(CONFIG, spec("w0", batch_limit=1, kv=None))
    for index in range(6):
        router.handle(ask(f"a{index}", 0.0, tenant="a", decode_tokens_hint=10), 0.0)
    router.tick(0.0)
    assert router._tenants.discounts(router._waiting.tenants, 0.0).tolist() == [1.0] * 5
    router.handle(ask("b", 0.0, tenant="b", decode_tokens_hint=10), 0.0)
    found = router._tenants.discounts(router._waiting.tenants, 0.0)
    assert np.unique(found).size == 2
    assert 0 < found.min() < 0.1 < found.max() == 1.0
