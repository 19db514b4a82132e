"""One simulation of an experiment: what is sent, to which fleet, decided by which rule.

A case is a value: equal cases are simulated once, and any process may do it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from loadgen import simulator
from loadgen.cache_aware import CacheAware
from loadgen.experiments.loads import (
    Load,
    build_requests,
    gap_variation,
    kv_iterations,
    offered_kv_load,
    offered_load,
)
from loadgen.experiments.measures import Measured, measure
from loadgen.experiments.predictors import make_predictor
from loadgen.experiments.reserve import PriorityReserve
from loadgen.experiments.rules import Kind, Rule
from loadgen.experiments.watchers import PriceWatcher, TickTimer
from loadgen.simulation_config import Outage, SimulatedWorker, SimulationConfig, Telemetry
from loadgen.simulator import Hooks
from loadgen.true_jsq import TrueJsq
from loadgen.workload import Prediction
from service.control.router import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.router_driver import Controller
    from loadgen.trace_record import TraceRequest


class Probe(StrEnum):
    """What is recorded beside the sums."""

    NONE = "none"
    WINDOWS = "windows"
    PRICES = "prices"
    TICKS = "ticks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation.

    Attributes:
        load: what is sent.
        workers: the fleet.
        rule: what decides.
        telemetry: how well it sees.
        outages: failures.
        ttft_bound_s: bound of the share within it, where a request brings none.
        probe: what is recorded beside the sums.
    """

    load: Load
    workers: tuple[SimulatedWorker, ...]
    rule: Rule
    telemetry: Telemetry = field(default_factory=Telemetry)
    outages: tuple[Outage, ...] = ()
    ttft_bound_s: float = 0.49
    probe: Probe = Probe.NONE


def make_case(case: Case) -> Case:
    """Drop what makes no difference, so that equal simulations become equal values."""
    if case.rule.blind and case.load.prediction is not Prediction.EXACT:
        return replace(case, load=replace(case.load, prediction=Prediction.EXACT))
    return case


def run_case(case: Case) -> Measured:
    """Simulate one case; the same case gives the same result in any process."""
    requests = build_requests(case.load, case.workers)
    offered = {
        "offered_load": offered_load(requests, case.workers),
        "offered_kv_load": offered_kv_load(requests, case.workers),
        "gap_variation": gap_variation(requests),
        "mean_prompt_tokens": sum(r.prompt_tokens for r in requests) / len(requests),
        "mean_decode_tokens": sum(r.decode_tokens for r in requests) / len(requests),
        "mean_kv_iterations": sum(kv_iterations(r) for r in requests) / len(requests),
    }
    solved = _solved(case, requests)
    if solved is not None:
        return Measured(values=solved | offered)
    config = SimulationConfig(
        workers=case.workers,
        control=replace(case.rule.control, seed=case.load.seed),
        telemetry=case.telemetry,
        outages=case.outages,
        ttft_bound_s=case.ttft_bound_s,
    )
    controller = make_controller(case.rule, config, requests)
    watcher = _watcher(case, controller)
    hooks = Hooks() if watcher is None else Hooks(on_tick=watcher.on_tick)
    driven = watcher if isinstance(watcher, TickTimer) else controller
    result = simulator.simulate(requests, config, driven, name=case.rule.label, hooks=hooks)
    measured = measure(result, windows=case.probe is Probe.WINDOWS)
    series = measured.series | ({} if watcher is None else watcher.series())
    return Measured(values=measured.values | offered, series=series)


def _solved(case: Case, requests: Sequence[TraceRequest]) -> dict[str, float] | None:
    """What a rule that is no policy works out; None for a policy."""
    if case.rule.kind not in (Kind.HINDSIGHT, Kind.REWARD_BOUND, Kind.OFFLINE):
        return None
    # Solvers take longer to load than all the rest, and few processes need one.
    from loadgen.experiments.hindsight_lp import hindsight_bounds, relax
    from loadgen.experiments.offline import best_schedule

    match case.rule.kind:
        case Kind.HINDSIGHT:
            return hindsight_bounds(requests, case.workers, case.ttft_bound_s)
        case Kind.REWARD_BOUND:
            program = relax(requests, case.workers, case.ttft_bound_s, case.rule.bucket_iterations)
            return {"ttft_mean_s": program.ttft_mean_s(), "reward_s": program.reward_s()}
        case _:
            return best_schedule(requests, case.workers)


def make_controller(
    rule: Rule, config: SimulationConfig, requests: Sequence[TraceRequest]
) -> Controller:
    """Build what decides."""
    match rule.kind:
        case Kind.TRUE_JSQ:
            return TrueJsq({str(i): request.decode_tokens for i, request in enumerate(requests)})
        case Kind.CACHE_AWARE:
            return CacheAware(rule.cache)
        case Kind.RESERVE:
            return PriorityReserve(Router(config.control), rule.reserve_slots)
        case _:
            return Router(config.control, make_predictor(rule.lengths, config.control))


def _watcher(case: Case, controller: Controller) -> PriceWatcher | TickTimer | None:
    if case.probe is Probe.PRICES and isinstance(controller, Router):
        return PriceWatcher(controller, case.workers)
    if case.probe is Probe.TICKS:
        return TickTimer(controller, time.perf_counter)
    return None
