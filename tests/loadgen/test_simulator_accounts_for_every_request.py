"""Whatever happens, every request ends once and every token and KV block is accounted for."""

from __future__ import annotations

import math
from dataclasses import asdict

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.outcomes import End
from loadgen.router_driver import Controller
from loadgen.simulation_config import Outage, SimulatedWorker, SimulationConfig, Telemetry
from loadgen.simulation_records import SimulationResult
from loadgen.simulator import simulate
from loadgen.trace_record import TraceRequest
from loadgen.true_jsq import TRUE_JSQ, TrueJsq
from service.control.config import ControlConfig, PolicyName, PriceConfig, TenantConfig, Variant
from service.mock.profiles import PROFILES

POLICIES = [*(policy.value for policy in PolicyName), "online_lp_published", TRUE_JSQ]
ROUNDING = 1e-9

requests_strategy = st.lists(
    st.builds(
        TraceRequest,
        arrival_s=st.floats(0, 2),
        prompt_tokens=st.integers(1, 90),
        decode_tokens=st.integers(1, 60),
        decode_tokens_hint=st.none() | st.integers(1, 60),
        value=st.sampled_from((0.5, 1.0, 4.0)),
        tenant=st.sampled_from(("", "a", "b")),
    ),
    min_size=1,
    max_size=25,
)
worker_strategy = st.builds(
    SimulatedWorker,
    worker_id=st.just("w"),
    profile=st.sampled_from((PROFILES["unit"], PROFILES["llama-2-7b-a100"])),
    batch_limit=st.integers(1, 5),
    kv_capacity_tokens=st.integers(112, 400),
    iteration_factor=st.sampled_from((0.5, 1.0, 3.0)),
    prefill=st.booleans(),
)
telemetry_strategy = st.builds(
    Telemetry,
    scrape_interval_s=st.sampled_from((0.0, 0.05, 1.0)),
    scrape_latency_s=st.sampled_from((0.0, 0.3)),
    streams=st.booleans(),
    network_s=st.sampled_from((0.0, 0.004)),
    detect_s=st.sampled_from((0.0, 0.2)),
    price_latency_s=st.sampled_from((0.0, 0.03)),
)


@st.composite
def outages_of(draw: st.DrawFn, worker_id: str) -> list[Outage]:
    """Up to two failures of one worker, one after the other; the last may be for good."""
    found, free_s = [], 0.0
    for _ in range(draw(st.sampled_from((0, 0, 1, 2)))):
        down_s = free_s + draw(st.floats(0, 1))
        up_s = down_s + draw(st.just(math.inf) | st.floats(0.01, 1))
        found.append(Outage(worker_id=worker_id, down_s=down_s, up_s=up_s))
        if math.isinf(up_s):
            break
        free_s = up_s + 0.01
    return found


@st.composite
def configs(draw: st.DrawFn, policy: str) -> SimulationConfig:
    drawn = draw(st.lists(worker_strategy, min_size=1, max_size=3))
    workers = tuple(
        SimulatedWorker(
            worker_id=f"w{i}",
            profile=w.profile,
            batch_limit=w.batch_limit,
            kv_capacity_tokens=w.kv_capacity_tokens,
            iteration_factor=w.iteration_factor,
            prefill=w.prefill,
        )
        for i, w in enumerate(drawn)
    )
    outages = tuple(outage for worker in workers for outage in draw(outages_of(worker.worker_id)))
    published = policy == "online_lp_published"
    known = policy if policy in set(PolicyName) else "online_lp"
    control = ControlConfig(
        policy=PolicyName(known),
        prices=PriceConfig(variant=Variant.PUBLISHED if published else Variant.FORWARD),
        horizon_iterations=512,
        queue_max=draw(st.sampled_from((3, 100))),
        max_wait_s=draw(st.sampled_from((0.3, 100.0))),
        no_worker_hold_s=0.4,
        decode_quantile=draw(st.sampled_from((0.0, 0.9))),
        tenants=TenantConfig(weights=draw(st.sampled_from(("", "a=3,*=1")))),
    )
    return SimulationConfig(
        workers=workers,
        control=control,
        telemetry=draw(telemetry_strategy),
        outages=outages,
        patience_s=draw(st.sampled_from((math.inf, 0.25))),
    )


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), requests=requests_strategy)
def test_every_request_ends_once_and_nothing_is_left(
    policy: str, data: st.DataObject, requests: list[TraceRequest]
) -> None:
    config = data.draw(configs(policy))
    controller: Controller | None = None
    if policy == TRUE_JSQ:
        controller = TrueJsq({str(i): r.decode_tokens for i, r in enumerate(requests)})
    result = simulate(requests, config, controller, name=policy)
    assert [r.trace for r in result.requests] == requests
    check_ends(result, config)
    check_tokens_and_blocks(result, config)
    if result.router is not None:
        check_router(result)


def check_ends(result: SimulationResult, config: SimulationConfig) -> None:
    for request in result.requests:
        assert request.outcome is not None
        assert request.end_s is not None
        times = [request.trace.arrival_s, request.dispatched_s, request.started_s]
        times += [request.first_token_s, request.end_s]
        known = [time_s for time_s in times if time_s is not None]
        assert known == sorted(known)
        if request.outcome is End.COMPLETED:
            assert None not in times
            assert request.output_tokens == request.trace.decode_tokens
        if request.outcome is End.CANCELLED:
            assert request.end_s == pytest.approx(request.trace.arrival_s + config.patience_s)
        if request.outcome is End.REFUSED:
            assert request.detail
    summary = result.summary()
    assert summary["accounted"]
    assert sum(summary[end.value] for end in End) == len(result.requests)


def check_tokens_and_blocks(result: SimulationResult, config: SimulationConfig) -> None:
    received = sum(request.output_tokens for request in result.requests)
    produced = sum(worker.output_tokens for worker in result.workers)
    patient = math.isinf(config.patience_s)
    assert received == produced if patient else received <= produced
    assert sum(r.preemptions for r in result.requests) == sum(w.preemptions for w in result.workers)
    for worker in result.workers:
        assert 0 <= worker.batch_use <= 1 + ROUNDING
        assert worker.kv_use <= worker.kv_use_peak + ROUNDING
        assert worker.kv_use_peak <= 1
        assert worker.busy_s <= result.end_s + ROUNDING
        if patient or config.telemetry.network_s == 0:
            assert worker.kv_tokens_at_end == 0


def check_router(result: SimulationResult) -> None:
    router = result.router
    assert router is not None
    assert (router.waiting, router.running) == (0, 0)
    assert router.entered == len(result.requests)
    ends = {End(outcome.value): count for outcome, count in router.ended.items()}
    ends[End.REFUSED] = sum(router.refused.values())
    for end in End:
        assert ends[end] == sum(request.outcome is end for request in result.requests)
    assert (router.fallback_ticks, router.last_fault) == (0, "")


@pytest.mark.parametrize("policy", ["online_lp", "online_lp_published", "power_of_two"])
@settings(max_examples=8, deadline=None)
@given(data=st.data(), requests=requests_strategy)
def test_failures_stale_news_and_unequal_fleets_repeat_byte_for_byte(
    policy: str, data: st.DataObject, requests: list[TraceRequest]
) -> None:
    config = data.draw(configs(policy))
    written = [
        (
            orjson.dumps(result.summary()),
            orjson.dumps([asdict(record) for record in result.outcome_records()]),
        )
        for result in (simulate(requests, config) for _ in range(2))
    ]
    assert written[0] == written[1]
