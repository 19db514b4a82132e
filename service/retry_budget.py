"""4 forwarder: how many second tries the workers can be asked for, so that retries cannot storm.

When every worker is too busy, each refused request tried again multiplies the load exactly when
there is least room for it. A token bucket bounds second tries to a share of the requests.
"""

from __future__ import annotations


class RetryBudget:
    """Earns a share of a second try with each request, and keeps a few for a quiet service.

    Args:
        share: second tries for each request, in [0, 1].
        burst: most that can be saved up; what there is at the start.
    """

    def __init__(self, *, share: float, burst: float) -> None:
        self._saved = burst
        self.configure(share=share, burst=burst)

    def configure(self, *, share: float, burst: float) -> None:
        """Take other bounds; what was saved stays, up to the burst."""
        self._share = share
        self._burst = burst
        self._saved = min(self._saved, burst)

    def earn(self) -> None:
        """Count a request."""
        self._saved = min(self._burst, self._saved + self._share)

    def spend(self) -> bool:
        """Take one second try, if there is one left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
