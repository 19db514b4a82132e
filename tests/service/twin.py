"""The simulator's workers behind the live queue, on a virtual clock: the other half of the twin.

Order inside one instant, as the simulator has it: iterations end, then their requests' tasks and
new arrivals speak to the queue, then it decides, then starts reach workers, then iterations begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from loadgen.simulated_fleet import FleetWorker
from loadgen.simulation_config import SimulatedWorker, SimulationConfig
from loadgen.trace_record import TraceRequest
from service.central_queue import CentralQueue
from service.control.config import ControlConfig
from service.control.events import (
    Command,
    Event,
    Request,
    WorkerJoined,
    WorkerReported,
)
from service.control.router import Router
from service.errors import RefusedError
from service.placement import Placement
from service.queue_stats import QueueConfig
from service.refresher import InlineRefresher

SETTLED_S = 1e-8
"""After this much virtual time everything of one instant has been said and done."""


class RecordingRouter(Router):
    """The real router, with a log of its commands."""

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        self.log: list[tuple[float, Command]] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        return self._keep(super().handle(event, now_s), now_s)

    def tick(self, now_s: float) -> list[Command]:
        return self._keep(super().tick(now_s), now_s)

    def _keep(self, commands: list[Command], now_s: float) -> list[Command]:
        self.log += [(now_s, command) for command in commands]
        return commands


@dataclass(eq=False)
class Running:
    """A started request at its worker."""

    placement: Placement
    has_first: bool = False
    finished: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)


class TwinWorker:
    """A simulated worker whose iterations are timers of the event loop."""

    def __init__(self, setup: SimulatedWorker) -> None:
        self.worker = FleetWorker(setup)
        self._held: dict[str, Running] = {}
        self._beginning = False

    def submit(self, running: Running, trace: TraceRequest) -> None:
        request_id = running.placement.request.request_id
        self._held[request_id] = running
        self.worker.model.submit(request_id, trace.prompt_tokens, trace.decode_tokens)
        self._begin_later(asyncio.get_running_loop().time())

    def abort(self, running: Running) -> None:
        request_id = running.placement.request.request_id
        del self._held[request_id]
        if self.worker.model.abort(request_id):
            self._begin_later(asyncio.get_running_loop().time())

    def _begin_later(self, instant_s: float) -> None:
        if not self._beginning:
            self._beginning = True
            loop = asyncio.get_running_loop()
            loop.call_at(instant_s + SETTLED_S, self._begin, instant_s)

    def _begin(self, instant_s: float) -> None:
        self._beginning = False
        if not self.worker.iterating:
            end_s = self.worker.begin(instant_s)
            if end_s is not None:
                asyncio.get_running_loop().call_at(end_s, self._end, end_s)

    def _end(self, end_s: float) -> None:
        iteration = self.worker.end(end_s)
        for request_id, tokens in self.worker.model.progress().items():
            self._held[request_id].placement.progressed(tokens)
        for request_id in iteration.first_tokens:
            if request_id in self._held:
                self._held[request_id].has_first = True
                self._held[request_id].news.set()
        for request_id in iteration.finished:
            running = self._held.pop(request_id)
            running.finished = True
            running.news.set()
        self._begin_later(end_s)


async def live_log(
    requests: Sequence[TraceRequest], config: SimulationConfig
) -> list[tuple[float, Command]]:
    """Play a workload through tasks, `place` and the queue's ticks; call it on a virtual loop."""
    router = RecordingRouter(config.control)
    queue = CentralQueue(
        router=router,
        refresher=InlineRefresher(),
        config=QueueConfig(),
        on_tick=lambda _: None,
        stopwatch=lambda: 0.0,
        log=structlog.get_logger(),
    )
    workers = {setup.worker_id: TwinWorker(setup) for setup in config.workers}
    async with asyncio.TaskGroup() as group:
        joining = group.create_task(_join(queue, workers))
        scraping = [
            group.create_task(_scrape(queue, workers, worker_id, config)) for worker_id in workers
        ]
        clients = [
            group.create_task(_client(queue, workers, trace, config.patience_s))
            for trace in requests
        ]
        await asyncio.wait([joining, *clients])
        for task in scraping:
            task.cancel()
    queue.close()
    stats = queue.stats()
    assert (stats.imbalance, stats.tick_errors, stats.event_errors) == (0, 0, 0)
    return router.log


async def _until(time_s: float) -> None:
    loop = asyncio.get_running_loop()
    reached: asyncio.Future[None] = loop.create_future()
    loop.call_at(time_s, reached.set_result, None)
    await reached


async def _join(queue: CentralQueue, workers: dict[str, TwinWorker]) -> None:
    await _until(0.0)
    for worker in workers.values():
        queue.publish(WorkerJoined(worker.worker.setup.spec()))


async def _scrape(
    queue: CentralQueue, workers: dict[str, TwinWorker], worker_id: str, config: SimulationConfig
) -> None:
    interval_s = config.telemetry.scrape_interval_s
    turn = list(workers).index(worker_id) + 1
    at_s = interval_s * turn / len(workers)
    while interval_s > 0:
        await _until(at_s)
        queue.publish(WorkerReported(worker_id, workers[worker_id].worker.report(1.0), at_s))
        at_s += interval_s


async def _client(
    queue: CentralQueue,
    workers: dict[str, TwinWorker],
    trace: TraceRequest,
    patience_s: float,
) -> None:
    await _until(trace.arrival_s)
    request = Request(
        request_id="",
        arrival_s=trace.arrival_s,
        prompt_tokens=trace.prompt_tokens,
        decode_tokens_hint=trace.decode_tokens_hint,
        tenant=trace.tenant,
        group=trace.group,
        value=trace.value,
    )
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    leaving = (
        loop.call_at(trace.arrival_s + patience_s, task.cancel)
        if patience_s < float("inf")
        else None
    )
    try:
        async with queue.place(request) as placement:
            await _run(workers[placement.worker_id], Running(placement), trace, leaving)
    except (RefusedError, asyncio.CancelledError):
        pass
    finally:
        if leaving is not None:
            leaving.cancel()


async def _run(
    worker: TwinWorker, running: Running, trace: TraceRequest, leaving: asyncio.TimerHandle | None
) -> None:
    worker.submit(running, trace)
    told_first = False
    try:
        while True:
            await running.news.wait()
            running.news.clear()
            if running.has_first and not told_first:
                told_first = True
                if leaving is not None:
                    leaving.cancel()
                running.placement.first_token()
            if running.finished:
                running.placement.progressed(trace.decode_tokens)
                return
    finally:
        if not running.finished:
            worker.abort(running)
