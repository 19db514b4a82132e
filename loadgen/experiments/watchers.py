"""Watchers of a simulation: shadow prices over time, and how long decisions take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadgen.router_driver import Controller
    from loadgen.simulation_config import SimulatedWorker
    from service.control.events import Command, Event
    from service.control.prices import PriceSnapshot, PriceSolution
    from service.control.router import Router

SAMPLE_S = 0.25
"""Virtual time between two looks at the prices."""


class PriceWatcher:
    """Samples what a whole worker is worth per iteration: its slots, and its KV memory.

    price_batch is reward per slot and iteration, price_kv per token and iteration; times B and M
    both are reward per iteration of one worker, so they can be compared.
    """

    def __init__(self, router: Router, workers: Sequence[SimulatedWorker]) -> None:
        self._router = router
        self._batch = np.array([worker.batch_limit for worker in workers], dtype=float)
        self._kv = np.array([worker.machine().kv_capacity_tokens for worker in workers])
        self._next_s = 0.0
        self._series: dict[str, list[float | None]] = {
            "price_time_s": [],
            "price_of_batch": [],
            "price_of_kv": [],
        }

    def on_tick(self, now_s: float) -> None:
        """Look at the prices when it is time."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_S
        workers = self._router.stats(now_s).workers
        batch = np.array([worker.price_batch for worker in workers])
        kv = np.array([worker.price_kv for worker in workers])
        self._series["price_time_s"].append(now_s)
        self._series["price_of_batch"].append(float((batch * self._batch).mean()))
        self._series["price_of_kv"].append(float((kv * self._kv).mean()))

    def series(self) -> dict[str, list[float | None]]:
        """Everything sampled."""
        return self._series


class TickTimer:
    """Stands before a controller and measures how long each of its decisions takes.

    The only watcher that reads the machine's clock, so what it gives differs from run to run.
    """

    def __init__(self, controller: Controller, clock: Callable[[], float]) -> None:
        self._controller = controller
        self._clock = clock
        self._took_s: list[float | None] = []
        self._refresh_s: list[float | None] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Pass on."""
        return self._controller.handle(event, now_s)

    def tick(self, now_s: float) -> list[Command]:
        """Pass on and measure."""
        began_s = self._clock()
        commands = self._controller.tick(now_s)
        self._took_s.append(self._clock() - began_s)
        return commands

    def next_tick_s(self, now_s: float) -> float | None:
        """Pass on."""
        return self._controller.next_tick_s(now_s)

    def price_problem(self, now_s: float) -> PriceSnapshot | None:
        """Pass on; a problem is solved once more to measure it."""
        problem = self._controller.price_problem(now_s)
        if problem is not None:
            began_s = self._clock()
            problem.solve()
            self._refresh_s.append(self._clock() - began_s)
        return problem

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """Pass on."""
        self._controller.adopt(solution, now_s)

    def on_tick(self, now_s: float) -> None:
        """Nothing to sample."""

    def series(self) -> dict[str, list[float | None]]:
        """Durations of ticks and of price refreshes, seconds."""
        return {"tick_s": self._took_s, "refresh_s": self._refresh_s}
