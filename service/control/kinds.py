"""3 controller, waiting room: to which workers a waiting request may go, kept once per kind."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from service.control.columns import BoolArray
from service.control.fleet_state import FleetState

FIRST_KINDS = 8


class Route(Enum):
    """What a request wants of decode workers; a worker that does both takes any but HANDED.

    WHOLE: not to be split: nothing, while a worker that does both serves it.
    SPLIT: to be prefilled elsewhere first, with a slot there set aside.
    AHEAD: the same, but it is to be prefilled before it asks for a slot.
    HANDED: to fetch what was prefilled already.
    """

    WHOLE = auto()
    SPLIT = auto()
    AHEAD = auto()
    HANDED = auto()


class Kind(NamedTuple):
    """What decides where a waiting request may go.

    Attributes:
        model: or None, which is served nowhere. avoid: workers that did not take it.
        route: what it wants of decode workers. pinned: the only worker it may go to, or "".
    """

    model: str | None
    avoid: frozenset[str]
    route: Route
    pinned: str


class Kinds:
    """Which workers a waiting request may go to, kept once per kind instead of once per request.

    Requests of one kind share a row of `reach`; rows are made when first asked for, and again after
    the fleet changed.
    """

    def __init__(self) -> None:
        self._numbers: dict[Kind, int] = {}
        self._kinds: list[Kind | None] = []
        self._counts: list[int] = []
        self._free: list[int] = []
        self._due: set[int] = set()
        self._handed = 0
        self._reach: BoolArray = np.zeros((0, 0), dtype=np.bool_)
        self._shown = self._reach
        self._wanted: BoolArray = np.zeros(0, dtype=np.bool_)
        self._cut_off: BoolArray | None = None
        self._version = -1

    def enter(self, kind: Kind) -> int:
        """Count one request in; returns the number of its kind."""
        number = self._numbers.get(kind)
        if number is None:
            number = self._free.pop() if self._free else len(self._kinds)
            if number == len(self._kinds):
                self._kinds.append(None)
                self._counts.append(0)
            self._kinds[number] = kind
            self._numbers[kind] = number
            self._handed += kind.route is Route.HANDED
            self._due.add(number)
        self._counts[number] += 1
        return number

    def leave(self, number: int) -> None:
        """Count one request out; a kind nobody is of makes room for another."""
        self._counts[number] -= 1
        kind = self._kinds[number]
        if self._counts[number] == 0 and kind is not None:
            del self._numbers[kind]
            self._handed -= kind.route is Route.HANDED
            self._kinds[number] = None
            self._free.append(number)
            self._due.add(number)

    def reach(self, fleet: FleetState) -> BoolArray:
        """(kinds, g) workers that are up, serve the model, and are not avoided.

        A view, valid until the next change; a number that nobody holds reaches nothing.
        """
        if fleet.version != self._version or len(self._kinds) > self._reach.shape[0]:
            rows = max(FIRST_KINDS, 2 * len(self._kinds))
            self._reach = np.zeros((rows, len(fleet)), dtype=np.bool_)
            self._shown = self._reach[: len(self._kinds)]
            self._wanted = np.zeros(len(fleet), dtype=np.bool_)
            self._version = fleet.version
            self._due = set(range(len(self._kinds)))
        if self._due:
            for number in self._due:
                self._reach[number] = self._row(self._kinds[number], fleet)
            self._due.clear()
            held = np.array([kind is not None for kind in self._kinds], dtype=np.bool_)
            alone = held & ~self._reach[: len(self._kinds)].any(axis=1)
            self._cut_off = alone if alone.any() else None
            self._shown = self._reach[: len(self._kinds)]
            self._wanted = np.asarray(self._shown.any(axis=0))
        return self._shown

    def handed(self) -> BoolArray | None:
        """(kinds,) which are to fetch what was prefilled; None where none is."""
        if not self._handed:
            return None
        handed = [kind is not None and kind.route is Route.HANDED for kind in self._kinds]
        return np.array(handed, dtype=np.bool_)

    def cut_off(self, fleet: FleetState) -> BoolArray | None:
        """(kinds,) which reach no worker; None where all reach some."""
        self.reach(fleet)
        return self._cut_off

    def open_reach(self, fleet: FleetState, *, prefill_open: bool) -> tuple[BoolArray, BoolArray]:
        """(kinds, g) the same without workers that must wait for a prefill worker to have room.

        And (g,) whether any kind reaches a worker.
        """
        reach, decodes = self.reach(fleet), fleet.decodes()
        if not fleet.decoders:
            return reach, self._wanted
        shut = {Route.AHEAD} if prefill_open else {Route.AHEAD, Route.SPLIT}
        rows = [kind is not None and kind.route in shut for kind in self._kinds]
        reach = np.asarray(reach & ~(np.array(rows, dtype=np.bool_)[:, None] & decodes))
        return reach, np.asarray(reach.any(axis=0))

    @staticmethod
    def _row(kind: Kind | None, fleet: FleetState) -> BoolArray:
        if kind is None or kind.model is None:
            return np.zeros(len(fleet), dtype=np.bool_)
        row = fleet.up() & fleet.serves(kind.model)
        if kind.pinned:
            row = row & np.array([one == kind.pinned for one in fleet.worker_ids], dtype=np.bool_)
        for worker_id in kind.avoid & fleet.index.keys():
            row[fleet.index[worker_id]] = False
        decodes = fleet.decodes()
        if not fleet.decoders:
            return row
        both = row & ~decodes
        match kind.route:
            case Route.HANDED:
                return np.asarray(row & decodes)
            case Route.WHOLE:
                return both if both.any() else row
            case Route.SPLIT | Route.AHEAD:
                return row if fleet.prefill.serves(kind.model, kind.avoid) else both
