"""Drives the Router in virtual time exactly as the live service does.

docs/architecture.md, "A driver of the Router": all events of one instant are booked, then it ticks
once, its commands are obeyed, a due price refresh is solved, and one timer is armed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from service.control.events import Progressed

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadgen.virtual_time import VirtualTime
    from service.control.events import Command, Event
    from service.control.prices import PriceSnapshot, PriceSolution

TICKS_AT_ONCE_MAX = 1000
"""Decisions without time passing; more means that a controller starts in a circle."""


class Controller(Protocol):
    """What decides: the Router, or something that answers the same calls."""

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Book one event."""

    def tick(self, now_s: float) -> list[Command]:
        """Decide."""

    def next_tick_s(self, now_s: float) -> float | None:
        """When a timer tick is wanted."""

    def price_problem(self, now_s: float) -> PriceSnapshot | None:
        """A price refresh, if one is due."""

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """Take new prices."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a driver needs of the world around it.

    Attributes:
        time: the clock.
        obey: carries out one command.
        progress: output tokens so far of requests that have new ones since it was last asked.
        ticked: called with the time after every tick.
        price_latency_s: from a price snapshot to the adoption of its solution.
    """

    time: VirtualTime
    obey: Callable[[Command], None]
    progress: Callable[[], dict[str, int]]
    ticked: Callable[[float], None]
    price_latency_s: float = 0.0


class RouterDriver:
    """Calls a controller in the order that its contract asks for.

    Attributes:
        timer_s: when the next timer tick is due; infinity for never.
    """

    def __init__(self, controller: Controller, around: Surroundings) -> None:
        self.timer_s = math.inf
        self._controller = controller
        self._around = around
        self._tick_wanted = False
        self._solving = False

    def tell(self, event: Event) -> None:
        """Book an event at once; the decision follows when the instant is over."""
        self._tick_wanted = True
        self._obey(self._controller.handle(event, self._around.time.now_s))

    def settle(self) -> None:
        """Decide at the end of an instant, again if obeying brought events at the same instant."""
        if self.timer_s <= self._around.time.now_s:
            self._tick_wanted = True
        for _ in range(TICKS_AT_ONCE_MAX):
            if not self._tick_wanted:
                return
            self._tick()
        raise RuntimeError(f"the controller did not come to rest at {self._around.time.now_s} s")

    def _tick(self) -> None:
        controller, now_s = self._controller, self._around.time.now_s
        self._tick_wanted = False
        progress = self._around.progress()
        if progress:
            self._obey(controller.handle(Progressed(progress), now_s))
        self._obey(controller.tick(now_s))
        if not self._solving:
            problem = controller.price_problem(now_s)
            if problem is not None:
                self._solving = True
                adopt = partial(self._adopt, problem.solve())
                self._around.time.later(self._around.price_latency_s, adopt)
        timer_s = controller.next_tick_s(now_s)
        self.timer_s = math.inf if timer_s is None else timer_s
        self._around.ticked(now_s)

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            self._around.obey(command)

    def _adopt(self, solution: PriceSolution) -> None:
        self._solving = False
        self._controller.adopt(solution, self._around.time.now_s)
