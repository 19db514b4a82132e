"""3 controller, the work that a running request usually has left, whatever the order of starts.

A request is found running in proportion to the time it runs, and with any part of its life behind
it. So the mean is over all iterations of the lives of all requests, not over requests.
"""

from __future__ import annotations

MEMORY = 0.998
"""Weight of all earlier requests, at each new one."""
SEEN_MIN = 16.0
"""Arrivals below which nothing is told."""


class UsualWork:
    """Learns from arrivals, by their forecasts, and from ends, how much of forecasts comes true.

    Arrivals alone would take forecasts for true; ends alone would know no long request while the
    first of them still run. A request that outlived its forecast has nothing left.
    """

    def __init__(self) -> None:
        self._seen = 0.0
        # Slot-iterations of lives, and those left summed over them: of arrivals by their forecasts;
        # of ended requests by their forecasts, and as they were.
        self._came = (0.0, 0.0)
        self._forecast = (0.0, 0.0)
        self._true = (0.0, 0.0)

    def came(self, forecast: float, sequences: int = 1) -> None:
        """Learn from an arrival: the forecast decode tokens of each of its sequences."""
        self._seen = MEMORY * self._seen + 1.0
        slot_steps = sequences * forecast
        self._came = _faded(self._came, slot_steps, slot_steps * forecast / 2.0)

    def ended(self, forecast: float, decode_tokens: float, sequences: int = 1) -> None:
        """Learn from a request that came to its end by itself, after so many of each sequence."""
        both, slot_steps = min(decode_tokens, forecast), sequences * forecast
        left = sequences * both * (forecast - both / 2.0)
        self._forecast = _faded(self._forecast, slot_steps, slot_steps * forecast / 2.0)
        self._true = _faded(self._true, sequences * decode_tokens, left)

    def left_steps(self) -> float:
        """Iterations that a busy slot has left by its forecast, on average; 0: unknown."""
        if self._seen < SEEN_MIN:
            return 0.0
        lives, left = self._came
        if self._forecast[0] > 0:
            lives *= self._true[0] / self._forecast[0]
            left *= self._true[1] / self._forecast[1]
        return left / lives if lives > 0 else 0.0


def _faded(sums: tuple[float, float], lives: float, left: float) -> tuple[float, float]:
    """Two sums with one more request in them."""
    return MEMORY * sums[0] + lives, MEMORY * sums[1] + left
