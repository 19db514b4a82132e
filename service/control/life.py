"""3 controller, a request's way through the books: in, back, on to its second leg, and out.

Works on the router's own books; which request starts where is decided in router.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.control.events import Command, Outcome, Refusal, Refuse, Request
from service.control.waiting import Entry, Route, fit_to_fleet
from service.control.worker_stats import free_slots

if TYPE_CHECKING:
    from service.control.affinity import Affinity
    from service.control.config import ControlConfig
    from service.control.fleet_state import FleetState
    from service.control.handoff import Handoff
    from service.control.ledger import Ledger
    from service.control.lengths import LengthPredictor
    from service.control.rate import RateMonitor
    from service.control.stats import Counters
    from service.control.tenants import Tenants
    from service.control.waiting import WaitingRoom

RETURNS_MAX = 8
"""Workers that may turn one request away before it is refused."""


@dataclass(slots=True, kw_only=True)
class Life:
    """Books what happens to one request; config is replaced when the router is reconfigured."""

    config: ControlConfig
    predictor: LengthPredictor
    fleet: FleetState
    affinity: Affinity
    waiting: WaitingRoom
    handoff: Handoff
    ledger: Ledger
    tenants: Tenants
    rate: RateMonitor
    counters: Counters

    def arrive(self, request: Request) -> list[Command]:
        """Let a request wait, or refuse it at once.

        Raises:
            KeyError: it is held already.
        """
        request_id = request.request_id
        if any(request_id in held for held in (self.waiting, self.ledger, self.handoff)):
            raise KeyError(f"request {request.request_id!r} is held already")
        self.counters.entered += 1
        self.rate.arrive(request.arrival_s)
        wait_s = self.config.max_wait_s
        if request.max_wait_s is not None:
            wait_s = min(wait_s, request.max_wait_s)
        entry = Entry(
            request,
            self.predictor.forecast(request),
            self.counters.entered,
            request.arrival_s + wait_s,
            request.arrival_s,
            route=self.handoff.route(request),
        )
        fit_to_fleet(entry, self.fleet)
        self.tenants.place(entry, self.waiting.tenants, request.arrival_s)
        self.waiting.add(entry)
        turned_away = self._turn_away(entry)
        return [] if turned_away is None else [self.refuse(request.request_id, *turned_away)]

    def _turn_away(self, entry: Entry) -> tuple[Refusal, str] | None:
        """Reasons to refuse at once, before any wait."""
        # Those who arrive at one instant are counted before the tick that starts some of them.
        waiting, room = len(self.waiting), self.config.queue_max
        if waiting > room and waiting > room + free_slots(self.fleet, self.ledger).sum():
            return Refusal.QUEUE_FULL, f"{room} requests are waiting already"
        if not len(self.fleet):
            return None
        model = entry.request.model
        if not self.fleet.serves(model).any():
            return Refusal.UNKNOWN_MODEL, f"no worker serves the model {model!r}"
        return self.too_large(entry) if entry.too_large else None

    def too_large(self, entry: Entry) -> tuple[Refusal, str]:
        """Why a request whose prompt fits no worker is refused."""
        request = entry.request
        room = max(limits.room for limits in self.fleet.shapes(request.model).serving)
        return Refusal.TOO_LARGE, (
            f"the prompt's {request.prompt_tokens} tokens exceed the KV cache of every worker "
            f"that serves it (at most {room:.0f} tokens)"
        )

    def prefilled(self, request_id: str, now_s: float) -> None:
        """The first leg is over: the second follows, or the request waits for a decode slot."""
        self.fleet.prefill.prefilled(request_id, now_s)
        entry = self.handoff.prefilled(request_id)
        if entry is None:
            self.ledger.prefilled(request_id, now_s)
            self.fleet.prefill.hand_over(self.ledger.request(request_id), now_s)
            return
        entry.entered_s = entry.prefilled_s = now_s
        fit_to_fleet(entry, self.fleet)
        self.waiting.add(entry)

    def give_back(self, request_id: str, worker_id: str, now_s: float) -> list[Command]:
        """A worker did not take the request: it waits again, for another worker."""
        entry, worker = self.handoff.take(request_id), -1
        if entry is None:
            entry, worker, _ = self.ledger.end(request_id)
            self.affinity.dropped(request_id)
            self.tenants.end(entry, 0, now_s)
        if worker >= 0:
            worker_id = worker_id or self.fleet.workers[worker].spec.worker_id
            self.fleet.own_end(worker, entry.sequences, now_s)
        if worker_id:
            entry.avoid.add(worker_id)
        # What was prefilled for it is of no use to a third worker: it is prefilled again.
        self.fleet.prefill.leave(request_id, now_s)
        if entry.route is Route.HANDED:
            entry.route = Route.SPLIT
        self.counters.returns += 1
        entry.entered_s = now_s
        fit_to_fleet(entry, self.fleet)
        self.waiting.add(entry)
        if len(entry.avoid) > RETURNS_MAX:
            detail = f"{len(entry.avoid)} workers in a row did not take the request"
            return [self.refuse(request_id, Refusal.NO_WORKER, detail)]
        return []

    def leave(
        self, request_id: str, outcome: Outcome, decode_tokens: int | None, now_s: float
    ) -> None:
        """The request is over, wherever it was; decode_tokens of each sequence, None if unknown."""
        if outcome is Outcome.COMPLETED:
            self.fleet.prefill.fetched(request_id)
        self.fleet.prefill.leave(request_id, now_s)
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        elif self.handoff.take(request_id) is None:
            if decode_tokens is not None:
                self.ledger.progress({request_id: decode_tokens}, now_s)
            entry, worker, seen = self.ledger.end(request_id)
            self.affinity.dropped(request_id)
            if worker >= 0:
                self.fleet.own_end(worker, entry.sequences, now_s)
            tokens = seen if decode_tokens is None else decode_tokens
            self.tenants.end(entry, tokens, now_s)
            if outcome is Outcome.COMPLETED:
                self.predictor.observe(entry.request, tokens)
                self.affinity.answered(entry.request, worker, tokens)
        self.counters.ended[outcome] += 1

    def refuse(self, request_id: str, reason: Refusal, detail: str) -> Refuse:
        """Take a waiting request out of the books; answers the command that tells it."""
        self.waiting.remove(request_id)
        self.counters.refused[reason] += 1
        return Refuse(request_id, reason, detail)
