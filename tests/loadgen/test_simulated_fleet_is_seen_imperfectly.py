"""Failures, late news and wrong news: what the router is told, and what that does to requests."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from loadgen.outcomes import End
from loadgen.router_driver import RouterDriver, Surroundings
from loadgen.simulation_config import Outage, SimulatedWorker, SimulationConfig, Telemetry
from loadgen.simulation_records import SimulationResult
from loadgen.simulator import Hooks, simulate
from loadgen.trace_record import TraceRequest
from loadgen.true_jsq import TrueJsq
from loadgen.virtual_time import VirtualTime
from service.control.config import ControlConfig, PolicyName
from service.control.events import (
    Arrived,
    Command,
    Event,
    FirstToken,
    Left,
    Outcome,
    Progressed,
    Refusal,
    Refuse,
    Returned,
    Start,
    WorkerChanged,
    WorkerReported,
    WorkerState,
)
from service.control.router import Router
from service.mock.profiles import PROFILES

UNIT = PROFILES["unit"]


class Listening(Router):
    """The real Router, with every event it was told written down."""

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        self.heard: list[tuple[float, Event]] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self.heard.append((now_s, event))
        return super().handle(event, now_s)

    def told(self, kind: type[Event]) -> list[tuple[float, Event]]:
        return [(now_s, event) for now_s, event in self.heard if isinstance(event, kind)]


def requests_at(*times_s: float, decode_tokens: int = 10) -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=time_s,
            prompt_tokens=20,
            decode_tokens=decode_tokens,
            decode_tokens_hint=decode_tokens,
        )
        for time_s in times_s
    ]


def fleet(workers: int, batch_limit: int = 1) -> tuple[SimulatedWorker, ...]:
    return tuple(
        SimulatedWorker(worker_id=f"w{i}", profile=UNIT, batch_limit=batch_limit)
        for i in range(workers)
    )


CENTRAL = SimulationConfig(
    workers=fleet(2),
    control=ControlConfig(policy=PolicyName.CENTRAL_FCFS, max_wait_s=1000.0),
    telemetry=Telemetry(scrape_interval_s=0.0),
)


def play(
    requests: list[TraceRequest], config: SimulationConfig
) -> tuple[SimulationResult, Listening]:
    router = Listening(config.control)
    return simulate(requests, config, router), router


def test_a_worker_that_dies_fails_what_it_holds_and_gets_nothing_until_it_is_back() -> None:
    outage = Outage(worker_id="w0", down_s=0.055, up_s=0.5)
    config = replace(CENTRAL, outages=(outage,))
    result, _ = play(requests_at(0.0, 0.0, 0.06, 0.07, 0.6, 0.6), config)
    ends = [(r.outcome, r.worker, r.output_tokens) for r in result.requests]
    assert ends[0] == (End.FAILED, "w0", 5)
    assert result.requests[0].detail == "worker_failed"
    assert result.requests[0].end_s == pytest.approx(0.055)
    assert ends[1:] == [
        (End.COMPLETED, "w1", 10),
        (End.COMPLETED, "w1", 10),
        (End.COMPLETED, "w1", 10),
        (End.COMPLETED, "w0", 10),
        (End.COMPLETED, "w1", 10),
    ]


def test_a_start_on_a_dead_worker_comes_back_and_goes_elsewhere() -> None:
    outage = Outage(worker_id="w0", down_s=0.01)
    telemetry = Telemetry(scrape_interval_s=0.0, detect_s=5.0, network_s=0.002)
    config = replace(CENTRAL, outages=(outage,), telemetry=telemetry)
    result, router = play(requests_at(0.1), config)
    (request,) = result.requests
    assert [now_s for now_s, _ in router.told(Returned)] == [pytest.approx(0.104)]
    assert (request.outcome, request.worker) == (End.COMPLETED, "w1")
    assert request.dispatched_s == pytest.approx(0.104)
    assert request.started_s == pytest.approx(0.106)


def test_a_fleet_that_is_down_for_good_refuses() -> None:
    outages = tuple(Outage(worker_id=f"w{i}", down_s=0.0) for i in range(2))
    config = replace(CENTRAL, outages=outages)
    result, _ = play(requests_at(0.1), config)
    assert result.requests[0].outcome is End.REFUSED
    assert result.requests[0].detail == Refusal.NO_WORKER.value


def test_the_network_delays_tokens_and_starts_by_one_way_each() -> None:
    config = replace(CENTRAL, telemetry=Telemetry(scrape_interval_s=0.0, network_s=0.003))
    result, router = play(requests_at(0.0), config)
    (request,) = result.requests
    assert request.started_s == pytest.approx(0.003)
    assert request.first_token_s == pytest.approx(0.003 + 0.01 + 0.003)
    assert request.end_s == pytest.approx(0.003 + 0.1 + 0.003)
    assert [now_s for now_s, _ in router.told(FirstToken)] == [request.first_token_s]


def test_scrapes_come_at_their_interval_and_are_as_old_as_their_latency() -> None:
    telemetry = Telemetry(scrape_interval_s=0.04, scrape_latency_s=0.015)
    config = replace(CENTRAL, workers=fleet(1, batch_limit=2), telemetry=telemetry)
    _, router = play(requests_at(0.0, 0.0, decode_tokens=20), config)
    told = [(now_s, event) for now_s, event in router.told(WorkerReported)]
    assert [now_s for now_s, _ in told] == [pytest.approx(0.055 + 0.04 * k) for k in range(4)]
    for now_s, event in told:
        assert isinstance(event, WorkerReported)
        assert now_s - event.reported_at_s == pytest.approx(0.015)
        assert event.report.running == 2
        assert event.report.iteration_s == pytest.approx(0.01)
        assert event.report.kv_tokens_used == 2 * 32 if event.reported_at_s < 0.12 else 2 * 48


def test_reported_iteration_times_can_be_wrong_by_a_factor() -> None:
    telemetry = Telemetry(scrape_interval_s=0.05, report_bias=1.3)
    _, router = play(requests_at(0.0), replace(CENTRAL, telemetry=telemetry))
    times_s = [event.report.iteration_s for _, event in router.told(WorkerReported)]
    assert pytest.approx(0.013) in times_s


def test_a_worker_that_came_back_says_that_it_was_restarted() -> None:
    outage = Outage(worker_id="w0", down_s=0.11, up_s=0.15)
    telemetry = Telemetry(scrape_interval_s=0.1)
    config = replace(CENTRAL, workers=fleet(1), outages=(outage,), telemetry=telemetry)
    _, router = play(requests_at(0.0, 0.16, 0.5), config)
    restarted = [event.report.restarted for _, event in router.told(WorkerReported)]
    assert restarted[:4] == [False, True, False, False]
    changes = [(now_s, event.state) for now_s, event in router.told(WorkerChanged)]
    assert changes == [(0.11, WorkerState.DOWN), (0.15, WorkerState.UP)]


def test_without_streams_the_router_hears_of_no_token_before_the_end() -> None:
    telemetry = Telemetry(scrape_interval_s=0.0, streams=False)
    result, router = play(requests_at(0.0), replace(CENTRAL, telemetry=telemetry))
    assert not router.told(FirstToken)
    assert not router.told(Progressed)
    assert result.requests[0].ttft_s == pytest.approx(0.01)
    arrived = router.told(Arrived)[0][1]
    assert isinstance(arrived, Arrived)
    assert not arrived.request.streams


def test_an_impatient_client_leaves_the_queue_or_the_worker_and_its_slot_is_free() -> None:
    config = replace(CENTRAL, workers=fleet(1), patience_s=0.05)
    requests = requests_at(0.0, 0.01) + requests_at(0.2, decode_tokens=2)
    result, router = play(requests, config)
    assert [r.outcome for r in result.requests] == [End.COMPLETED, End.CANCELLED, End.COMPLETED]
    assert result.requests[1].end_s == pytest.approx(0.06)
    assert router.told(Left)[0][1] == Left("1", Outcome.CANCELLED, 0)
    pushed = replace(config, control=ControlConfig(policy=PolicyName.ROUND_ROBIN))
    result, _ = play(requests, pushed)
    assert [r.outcome for r in result.requests] == [End.COMPLETED, End.CANCELLED, End.COMPLETED]
    assert result.workers[0].kv_tokens_at_end == 0


def test_a_client_that_left_is_not_said_to_start_while_the_abort_travels() -> None:
    control = ControlConfig(policy=PolicyName.ROUND_ROBIN)
    telemetry = Telemetry(scrape_interval_s=0.0, network_s=0.004)
    config = replace(CENTRAL, workers=fleet(1), control=control, telemetry=telemetry)
    # Its slot is free at 0.104; the abort, sent at 0.102, is there at 0.106.
    result, _ = play(requests_at(0.0, 0.002), replace(config, patience_s=0.1))
    assert result.requests[1].outcome is End.CANCELLED
    assert result.requests[1].started_s is None
    assert result.workers[0].kv_tokens_at_end == 0


def test_a_request_larger_than_its_worker_fails_there() -> None:
    small = SimulatedWorker(worker_id="w0", profile=UNIT, batch_limit=1, kv_capacity_tokens=64)
    control = ControlConfig(policy=PolicyName.ROUND_ROBIN)
    config = replace(CENTRAL, workers=(small,), control=control)
    result, _ = play(requests_at(0.0, decode_tokens=100), config)
    assert result.requests[0].outcome is End.FAILED
    assert result.requests[0].detail == "too_large_for_worker"


def test_a_slow_worker_takes_its_factor_longer() -> None:
    slow = replace(fleet(1)[0], iteration_factor=2.5)
    result, _ = play(requests_at(0.0), replace(CENTRAL, workers=(slow,)))
    assert result.requests[0].end_s == pytest.approx(0.25)


def test_the_router_is_driven_the_same_whether_watched_or_not() -> None:
    commands: list[tuple[float, Command]] = []
    ends: list[int] = []
    hooks = Hooks(
        on_command=lambda now_s, command: commands.append((now_s, command)),
        on_end=lambda request: ends.append(request.index),
    )
    requests = requests_at(*(0.004 * k for k in range(20)))
    watched = simulate(requests, CENTRAL, hooks=hooks)
    assert watched == simulate(requests, CENTRAL)
    assert [c.request_id for _, c in commands if isinstance(c, Start)] == [
        str(k) for k in range(20)
    ]
    assert sorted(ends) == list(range(20))


def test_true_jsq_counts_the_tokens_that_are_left() -> None:
    requests = [
        TraceRequest(arrival_s=time_s, prompt_tokens=5, decode_tokens=tokens)
        for time_s, tokens in ((0.0, 50), (0.01, 10), (0.02, 10), (0.30, 12), (0.31, 5))
    ]
    exact = {str(i): r.decode_tokens for i, r in enumerate(requests)}
    config = replace(CENTRAL, workers=fleet(2, batch_limit=2))
    result = simulate(requests, config, TrueJsq(exact), name="true_jsq")
    # At 0.30 w0 owes 20 of 50 tokens and w1 nothing; at 0.31 w1 owes 11 and w0 19.
    assert [r.worker for r in result.requests] == ["w0", "w1", "w1", "w1", "w1"]


class Circling:
    """A controller that starts a request on a dead worker for ever."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, Returned):
            self.waiting.append(event.request_id)
        if isinstance(event, Arrived):
            self.waiting.append(event.request.request_id)
        return []

    def tick(self, now_s: float) -> list[Command]:
        starts: list[Command] = [Start(request_id, "w0") for request_id in self.waiting]
        self.waiting.clear()
        return starts

    def next_tick_s(self, now_s: float) -> float | None:
        return None

    def price_problem(self, now_s: float) -> None:
        return None

    def adopt(self, solution: object, now_s: float) -> None:
        raise AssertionError("there was no problem to solve")


class Forgetful(Circling):
    """A controller that never answers."""

    def tick(self, now_s: float) -> list[Command]:
        return []


def test_a_controller_that_runs_in_a_circle_is_stopped() -> None:
    config = replace(CENTRAL, outages=(Outage(worker_id="w0", down_s=0.0),))
    with pytest.raises(RuntimeError, match=r"did not come to rest at 0\.5 s"):
        simulate(requests_at(0.5), config, Circling())


def test_a_controller_that_forgets_requests_is_found_out() -> None:
    with pytest.raises(RuntimeError, match="1 requests wait and nothing will ever happen"):
        simulate(requests_at(0.5), CENTRAL, Forgetful())


def test_prices_are_adopted_after_their_latency_and_one_problem_is_open_at_a_time() -> None:
    class Priced(Forgetful):
        adopted_s: list[float]

        def price_problem(self, now_s: float) -> Problem | None:  # type: ignore[override]
            return Problem()

        def adopt(self, solution: object, now_s: float) -> None:
            self.adopted_s.append(now_s)

    class Problem:
        def solve(self) -> str:
            return "prices"

    controller = Priced()
    controller.adopted_s = []
    time = VirtualTime()
    around = Surroundings(
        time=time,
        obey=lambda _: None,
        progress=dict,
        ticked=lambda _: None,
        price_latency_s=0.25,
    )
    driver = RouterDriver(controller, around)
    for step in range(10):
        time.at(0.1 * step, lambda: driver.tell(WorkerChanged("w0", WorkerState.UP)))
    while math.isfinite(time.next_s()):
        time.play(time.next_s())
        driver.settle()
    assert controller.adopted_s == [pytest.approx(t) for t in (0.25, 0.55, 0.85, 1.15)]


def test_refusals_of_the_router_end_requests() -> None:
    control = ControlConfig(policy=PolicyName.CENTRAL_FCFS, queue_max=1)
    commands: list[Command] = []
    config = replace(CENTRAL, workers=fleet(1), control=control)
    hooks = Hooks(on_command=lambda _, command: commands.append(command))
    result = simulate(requests_at(0.0, 0.001, 0.002), config, hooks=hooks)
    assert [r.outcome for r in result.requests] == [End.COMPLETED, End.COMPLETED, End.REFUSED]
    assert result.requests[2].detail == Refusal.QUEUE_FULL.value
    assert sum(isinstance(command, Refuse) for command in commands) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimulationConfig(workers=()), "at least one worker"),
        (lambda: SimulationConfig(workers=(fleet(1)[0],) * 2), "own name"),
        (lambda: replace(CENTRAL, outages=(Outage(worker_id="x", down_s=1),)), "unknown worker"),
        (lambda: replace(CENTRAL, patience_s=0.0), "patience_s"),
        (lambda: Outage(worker_id="w0", down_s=2, up_s=1), "down_s < up_s"),
        (lambda: Telemetry(network_s=-1.0), "network_s"),
        (lambda: Telemetry(report_bias=0.0), "report_bias"),
        (lambda: replace(fleet(1)[0], iteration_factor=0.0), "iteration_factor"),
    ],
)
def test_a_simulation_that_makes_no_sense_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
