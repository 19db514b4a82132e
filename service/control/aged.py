"""3 controller, requests that waited their bound: oldest first, with room reserved if need be.

Read aging.py for when a request counts as aged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.control.assign import Asking, admit_priced
from service.control.columns import Columns, IntArray
from service.control.room import Room
from service.control.view import Pair, View

RESERVATIONS_MAX = 2
"""Aged requests of a tier that fit nowhere and get room reserved, per tick; more would idle the
fleet."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """Room reserved for an aged request: on which worker, and until when it may be kept waiting."""

    worker_id: str
    due_s: float


class AgedStarts:
    """Starts aged requests, and remembers what room was promised to those that fit nowhere."""

    def __init__(self) -> None:
        self._promises: dict[int, _Promise] = {}

    @property
    def promised(self) -> bool:
        """Whether room is promised to anyone."""
        return bool(self._promises)

    def forget_all_but(self, aged: IntArray) -> None:
        """Forget what was promised to requests, by order of arrival, that wait no more."""
        if self._promises:
            waiting = set(aged.tolist())
            self._promises = {o: p for o, p in self._promises.items() if o in waiting}

    def start(
        self, view: View, columns: Columns, room: Room, rows: IntArray, most: int
    ) -> list[Pair]:
        """Start at most so many, oldest first; reserve room for the first few that fit nowhere."""
        pairs: list[Pair] = []
        left, first, reserved = rows.copy(), 0, 0
        while first < left.size and len(pairs) < most:
            started = room.start_oldest(columns, left, first, most - len(pairs))
            pairs += started
            first += len(started)
            if first == left.size or len(pairs) >= most or room.residual.is_full():
                break
            if reserved == RESERVATIONS_MAX:
                return pairs + start_beside(view, columns, room, left[first:], most - len(pairs))
            reserved += self._reserve(view, columns, room, int(left[first]))
            first += 1
        return pairs

    def _reserve(self, view: View, columns: Columns, room: Room, row: int) -> bool:
        """Reserve room for an aged request, never later than it was promised before."""
        fleet, order = view.fleet, int(view.waiting.order[row])
        reach = view.waiting.reach[view.waiting.kind[row]]
        bucket_s = view.horizon.bucket_iterations * fleet.iteration_s
        promise, promised = self._promises.get(order), None
        if promise is not None and promise.worker_id in fleet.worker_ids:
            worker = fleet.worker_ids.index(promise.worker_id)
            left = max(0.0, promise.due_s - view.now_s) / bucket_s[worker]
            if reach[worker]:
                promised = (worker, int(min(left, view.horizon.buckets - 1)))
        found = room.reserve(columns, row, reach, promised)
        if found is not None and found != promised:
            worker, shift = found
            due_s = view.now_s + shift * float(bucket_s[worker])
            self._promises[order] = _Promise(fleet.worker_ids[worker], due_s)
        return found is not None


def start_beside(view: View, columns: Columns, room: Room, rows: IntArray, most: int) -> list[Pair]:
    """Start those aged requests, oldest first, that fit beside what is reserved."""
    waiting, age_s = view.waiting, view.age_s()
    asks = np.zeros(len(waiting), dtype=np.bool_)
    asks[rows] = True
    asking = Asking(
        columns=columns,
        rewards=age_s,
        least_cost=np.zeros(age_s.size),
        asks=asks,
        order=waiting.order,
        kind=waiting.kind,
        prompt=waiting.prompt_tokens,
        most=most,
    )
    started = admit_priced(asking, room.offer(), room.residual)
    return [(row, int(room.workers[worker])) for row, worker, _ in started]
