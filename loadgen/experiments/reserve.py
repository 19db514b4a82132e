"""Strict priority with a static reserve: the yardstick that prices have to beat.

The first tier ("interactive") goes to the router at once. Every other request is held here, first
come first served, and handed to the router only while nobody of the first tier waits and more
slots of the whole fleet are free than the reserve.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from service.control.events import (
    Arrived,
    Left,
    Prefill,
    Refuse,
    Returned,
    Start,
    WorkerJoined,
)

if TYPE_CHECKING:
    from service.control.events import Command, Event
    from service.control.prices import PriceSnapshot, PriceSolution
    from service.control.router import Router

FIRST_TIER = "interactive"


class PriorityReserve:
    """Stands before a Router and answers the same calls.

    Args:
        router: decides about what it is given; with one request a slot.
        reserve_slots: batch slots of the fleet that only the first tier may take.
    """

    def __init__(self, router: Router, reserve_slots: int) -> None:
        self._router = router
        self._reserve_slots = reserve_slots
        self._held: deque[Arrived] = deque()
        self._waiting: set[str] = set()
        self._running: set[str] = set()
        self._slots = 0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Hold what is not of the first tier; pass everything else on."""
        match event:
            case Arrived(request) if request.tenant != FIRST_TIER:
                self._held.append(event)
                return []
            case Arrived(request):
                self._waiting.add(request.request_id)
            case Returned(request_id):
                self._running.discard(request_id)
                self._waiting.add(request_id)
            case Left(request_id):
                self._running.discard(request_id)
                self._waiting.discard(request_id)
                if self._drop_held(request_id):
                    return []
            case WorkerJoined(spec):
                self._slots += spec.batch_limit
            case _:
                pass
        return self._noted(self._router.handle(event, now_s))

    def tick(self, now_s: float) -> list[Command]:
        """Let the router decide, then release held requests while the reserve stays free."""
        commands = self._noted(self._router.tick(now_s))
        while self._held and not self._waiting and self._free() > self._reserve_slots:
            event = self._held.popleft()
            self._waiting.add(event.request.request_id)
            commands += self._noted(self._router.handle(event, now_s))
            commands += self._noted(self._router.tick(now_s))
        return commands

    def next_tick_s(self, now_s: float) -> float | None:
        """When the router wants a timer tick; held requests wait for events."""
        return self._router.next_tick_s(now_s)

    def price_problem(self, now_s: float) -> PriceSnapshot | None:
        """Whatever the router asks."""
        return self._router.price_problem(now_s)

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """Pass on."""
        self._router.adopt(solution, now_s)

    def _free(self) -> int:
        return self._slots - len(self._running)

    def _noted(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            self._waiting.discard(command.request_id)
            match command:
                case Start(request_id):
                    self._running.add(request_id)
                case Refuse() | Prefill():
                    pass
        return commands

    def _drop_held(self, request_id: str) -> bool:
        for event in self._held:
            if event.request.request_id == request_id:
                self._held.remove(event)
                return True
        return False
