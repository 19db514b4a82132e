"""3 controller, arrival rate: has it changed? Two adjacent windows, tested again and again.

Arrivals are counted in bins. At the end of a bin the last w of them, for w = 1, 2, 4, ..., are
compared with those before, back to the last change. Large changes show in short stretches at once,
small ones in long stretches later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from service.control.columns import FloatArray, IntArray
from service.control.config import RateConfig

RATE_WINDOW = 256
"""Arrivals over which the arrival rate is measured."""
BINS = 128
"""Bins in the longest recent stretch."""
REFERENCE_WINDOWS = 4
"""What is recent is compared with at most so many windows before it."""
REFERENCE_ARRIVALS_MIN = 32
"""Fewer arrivals before the recent stretch are no reference."""
STRETCHES = 2 ** np.arange(int(np.log2(BINS)) + 1)
BLOCK_BINS = 8
"""Bins of a block; counts of whole blocks tell bursts that last longer than a bin."""
BLOCKS_MIN = 8


@dataclass(frozen=True, slots=True)
class RateShift:
    """A change of the arrival rate.

    Attributes:
        since_s: when the recent stretch began, in which the rate is another.
        seen_s: when it was noticed.
        before_per_s: arrivals per second before; after_per_s: since.
        arrivals: requests that came since.
    """

    since_s: float
    seen_s: float
    before_per_s: float
    after_per_s: float
    arrivals: int

    @property
    def rose(self) -> bool:
        """Whether more arrive than before."""
        return self.after_per_s > self.before_per_s


class RateMonitor:
    """Measures the rate of arrivals and says when it changed; bounded memory.

    If the rate is the same in t1 seconds of reference and t2 recent seconds, the n2 recent ones
    among n arrivals are binomial with p = t2 / (t1 + t2), whatever the rate. Chernoff's bound
    gives a tail probability of at most exp(-n KL(n2 / n || p)), at any count. Bursts make counts
    vary more than Poisson's; the exponent is divided by the dispersion measured in the reference
    (quasi-likelihood). With L looks in a window, S stretches and two sides a look spends
    significance / (2 L S), so a window of steady arrivals is taken for a change at most with the
    probability `significance`.

    Attributes:
        rises, falls: changes noticed so far.

    Source: conditional test of two Poisson rates (Przyborowski and Wilenski 1940); [OLP] B.2.
    """

    def __init__(self, config: RateConfig) -> None:
        self.rises = 0
        self.falls = 0
        self._arrivals_s: deque[float] = deque(maxlen=RATE_WINDOW)
        self._bin_s = config.window_s / BINS
        self._threshold = (
            np.log(2.0 * BINS * STRETCHES.size / config.significance)
            if config.significance > 0
            else np.inf
        )
        # Arrivals, and their squared gaps, in each of the last bins; the newest is last.
        self._bins = np.zeros((2, BINS * (1 + REFERENCE_WINDOWS)))
        self._filled = 0
        self._open = [0.0, 0.0]
        self._open_end_s = -np.inf
        self._last_s = -np.inf
        self._due = False

    def arrive(self, now_s: float) -> None:
        """Count one arrival."""
        self._arrivals_s.append(now_s)
        if self._open_end_s == -np.inf:
            self._open_end_s = now_s + self._bin_s
        else:
            self._close_bins(now_s)
            gap_s = max(0.0, now_s - self._last_s)
            self._open[0] += 1.0
            self._open[1] += gap_s * gap_s
        self._last_s = max(self._last_s, now_s)

    def per_s(self, now_s: float) -> float:
        """Arrivals per second over the last RATE_WINDOW of them, none before the last change."""
        if len(self._arrivals_s) < 2:
            return 0.0
        return len(self._arrivals_s) / max(now_s - self._arrivals_s[0], 1e-6)

    def look(self, now_s: float) -> RateShift | None:
        """Test once for every time that bins were completed.

        After a change the recent stretch is all that is known: it is the new reference, and the
        measured rate forgets what came before it.
        """
        self._close_bins(now_s)
        if not self._due or self._threshold == np.inf:
            return None
        self._due = False
        recent = STRETCHES[self._filled >= 2 * STRETCHES]
        if not recent.size:
            return None
        evidence = self._evidence(recent)
        best = int(evidence.argmax())
        if evidence[best] <= self._threshold:
            return None
        shift = self._shift(int(recent[best]))
        self.rises += shift.rose
        self.falls += not shift.rose
        while self._arrivals_s and self._arrivals_s[0] < shift.since_s:
            self._arrivals_s.popleft()
        return shift

    def _evidence(self, recent: IntArray) -> FloatArray:
        """(s,) the exponent of the tail bound for each length of the recent stretch, in bins."""
        filled = self._filled
        sums = np.zeros((3, filled + 1))
        arrivals, squares = self._bins[:, -filled:]
        np.cumsum((arrivals, squares, arrivals**2), axis=1, out=sums[:, 1:])
        before, gaps, counts = sums[:, filled - recent]
        reference = filled - recent
        n = sums[0, filled]
        if n == 0:
            return np.zeros(recent.size)
        mean = np.maximum(before, 1.0) / reference
        # Of gaps: their squared coefficient of variation, which is what a renewal process adds.
        spread = np.maximum(gaps * before / (reference * self._bin_s) ** 2 - 1.0, 1.0)
        spread = np.maximum(spread, (counts / reference - mean**2) / mean)
        spread = np.maximum(spread, _block_spread(arrivals, reference))
        evidence = n * _divergence((n - before) / n, recent / filled) / spread
        return np.where(before >= REFERENCE_ARRIVALS_MIN, evidence, 0.0)

    def _shift(self, recent: int) -> RateShift:
        """Begin anew with the recent stretch as what is known."""
        arrivals = self._bins[0]
        since = float(arrivals[-recent:].sum())
        reference = self._filled - recent
        before = float(arrivals[-self._filled : -recent].sum())
        self._filled = recent
        seen_s = self._open_end_s - self._bin_s
        return RateShift(
            since_s=seen_s - recent * self._bin_s,
            seen_s=seen_s,
            before_per_s=before / (reference * self._bin_s),
            after_per_s=since / (recent * self._bin_s),
            arrivals=int(since),
        )

    def _close_bins(self, now_s: float) -> None:
        """Complete the bins that ended by now."""
        if now_s < self._open_end_s or self._open_end_s == -np.inf:
            return
        self._due = True
        size = self._bins.shape[1]
        passed = 1 + int((now_s - self._open_end_s) / self._bin_s)
        self._open_end_s += passed * self._bin_s
        new = np.zeros((2, min(passed, size)))
        if passed <= size:
            new[:, 0] = self._open
        self._bins = np.concatenate([self._bins[:, new.shape[1] :], new], axis=1)
        self._filled = min(self._filled + passed, size)
        self._open = [0.0, 0.0]


def _divergence(share: FloatArray, p: FloatArray) -> FloatArray:
    """KL(share || p) of two coins, nats; 0 log 0 = 0."""
    hit = share * np.log(np.maximum(share, 1e-300) / p)
    miss = (1.0 - share) * np.log(np.maximum(1.0 - share, 1e-300) / (1.0 - p))
    return np.asarray(hit + miss)


def _block_spread(arrivals: FloatArray, reference: IntArray) -> FloatArray:
    """(s,) variance over mean of the counts in the whole blocks of each reference."""
    blocks = arrivals[: arrivals.size // BLOCK_BINS * BLOCK_BINS].reshape(-1, BLOCK_BINS).sum(1)
    sums = np.zeros((2, blocks.size + 1))
    np.cumsum((blocks, blocks**2), axis=1, out=sums[:, 1:])
    whole = (reference // BLOCK_BINS).astype(np.int64)
    total, squares = sums[:, whole]
    several = np.maximum(whole, 2)
    mean = np.maximum(total, 1.0) / several
    variance = (squares - total**2 / several) / (several - 1)
    return np.where(whole >= BLOCKS_MIN, variance / mean, 1.0)
