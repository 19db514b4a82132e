"""What a decision and a price refresh cost, beside the published method in plain loops.

Times are read from two clocks: the wall, which is what an event loop is blocked for, and the
thread's own processor time, which on a shared machine is nearer to what the code costs.
"""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from loadgen.array_memory import array_bytes
from loadgen.busy_router import BusyRouter, busy_router
from loadgen.lmsys_like import sample_lengths
from loadgen.published_loop import LoopRequest, LoopSettings, PublishedLoop
from service.control import ControlConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue

CASES = ((4, 64), (16, 512), (64, 1024), (256, 4096), (1024, 10_000))
TICKS_MAX, TICKS_BUDGET_S = 1500, 8.0
REFRESHES_MAX, REFRESHES_BUDGET_S = 50, 5.0
ROUNDS_MAX = 20
WARM_UP = 20
"""Ticks and refreshes that come first and are not counted; of the loop, one."""
LOOP_TICKS_MAX, LOOP_BUDGET_S = 20, 8.0
LOOP_PAIRS_MAX = 200_000
"""Pairs of request and worker from which on one tick of the loop takes seconds."""
LOOP_BATCH_LIMIT, LOOP_KV_TOKENS = 128, 76_800
ROUND_KEYS = (
    "decision_p50_ms",
    "decision_p99_ms",
    "refresh_p50_ms",
    "refresh_p99_ms",
    "published_loop_p50_ms",
    "price_memory_mb",
)
"""What is told of every round of one size."""
MS, MB = 1e3, 1e-6


@dataclass
class Durations:
    """How long something took, each time, on both clocks; used as a context manager."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> None:
        """Start both clocks."""
        self._began = (time.perf_counter(), time.thread_time())

    def __exit__(self, *_: object) -> None:
        """Stop both clocks."""
        self.cpu_s.append(time.thread_time() - self._began[1])
        self.wall_s.append(time.perf_counter() - self._began[0])

    def add_since(self, began: tuple[float, float]) -> None:
        """Count what was done since some readings of both clocks into the last time."""
        self.wall_s[-1] += time.perf_counter() - began[0]
        self.cpu_s[-1] += time.thread_time() - began[1]

    def p50_ms(self) -> float | None:
        """Median wall time, or None when nothing was measured."""
        return float(np.quantile(self.wall_s, 0.5)) * MS if self.wall_s else None

    def summary(self, name: str) -> dict[str, JsonValue]:
        """Quantiles in milliseconds under keys that begin with the name."""
        found: dict[str, JsonValue] = {}
        for clock, seconds in (("", self.wall_s), ("_cpu", self.cpu_s)):
            for label, quantile in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                value = float(np.quantile(seconds, quantile)) * MS if seconds else None
                found[f"{name}{clock}_{label}_ms"] = value
        return found


@dataclass
class Case:
    """One size, measured.

    Attributes:
        decision: Router.tick. booking: handling the events of a tick, and asking for the timer.
        refresh: price problem, solution and adoption. refresh_loop: of that, what a live router
            does on the event loop's thread. loop: one tick of the published method.
        price_state_mb: arrays of the history and of the prices.
        refresh_peak_mb: memory that a refresh adds at most.
        router_arrays_mb: all arrays of the router, those of the history and the prices included.
        process_mb: what the whole state added to the process.
        starts: requests started while decisions were measured.
    """

    workers: int
    waiting: int
    decision: Durations = field(default_factory=Durations)
    booking: Durations = field(default_factory=Durations)
    refresh: Durations = field(default_factory=Durations)
    refresh_loop: Durations = field(default_factory=Durations)
    loop: Durations = field(default_factory=Durations)
    price_state_mb: float = 0.0
    refresh_peak_mb: float = 0.0
    router_arrays_mb: float = 0.0
    process_mb: float = 0.0
    starts: int = 0

    def summary(self) -> dict[str, JsonValue]:
        """The case as JSON; ratio is the loop's tick over our decision and refresh together."""
        loop_ms = self.loop.p50_ms()
        ours_ms = (self.decision.p50_ms() or 0.0) + (self.refresh.p50_ms() or 0.0)
        return {
            "workers": self.workers,
            "waiting": self.waiting,
            **self.decision.summary("decision"),
            **self.booking.summary("booking"),
            **self.refresh.summary("refresh"),
            **self.refresh_loop.summary("refresh_loop"),
            "published_loop_p50_ms": loop_ms,
            **self.loop.summary("loop"),
            "ratio": None if loop_ms is None or not ours_ms else loop_ms / ours_ms,
            "price_state_mb": self.price_state_mb,
            "refresh_peak_mb": self.refresh_peak_mb,
            "price_memory_mb": self.price_state_mb + self.refresh_peak_mb,
            "router_arrays_mb": self.router_arrays_mb,
            "process_mb": self.process_mb,
            "ticks": len(self.decision.wall_s),
            "refreshes": len(self.refresh.wall_s),
            "starts": self.starts,
        }


def summary_of(rounds: Sequence[Case]) -> dict[str, JsonValue]:
    """The quickest of some rounds of one size, as JSON, with what every round took.

    The same code takes longer in the others, by what else the machine does: the quickest is nearest
    to what the code costs.
    """
    found = [case.summary() for case in rounds]
    quickest = min(found, key=lambda one: _sum_of(one, ("decision_p50_ms", "refresh_p50_ms")))
    each: list[JsonValue] = [{key: one[key] for key in ROUND_KEYS} for one in found]
    return {**quickest, "rounds": each}


def _sum_of(found: dict[str, JsonValue], keys: Sequence[str]) -> float:
    values = (found[key] for key in keys)
    return sum(value for value in values if isinstance(value, float))


def measure_case(workers: int, waiting: int, config: ControlConfig, seed: int) -> Case:
    """Build one fleet and measure it; about 25 s at most, building not counted."""
    case = Case(workers, waiting)
    before_mb = _resident_mb()
    busy = busy_router(workers, waiting, config, seed)
    case.process_mb = _resident_mb() - before_mb
    gc.collect()
    _measure_decisions(case, busy)
    _measure_refreshes(case, busy, config)
    if workers * waiting <= LOOP_PAIRS_MAX:
        _measure_loop(case, config, seed)
    return case


def _measure_decisions(case: Case, busy: BusyRouter) -> None:
    """Steady full load; prices are refreshed as often as a live router would."""
    router, until_s = busy.router, time.monotonic() + TICKS_BUDGET_S
    for tick in range(TICKS_MAX + WARM_UP):
        if tick == WARM_UP:
            case.decision, case.booking, case.starts = Durations(), Durations(), 0
        if time.monotonic() > until_s and tick > 2 * WARM_UP:
            break
        events = busy.events()
        with case.booking:
            busy.handle(events)
        with case.decision:
            commands = router.tick(busy.now_s)
        busy.obey(commands)
        case.starts += len(commands)
        problem = router.price_problem(busy.now_s)
        if problem is not None:
            router.adopt(problem.solve(), busy.now_s)


def _measure_refreshes(case: Case, busy: BusyRouter, config: ControlConfig) -> None:
    """Every worker decodes between two refreshes, so nothing known about one still holds."""
    router, until_s = busy.router, time.monotonic() + REFRESHES_BUDGET_S
    due_s = config.prices.refresh_s
    for count in range(REFRESHES_MAX + WARM_UP):
        if count == WARM_UP:
            case.refresh, case.refresh_loop = Durations(), Durations()
        if time.monotonic() > until_s and count > WARM_UP + 2:
            break
        busy.handle(busy.decode_everywhere())
        busy.handle(busy.events())
        busy.obey(router.tick(busy.now_s))
        busy.now_s += due_s
        _refresh(case, busy)
    _measure_memory(case, busy)


def _refresh(case: Case, busy: BusyRouter) -> None:
    """Refresh prices once, as a live router does; its thread's part is all but the loop's."""
    router = busy.router
    with case.refresh:
        with case.refresh_loop:
            problem = router.price_problem(busy.now_s)
        if problem is None:
            return
        solution = problem.solve()
        began = time.perf_counter(), time.thread_time()
        router.adopt(solution, busy.now_s)
        case.refresh_loop.add_since(began)


def _measure_memory(case: Case, busy: BusyRouter) -> None:
    router = busy.router
    case.price_state_mb = array_bytes(router.policy) * MB
    case.router_arrays_mb = array_bytes(router) * MB
    busy.now_s += 1.0
    tracemalloc.start()
    problem = router.price_problem(busy.now_s)
    if problem is not None:
        router.adopt(problem.solve(), busy.now_s)
    case.refresh_peak_mb = tracemalloc.get_traced_memory()[1] * MB
    tracemalloc.stop()


def _measure_loop(case: Case, config: ControlConfig, seed: int) -> None:
    """The published method on as many workers and requests: one request ends, one tick follows."""
    settings = LoopSettings(
        buckets=config.horizon_iterations // config.bucket_iterations,
        bucket_iterations=config.bucket_iterations,
        steps=config.prices.steps,
        batch=config.prices.batch,
        step_size=config.prices.step_size,
        history_max=config.prices.history_max,
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    limits, tokens = [LOOP_BATCH_LIMIT] * case.workers, [LOOP_KV_TOKENS] * case.workers
    loop = PublishedLoop(settings, limits, tokens)
    requests = _requests(rng, case.waiting + LOOP_BATCH_LIMIT + LOOP_TICKS_MAX + 1)
    running = []
    for worker in range(case.workers):
        columns = [loop.column(requests[at], worker) for at in range(LOOP_BATCH_LIMIT)]
        for column in columns:
            loop.take(column)
        running.append(columns)
    queue = requests[LOOP_BATCH_LIMIT : LOOP_BATCH_LIMIT + case.waiting]
    until_s = time.monotonic() + LOOP_BUDGET_S
    for tick in range(LOOP_TICKS_MAX + 1):
        if time.monotonic() > until_s:
            break
        loop.take(running[tick % case.workers].pop(), sign=-1.0)
        with case.loop:
            started = loop.tick(queue, float(len(queue)))
        gone = {request_id for request_id, _ in started}
        queue = [one for one in queue if one.request_id not in gone]
        queue.append(requests[LOOP_BATCH_LIMIT + case.waiting + tick])
        if tick == 0:
            case.loop = Durations()


def _requests(rng: np.random.Generator, count: int) -> list[LoopRequest]:
    lengths = sample_lengths(rng, count)
    return [LoopRequest(f"r{at}", int(s), int(o)) for at, (s, o) in enumerate(lengths)]


def _resident_mb() -> float:
    """Memory of this process; zero where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") * MB
    except OSError:
        return 0.0
