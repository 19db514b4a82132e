"""A fleet of decode models and a workload around the real Router, in virtual time.

Everything that happens to a request is here: it arrives, is started or refused, reaches its
worker, yields tokens, ends. Read router_driver.py for how the Router is called, simulated_fleet.py
for a worker, simulation_records.py for what comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, assert_never

from loadgen.outcomes import End
from loadgen.router_driver import Controller, RouterDriver, Surroundings
from loadgen.simulated_fleet import FleetWorker
from loadgen.simulation_records import SimulatedRequest, SimulationResult
from loadgen.virtual_time import VirtualTime
from service.control.events import (
    Arrived,
    Command,
    FirstToken,
    Left,
    Outcome,
    Prefill,
    Prefix,
    Refuse,
    Request,
    Returned,
    Start,
    WorkerChanged,
    WorkerJoined,
    WorkerReported,
    WorkerState,
)
from service.control.router import Router
from service.mock.decode_records import Iteration, RequestTooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadgen.simulation_config import Outage, SimulationConfig
    from loadgen.trace_record import TraceRequest


def _unheard(*_: object) -> None:
    """Hear nothing."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Ways to watch a simulation while it runs; none of them may change anything.

    Attributes:
        on_command: called with the time and every command of the controller.
        on_tick: called with the time after every tick's commands were obeyed.
        on_end: called with every request that ended.
    """

    on_command: Callable[[float, Command], None] = _unheard
    on_tick: Callable[[float], None] = _unheard
    on_end: Callable[[SimulatedRequest], None] = _unheard


def simulate(
    requests: Sequence[TraceRequest],
    config: SimulationConfig,
    controller: Controller | None = None,
    *,
    name: str = "",
    hooks: Hooks | None = None,
) -> SimulationResult:
    """Run a workload to its last end.

    Args:
        requests: the workload; request i is known to the controller as str(i).
        config: fleet, router settings, telemetry, outages.
        controller: what decides; None for a Router with config.control.
        name: what the policy is called in the records; "" for the configured policy's name.
        hooks: watchers.
    """
    decider = Router(config.control) if controller is None else controller
    return _Simulation(requests, config, decider, hooks or Hooks()).run(
        name or config.control.policy.value
    )


class _Simulation:
    """One run; `run` may be called once."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        config: SimulationConfig,
        controller: Controller,
        hooks: Hooks,
    ) -> None:
        self._config = config
        self._telemetry = config.telemetry
        self._controller = controller
        self._hooks = hooks
        self._requests = {str(i): SimulatedRequest(i, trace) for i, trace in enumerate(requests)}
        self._arrivals = iter(sorted(self._requests.values(), key=lambda r: r.trace.arrival_s))
        self._workers = {setup.worker_id: FleetWorker(setup) for setup in config.workers}
        self._time = VirtualTime()
        self._driver = RouterDriver(
            controller,
            Surroundings(
                time=self._time,
                obey=self._obey,
                progress=self._take_progress,
                ticked=hooks.on_tick,
                price_latency_s=config.telemetry.price_latency_s,
            ),
        )
        self._piece_tokens = max(setup.piece_tokens for setup in config.workers)
        self._open = len(self._requests)
        self._end_s = 0.0
        self._touched: dict[str, FleetWorker] = {}
        self._progressed: dict[str, FleetWorker] = {}

    def run(self, name: str) -> SimulationResult:
        """Play everything and sum it up under a policy name."""
        self._set_up()
        while self._open:
            instant_s = min(self._time.next_s(), self._driver.timer_s)
            if math.isinf(instant_s):
                raise RuntimeError(f"{self._open} requests wait and nothing will ever happen")
            self._time.play(instant_s)
            self._driver.settle()
            self._begin_iterations()
        router = self._controller if isinstance(self._controller, Router) else None
        return SimulationResult(
            policy=name,
            ttft_bound_s=self._config.ttft_bound_s,
            requests=tuple(self._requests.values()),
            workers=tuple(worker.use(self._end_s) for worker in self._workers.values()),
            router=None if router is None else router.stats(self._time.now_s),
            end_s=self._end_s,
        )

    def _set_up(self) -> None:
        interval_s = self._telemetry.scrape_interval_s
        for turn, (worker_id, worker) in enumerate(self._workers.items(), start=1):
            self._driver.tell(WorkerJoined(worker.setup.spec()))
            if interval_s > 0:
                first_s = interval_s * turn / len(self._workers)
                self._time.at(first_s, partial(self._scrape, worker_id))
        for outage in self._config.outages:
            self._time.at(outage.down_s, partial(self._go_down, outage))
        self._next_arrival()

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._time.at(request.trace.arrival_s, partial(self._arrive, request))

    def _arrive(self, request: SimulatedRequest) -> None:
        self._next_arrival()
        trace = request.trace
        if math.isfinite(self._config.patience_s):
            leave = partial(self._lose_patience, request)
            self._time.later(self._config.patience_s, leave)
        self._driver.tell(
            Arrived(
                Request(
                    request_id=str(request.index),
                    arrival_s=trace.arrival_s,
                    prompt_tokens=trace.prompt_tokens,
                    decode_tokens_hint=trace.decode_tokens_hint,
                    tenant=trace.tenant,
                    group=trace.group,
                    value=trace.value,
                    ttft_bound_s=trace.ttft_bound_s,
                    streams=self._telemetry.streams,
                    prefix=self._prefix(trace),
                )
            )
        )

    def _prefix(self, trace: TraceRequest) -> Prefix | None:
        """What a trace says of a prompt's beginning, where workers keep prompts."""
        if not (self._piece_tokens and trace.hash_ids):
            return None
        size = self._piece_tokens
        ends = tuple(range(size, size * len(trace.hash_ids) + 1, size))
        return Prefix(trace.hash_ids, ends)

    def _obey(self, command: Command) -> None:
        self._hooks.on_command(self._time.now_s, command)
        request = self._requests[command.request_id]
        match command:
            case Start(_, worker_id):
                request.worker = worker_id
                request.dispatched_s = self._time.now_s
                self._time.later(self._telemetry.network_s, partial(self._deliver, request))
            case Refuse(_, reason, _):
                request.detail = reason.value
                self._end(request, End.REFUSED, 0)
            case Prefill():
                raise ValueError("the simulator has no prefill workers")
            case _:
                assert_never(command)

    def _deliver(self, request: SimulatedRequest) -> None:
        """A start reaches its worker."""
        if request.outcome is not None:
            return
        worker, trace = self._workers[request.worker], request.trace
        network_s = self._telemetry.network_s
        if not worker.up:
            self._time.later(network_s, partial(self._hand_back, request))
            return
        try:
            worker.model.submit(
                str(request.index),
                trace.prompt_tokens,
                trace.decode_tokens,
                pieces=trace.hash_ids,
            )
        except RequestTooLargeError:
            lose = partial(self._lose, request, 0, "too_large_for_worker")
            self._time.later(network_s, lose)
        else:
            self._touched[request.worker] = worker

    def _hand_back(self, request: SimulatedRequest) -> None:
        if request.outcome is None:
            request.worker = ""
            self._driver.tell(Returned(str(request.index)))

    def _begin_iterations(self) -> None:
        for worker_id, worker in self._touched.items():
            if worker.up and not worker.iterating:
                end_s = worker.begin(self._time.now_s)
                if end_s is not None:
                    self._time.at(end_s, partial(self._end_iteration, worker_id, worker.life))
        self._touched.clear()

    def _end_iteration(self, worker_id: str, life: int) -> None:
        worker = self._workers[worker_id]
        if worker.life != life:
            return
        iteration = worker.end(self._time.now_s)
        self._touched[worker_id] = worker
        if self._telemetry.streams:
            self._progressed[worker_id] = worker
        for request_id in iteration.preempted:
            self._requests[request_id].preemptions += 1
        for request_id in iteration.started:
            request = self._requests[request_id]
            if request.started_s is None and request.outcome is None:
                request.started_s = worker.began_s
        if iteration.first_tokens or iteration.finished:
            self._time.later(self._telemetry.network_s, partial(self._see_tokens, iteration))

    def _see_tokens(self, iteration: Iteration) -> None:
        """Tokens reach the router: first ones and last ones are events."""
        for request_id in iteration.first_tokens:
            request = self._requests[request_id]
            if request.outcome is None:
                request.first_token_s = self._time.now_s
                if self._telemetry.streams:
                    self._driver.tell(FirstToken(request_id))
        for request_id in iteration.finished:
            request = self._requests[request_id]
            self._leave(request, Outcome.COMPLETED, request.trace.decode_tokens)

    def _take_progress(self) -> dict[str, int]:
        """Tokens so far on the workers that ended an iteration since the last tick."""
        progress: dict[str, int] = {}
        for worker in self._progressed.values():
            progress |= worker.model.progress()
        self._progressed.clear()
        if self._telemetry.network_s > 0:
            requests = self._requests
            progress = {i: n for i, n in progress.items() if requests[i].outcome is None}
        return progress

    def _lose_patience(self, request: SimulatedRequest) -> None:
        if request.outcome is None and request.first_token_s is None:
            self._leave(request, Outcome.CANCELLED, 0)
            if request.worker:
                self._time.later(self._telemetry.network_s, partial(self._abort, request))

    def _abort(self, request: SimulatedRequest) -> None:
        worker = self._workers[request.worker]
        if worker.model.abort(str(request.index)):
            self._touched[request.worker] = worker

    def _go_down(self, outage: Outage) -> None:
        telemetry = self._telemetry
        for request_id, tokens in self._workers[outage.worker_id].fail().items():
            lose = partial(self._lose, self._requests[request_id], tokens, "worker_failed")
            self._time.later(telemetry.network_s, lose)
        change = WorkerChanged(outage.worker_id, WorkerState.DOWN)
        self._time.later(telemetry.detect_s, partial(self._driver.tell, change))
        if math.isfinite(outage.up_s):
            self._time.at(outage.up_s, partial(self._come_up, outage.worker_id))

    def _come_up(self, worker_id: str) -> None:
        self._workers[worker_id].up = True
        change = WorkerChanged(worker_id, WorkerState.UP)
        self._time.later(self._telemetry.detect_s, partial(self._driver.tell, change))

    def _lose(self, request: SimulatedRequest, tokens: int, detail: str) -> None:
        if request.outcome is None:
            request.detail = detail
            self._leave(request, Outcome.FAILED, tokens)

    def _leave(self, request: SimulatedRequest, outcome: Outcome, tokens: int) -> None:
        """End a request that the controller has not ended itself, and tell it."""
        if request.outcome is None:
            self._end(request, End(outcome.value), tokens)
            self._driver.tell(Left(str(request.index), outcome, tokens))

    def _end(self, request: SimulatedRequest, outcome: End, tokens: int) -> None:
        if request.outcome is not None:
            raise RuntimeError(f"request {request.index} ended twice")
        request.outcome = outcome
        request.end_s = self._end_s = self._time.now_s
        request.output_tokens = tokens
        self._open -= 1
        self._hooks.on_end(request)

    def _scrape(self, worker_id: str) -> None:
        worker, telemetry = self._workers[worker_id], self._telemetry
        self._time.later(telemetry.scrape_interval_s, partial(self._scrape, worker_id))
        if worker.up:
            report = worker.report(telemetry.report_bias)
            event = WorkerReported(worker_id, report, self._time.now_s)
            self._time.later(telemetry.scrape_latency_s, partial(self._driver.tell, event))
