"""3 controller, how long newcomers would have waited: a tally from which quantiles are read."""

from __future__ import annotations

import math

import numpy as np

from service.control.columns import FloatArray
from service.control.kernels.arrivals import last_within

SHORTEST_S = 1e-3
LONGEST_S = 1e4
"""Waits beyond these count as these."""
RATIO = 1.02
"""Waits are told apart when one is longer by this factor."""
ROUNDING = 1e-6
"""More than a number of requests is off."""
BINS = math.ceil(math.log(LONGEST_S / SHORTEST_S) / math.log(RATIO)) + 1


class WaitTally:
    """Counts of waits, by length; its size does not grow with them.

    Attributes:
        counts: (BINS,) requests by how long they would have waited, rounded up.
        requests: how many in all.
        longest_s: the longest of these waits.
    """

    def __init__(self) -> None:
        self.counts: FloatArray = np.zeros(BINS)
        self.requests = 0
        self.longest_s = 0.0

    def note(self, wait_s: float, requests: int) -> None:
        """So many requests would have waited so long."""
        within = min(max(wait_s, SHORTEST_S), LONGEST_S)
        self.counts[math.ceil(math.log(within / SHORTEST_S) / math.log(RATIO))] += requests
        self.requests += requests
        self.longest_s = max(self.longest_s, wait_s)


def within_s(share: float, tallies: list[WaitTally]) -> float:
    """The wait that a share of all requests of one or two tallies would have stayed within.

    At most RATIO times too long, never longer than the longest; 0 where nobody came.
    """
    first, last = tallies[0], tallies[-1]
    several = last is not first
    requests = first.requests + (last.requests if several else 0)
    if not requests:
        return 0.0
    # Whole requests: as many as the share leaves may be longer, not one more.
    beyond = math.floor((1.0 - share) * requests + ROUNDING)
    more = last.counts if several else first.counts[:0]
    at = last_within(first.counts, more, float(beyond))
    return min(SHORTEST_S * RATIO**at, max(first.longest_s, last.longest_s))
