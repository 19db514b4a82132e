"""3 controller, the work that a running request usually has left, whatever the order of starts.

A request is found running in proportion to the time it runs, and with any part of its life behind
it. So the mean is over all iterations of the lives of all requests, not over requests.
"""

from __future__ import annotations

import numpy as np

from service.control.columns import FloatArray

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
        # Iterations of lives, and those left summed over them: of arrivals by their forecasts; of
        # ended requests by their forecasts, and as they were.
        self._came: FloatArray = np.zeros(2)
        self._forecast: FloatArray = np.zeros(2)
        self._true: FloatArray = np.zeros(2)

    def came(self, forecast: float) -> None:
        """Learn from an arrival: its forecast decode tokens."""
        self._seen = MEMORY * self._seen + 1.0
        self._came = MEMORY * self._came + (forecast, forecast * forecast / 2.0)

    def ended(self, forecast: float, decode_tokens: float) -> None:
        """Learn from a request that came to its end by itself."""
        both = min(decode_tokens, forecast)
        self._forecast = MEMORY * self._forecast + (forecast, forecast * forecast / 2.0)
        self._true = MEMORY * self._true + (decode_tokens, both * (forecast - both / 2.0))

    def left_steps(self) -> float:
        """Iterations that a running request has left by its forecast, on average; 0: unknown."""
        if self._seen < SEEN_MIN:
            return 0.0
        lives, left = self._came
        if self._forecast[0] > 0:
            come_true = self._true / self._forecast
            lives, left = lives * come_true[0], left * come_true[1]
        return float(left / lives) if lives > 0 else 0.0
