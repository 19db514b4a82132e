"""3 controller, the two legs of a request: when its prompt is prefilled, and for which slot.

A prefill is begun only when a decode slot will be there at its end (joint admission): the decode
workers are looked at as they will be then. With `hold_s` a request is prefilled first and then asks
for a slot, as in the paper, but only for so long: what waits longer is prefilled again.
Read prefill.py for the prefill workers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from service.control.columns import FloatArray
from service.control.events import Command, Prefill, Refuse, Request
from service.control.kinds import Route
from service.control.waiting import Entry, WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from service.control.config import HandoffConfig
    from service.control.fleet_state import FleetState

SOONEST_S = 1e-9
"""The ledger takes 0 for no prefill."""


@dataclass(frozen=True, slots=True)
class Prelude:
    """What happens before a request decodes.

    Attributes:
        prefill_id: the prefill worker that computes its prompt, or "".
        ready_s: when that should be done; 0 for no prefill.
        handed: the prompt is computed already.
    """

    prefill_id: str = ""
    ready_s: float = 0.0
    handed: bool = False


class Handoff:
    """Decides which prefill worker takes which request, and when.

    Attributes:
        prefills: prompts sent to a prefill worker.
        holds_passed: of those held between the legs, how many waited too long.
        whole_on_decode: requests that cannot be split and were started on a decode worker.
    """

    def __init__(self, config: HandoffConfig, fleet: FleetState, waiting: WaitingRoom) -> None:
        self.prefills = 0
        self.holds_passed = 0
        self.whole_on_decode = 0
        self._config = config
        self._fleet = fleet
        self._pool = fleet.prefill
        self._waiting = waiting
        self._ahead: dict[str, Entry] = {}
        self._full = False
        self._at_once = Prelude()
        self._no_lead: FloatArray = np.zeros(0)

    def __len__(self) -> int:
        """Requests whose prompt is being computed although they have no decode slot yet."""
        return len(self._ahead)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ahead

    def route(self, request: Request) -> Route:
        """What a request that arrives wants of decode workers."""
        if request.whole or request.sequences > 1:
            return Route.WHOLE
        return Route.AHEAD if self._config.hold_s > 0 else Route.SPLIT

    def begin_tick(self, now_s: float) -> list[Command]:
        """End what ran out, and prefill ahead those that queue after their prefill."""
        self._full = False
        self._pool.expire(now_s)
        if not self._config.hold_s:
            return []
        self._end_holds(now_s)
        return self._prefill_ahead(now_s)

    def is_open(self, now_s: float) -> bool:
        """Whether a prefill worker would take a prompt now."""
        return self._pool.is_open(now_s)

    def lead(self, now_s: float, bucket_iterations: int) -> FloatArray:
        """(g,) iterations from now to when what starts now decodes; whole buckets, rounded down.

        Nobody is prefilled sooner than the shortest waiting prompt. With a hold there is none: a
        request that was prefilled decodes at once.
        """
        decodes = self._fleet.decodes()
        if not self._fleet.decoders or self._config.hold_s > 0:
            if self._no_lead.size != len(self._fleet):
                self._no_lead = np.zeros(len(self._fleet))
                self._no_lead.flags.writeable = False
            return self._no_lead
        lead_s = self._pool.lead_s(self._waiting.shortest_prompt(), now_s)
        lead_s = min(lead_s, self._config.lead_max_s)
        buckets = lead_s / self._fleet.array("iteration_s") // bucket_iterations
        return np.asarray(np.where(decodes, buckets * bucket_iterations, 0.0))

    def assign(self, entry: Entry, worker: int, now_s: float) -> Prelude | None:
        """Find what must happen before a request decodes on worker index `worker`.

        Returns:
            None when no prefill worker has room. Then none is given room in this tick any more, or
            long prompts would wait for ever behind short ones.
        """
        request = entry.request
        if not self._fleet.decoders or not self._fleet.decodes()[worker]:
            return self._at_once
        if entry.route is Route.HANDED:
            self._pool.hand_over(request, now_s)
            return Prelude(handed=True)
        if entry.route is Route.WHOLE:
            self.whole_on_decode += 1
            return Prelude()
        prefill_id = None if self._full else self._pool.choose(request, entry.avoid, now_s)
        if prefill_id is None:
            self._full = True
            return None
        self.prefills += 1
        ready_s = self._pool.book(request, prefill_id, now_s)
        return Prelude(prefill_id, max(ready_s, SOONEST_S))

    def prefilled(self, request_id: str) -> Entry | None:
        """A prompt is computed; the entry of one that was prefilled ahead, which now waits."""
        entry = self._ahead.pop(request_id, None)
        if entry is not None:
            entry.route = Route.HANDED
        return entry

    def take(self, request_id: str) -> Entry | None:
        """The entry of a request that was being prefilled ahead; it is forgotten here."""
        return self._ahead.pop(request_id, None)

    def forget(self, commands: Iterable[Command], now_s: float) -> None:
        """What refused requests had on prefill workers nobody will fetch."""
        for command in commands:
            if isinstance(command, Refuse):
                self._pool.leave(command.request_id, now_s)

    def _end_holds(self, now_s: float) -> None:
        """Let those that waited too long after their prefill be prefilled again."""
        for request_id, entry in self._waiting.entries.items():
            held = entry.route is Route.HANDED
            if held and now_s - entry.prefilled_s > self._config.hold_s:
                self.holds_passed += 1
                self._pool.leave(request_id, now_s)
                self._waiting.change_route(request_id, Route.SPLIT)

    def _prefill_ahead(self, now_s: float) -> list[Command]:
        """Begin prefills in order of arrival while there is room for the next one."""
        commands: list[Command] = []
        ahead = [one for one in self._waiting.entries.values() if one.route is Route.AHEAD]
        for entry in sorted(ahead, key=lambda one: one.order):
            request = entry.request
            if not self._pool.is_open(now_s):
                break
            could_decode = self._fleet.decodes() & self._fleet.up()
            if not (could_decode & self._fleet.serves(request.model)).any() or entry.too_large:
                continue
            prefill_id = self._pool.choose(request, entry.avoid, now_s)
            if prefill_id is None:
                continue
            self._pool.book(request, prefill_id, now_s)
            self._ahead[request.request_id] = self._waiting.remove(request.request_id)
            self.prefills += 1
            commands.append(Prefill(request.request_id, prefill_id))
        return commands
