"""2 central queue: whether decisions take too long, and for how long the policy rests then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.queue_stats import QueueConfig


class Lateness:
    """Counts late decisions.

    Attributes:
        late_ticks: decisions that took too long, so far.
        rests_until_s: until when requests start first come first served, on the loop's clock.
    """

    def __init__(self) -> None:
        self.late_ticks = 0
        self.rests_until_s = -math.inf
        self._in_a_row = 0

    def note(self, duration_s: float, now_s: float, config: QueueConfig) -> bool:
        """Note a decision; whether the policy must rest now, as too many in a row were late."""
        if duration_s <= config.tick_late_s:
            self._in_a_row = 0
            return False
        self.late_ticks += 1
        self._in_a_row += 1
        if self._in_a_row < config.late_ticks_max:
            return False
        self._in_a_row = 0
        self.rests_until_s = now_s + config.late_pause_s
        return True
