"""Rules that send every request on arrival, beside the Router: the yardsticks of the simulator.

A rule answers the same calls as the Router, so that the simulator drives both alike. What is common
to all of them is here: who waits, who was sent where, which workers are up. A rule chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from service.control.events import (
    Arrived,
    FirstToken,
    Left,
    Prefilled,
    PrefillFailed,
    Progressed,
    Refusal,
    Refuse,
    Returned,
    Start,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReported,
    WorkerState,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.control.events import Command, Event, Request, WorkerSpec
    from service.control.prices import PriceSnapshot, PriceSolution


class PushAtOnce(ABC):
    """Sends each request to the worker that `choose` names; nothing ever waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Request, set[str]]] = {}
        self._sent: dict[str, tuple[Request, str]] = {}
        self._states: dict[str, WorkerState] = {}

    @abstractmethod
    def choose(self, request: Request, up: Sequence[str]) -> str:
        """Name one of the workers that are up, in the order in which they joined."""

    @abstractmethod
    def sent(self, request: Request, worker_id: str) -> None:
        """A request is on its way to a worker."""

    @abstractmethod
    def ended(self, request: Request, worker_id: str) -> None:
        """It is there no more."""

    @abstractmethod
    def joined(self, spec: WorkerSpec) -> None:
        """A worker is there."""

    @abstractmethod
    def progressed(self, request: Request, worker_id: str, tokens: int) -> None:
        """A request has so many output tokens by now."""

    @abstractmethod
    def lost(self, worker_id: str) -> None:
        """A worker is down, with everything it held."""

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Book one event."""
        match event:
            case Arrived(request):
                self._waiting[request.request_id] = (request, set())
            case FirstToken(request_id):
                self.progressed(*self._sent[request_id], 1)
            case Progressed(decode_tokens):
                for request_id, tokens in decode_tokens.items():
                    self.progressed(*self._sent[request_id], tokens)
            case Returned(request_id):
                request, worker_id = self._take_back(request_id)
                self._waiting[request_id] = (request, {worker_id})
            case Left(request_id):
                if self._waiting.pop(request_id, None) is None:
                    self._take_back(request_id)
            case WorkerJoined() | WorkerChanged() | WorkerGone() | WorkerReported():
                self._follow_worker(event)
            case Prefilled() | PrefillFailed():
                raise ValueError("the yardstick knows no prefill workers")
        return []

    def tick(self, now_s: float) -> list[Command]:
        """Send every waiting request; refuse when no worker is up."""
        commands: list[Command] = []
        for request_id, (request, avoid) in self._waiting.items():
            up = [w for w, s in self._states.items() if s is WorkerState.UP and w not in avoid]
            if not up:
                commands.append(Refuse(request_id, Refusal.NO_WORKER, "no worker is up"))
                continue
            worker_id = self.choose(request, up)
            self._sent[request_id] = (request, worker_id)
            self.sent(request, worker_id)
            commands.append(Start(request_id, worker_id))
        self._waiting.clear()
        return commands

    def next_tick_s(self, now_s: float) -> float | None:
        """Nothing ever waits here."""
        return None

    def price_problem(self, now_s: float) -> PriceSnapshot | None:
        """There are no prices."""
        return None

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """There are no prices."""
        raise NotImplementedError

    def _take_back(self, request_id: str) -> tuple[Request, str]:
        request, worker_id = self._sent.pop(request_id)
        self.ended(request, worker_id)
        return request, worker_id

    def _follow_worker(
        self, event: WorkerJoined | WorkerChanged | WorkerGone | WorkerReported
    ) -> None:
        match event:
            case WorkerJoined(spec, state):
                self._states[spec.worker_id] = state
                self.joined(spec)
            case WorkerChanged(worker_id, state):
                self._states[worker_id] = state
                if state is WorkerState.DOWN:
                    self.lost(worker_id)
            case WorkerGone(worker_id):
                del self._states[worker_id]
                self.lost(worker_id)
            case WorkerReported():
                pass
