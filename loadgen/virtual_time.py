"""Virtual time: a heap of things to do, in order of time and, at one instant, of asking."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class VirtualTime:
    """A clock that jumps to the next thing to do.

    Attributes:
        now_s: seconds since the start.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def next_s(self) -> float:
        """When the next thing is due; infinity when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, not before now."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._sequence), action))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something after a delay; without one at once, so that an instant stays one instant."""
        if delay_s > 0:
            self.at(self.now_s + delay_s, action)
        else:
            action()

    def play(self, time_s: float) -> None:
        """Go to a time, not beyond next_s(), and do what is due then."""
        self.now_s = time_s
        while self._heap and self._heap[0][0] <= time_s:
            heapq.heappop(self._heap)[2]()
