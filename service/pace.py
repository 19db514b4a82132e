"""2 central queue: how fast it drains, and so when a refused client may try again."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

STARTS_REMEMBERED: Final = 64
PACE_WINDOW_S: Final = 30.0
RETRY_AFTER_MIN_S: Final = 1
RETRY_AFTER_MAX_S: Final = 60


class Pace:
    """The pace of the last STARTS_REMEMBERED starts within PACE_WINDOW_S."""

    def __init__(self) -> None:
        self._start_times_s: deque[float] = deque(maxlen=STARTS_REMEMBERED)

    def started(self, now_s: float) -> None:
        """Note a start."""
        self._start_times_s.append(now_s)

    def retry_after_s(self, waiting: int, now_s: float) -> int:
        """In how many whole seconds so many will have started, at the pace of late.

        The time since the last start counts too: a queue that has stopped draining says so.
        """
        if not waiting:
            return RETRY_AFTER_MIN_S
        recent = [start_s for start_s in self._start_times_s if start_s > now_s - PACE_WINDOW_S]
        if not recent:
            return RETRY_AFTER_MAX_S if self._start_times_s else RETRY_AFTER_MIN_S
        pace_s = (now_s - recent[0]) / len(recent)
        return min(max(RETRY_AFTER_MIN_S, math.ceil(waiting * pace_s)), RETRY_AFTER_MAX_S)
