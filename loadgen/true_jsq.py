"""Join the shortest queue with true lengths: a yardstick that only a simulator can have.

Every request goes on arrival to the worker that owes the fewest decode tokens. It answers the
same calls as the Router, so that the simulator drives both alike.
"""

from __future__ import annotations

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
    from collections.abc import Mapping

    from service.control.events import Command, Event
    from service.control.prices import PriceProblem, PriceSolution

TRUE_JSQ = "true_jsq"


class TrueJsq:
    """Work-aware join-shortest-queue.

    Args:
        decode_tokens: the true length of every request that will come, by request id.
    """

    def __init__(self, decode_tokens: Mapping[str, int]) -> None:
        self._decode_tokens = decode_tokens
        self._waiting: dict[str, set[str]] = {}
        self._worker_of: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._states: dict[str, WorkerState] = {}

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Book one event."""
        match event:
            case Arrived(request):
                self._waiting[request.request_id] = set()
            case FirstToken(request_id):
                self._progress(request_id, 1)
            case Progressed(decode_tokens):
                for request_id, tokens in decode_tokens.items():
                    self._progress(request_id, tokens)
            case Returned(request_id):
                self._waiting[request_id] = {self._forget(request_id)}
            case Left(request_id):
                if self._waiting.pop(request_id, None) is None:
                    self._forget(request_id)
            case WorkerJoined() | WorkerChanged() | WorkerGone() | WorkerReported():
                self._follow_worker(event)
            case Prefilled() | PrefillFailed():
                raise ValueError("the yardstick knows no prefill workers")
        return []

    def tick(self, now_s: float) -> list[Command]:
        """Send every waiting request to the worker with the least work; refuse when none is up."""
        commands: list[Command] = []
        for request_id, avoid in self._waiting.items():
            up = [w for w, s in self._states.items() if s is WorkerState.UP and w not in avoid]
            if not up:
                commands.append(Refuse(request_id, Refusal.NO_WORKER, "no worker is up"))
                continue
            worker_id = min(up, key=self._left.__getitem__)
            self._worker_of[request_id] = worker_id
            self._seen[request_id] = 0
            self._left[worker_id] += self._decode_tokens[request_id]
            commands.append(Start(request_id, worker_id))
        self._waiting.clear()
        return commands

    def next_tick_s(self, now_s: float) -> float | None:
        """Nothing ever waits here."""
        return None

    def price_problem(self, now_s: float) -> PriceProblem | None:
        """There are no prices."""
        return None

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """There are no prices."""
        raise NotImplementedError

    def _follow_worker(
        self, event: WorkerJoined | WorkerChanged | WorkerGone | WorkerReported
    ) -> None:
        match event:
            case WorkerJoined(spec, state):
                self._states[spec.worker_id] = state
                self._left.setdefault(spec.worker_id, 0)
            case WorkerChanged(worker_id, state):
                self._states[worker_id] = state
            case WorkerGone(worker_id):
                del self._states[worker_id]
            case WorkerReported():
                pass

    def _progress(self, request_id: str, tokens: int) -> None:
        new = tokens - self._seen[request_id]
        if new > 0:
            self._seen[request_id] = tokens
            self._left[self._worker_of[request_id]] -= new

    def _forget(self, request_id: str) -> str:
        worker_id = self._worker_of.pop(request_id)
        self._left[worker_id] -= self._decode_tokens[request_id] - self._seen.pop(request_id)
        return worker_id
