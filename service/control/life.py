"""3 controller, a request's way through the books: in, back, on to its second leg, and out.

Works on the router's own books; which request starts where is decided in router.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.control.config import PolicyName
from service.control.displacement import Bid
from service.control.events import Command, Outcome, Refusal, Refuse, Request, unserved
from service.control.kinds import Route
from service.control.waiting import Entry, fit_to_fleet
from service.control.worker_stats import free_slots

if TYPE_CHECKING:
    from service.control.affinity import Affinity
    from service.control.config import ControlConfig
    from service.control.displacement import Displacement
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
DISPLACED_FROM_QUEUE = "the queue is full, and a request of more value took the place"
DISPLACED_FROM_MEMORY = "memory for requests is full, and one of more value took the room"


@dataclass(slots=True, kw_only=True)
class Life:
    """Books what happens to one request; config is replaced when the router is reconfigured."""

    config: ControlConfig
    predictor: LengthPredictor
    fleet: FleetState
    affinity: Affinity
    waiting: WaitingRoom
    displacement: Displacement
    handoff: Handoff
    ledger: Ledger
    tenants: Tenants
    rate: RateMonitor
    counters: Counters

    def arrive(self, request: Request, now_s: float) -> list[Command]:
        """Let a request wait, or refuse it at once, or one that makes room for it.

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
        unfit = self._unfit(entry)
        if unfit is None:
            self.ledger.came(entry)
        if self._is_full():
            return [self._make_place(entry, now_s, fits=unfit is None)]
        return [] if unfit is None else [self.refuse(request_id, *unfit)]

    def _is_full(self) -> bool:
        # Those who arrive at one instant are counted before the tick that starts some of them.
        waiting, room = len(self.waiting), self.config.queue_max
        return waiting > room and waiting > room + free_slots(self.fleet, self.ledger).sum()

    def _make_place(self, entry: Entry, now_s: float, *, fits: bool) -> Command:
        """The queue is full: refuse one of those that are worth less, else the newcomer."""
        request, room = entry.request, self.config.queue_max
        # Who does not wait would often take a place and be refused in the next tick all the same.
        if fits and request.max_wait_s != 0 and self.displaces:
            bid = Bid(value=request.value, tenant=request.tenant)
            displaced = self.displacement.for_a_place(bid, now_s)
            if displaced is not None:
                return self.refuse(displaced, Refusal.DISPLACED, DISPLACED_FROM_QUEUE)
        detail = f"{room} requests are waiting already"
        return self.refuse(request.request_id, Refusal.QUEUE_FULL, detail)

    def make_room(self, bid: Bid, size: int, now_s: float) -> list[Command]:
        """Refuse those that are worth less and hold so many bytes of bodies, else nobody."""
        if not self.displaces:
            return []
        found = self.displacement.for_bytes(bid, size, now_s)
        return [self.refuse(one, Refusal.DISPLACED, DISPLACED_FROM_MEMORY) for one in found]

    @property
    def displaces(self) -> bool:
        """Whether value decides who is refused; the plain policies know none."""
        return self.config.displace and self.config.policy is PolicyName.ONLINE_LP

    def _unfit(self, entry: Entry) -> tuple[Refusal, str] | None:
        """Reasons to refuse at once whatever room there is."""
        if not len(self.fleet):
            return None
        model = entry.request.model
        if not self.fleet.serves(model).any():
            return Refusal.UNKNOWN_MODEL, unserved(model, self.fleet.models())
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
                self.ledger.ended(entry, tokens)
                self.affinity.answered(entry.request, worker, tokens)
        self.counters.ended[outcome] += 1

    def refuse(self, request_id: str, reason: Refusal, detail: str) -> Refuse:
        """Take a waiting request out of the books; answers the command that tells it."""
        self.waiting.remove(request_id)
        self.counters.refused[reason] += 1
        return Refuse(request_id, reason, detail)
