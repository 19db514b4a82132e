"""3 controller, decode lengths: a forecast per request, and what is left of one that runs.

Everything is a distribution over a log-spaced grid of lengths. Requests without a hint are pooled
by group and shrunk towards all traffic; those with a hint are pooled by the ratio true / hinted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.control.columns import FloatArray, IntArray
from service.control.events import Request

GRID_PER_OCTAVE = 8
GRID_OCTAVES = 17
GROUPS_MAX = 1024
PRIOR_WEIGHT = 20.0
MEMORY = 4096.0


def _grid() -> FloatArray:
    return np.asarray(2.0 ** (np.arange(GRID_OCTAVES * GRID_PER_OCTAVE + 1) / GRID_PER_OCTAVE))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is believed about one request's decode length when it arrives.

    Attributes:
        decode_tokens: o^, the point that columns use; >= 1.
        pool: index of the distribution behind it, for `LengthPredictor.remaining`.
        scale: the distribution is of length / scale (1 for pooled lengths, the hint for ratios).
    """

    decode_tokens: int
    pool: int
    scale: float


class LengthPredictor:
    """Online length distributions with shrinkage and forgetting; bounded memory.

    Pool 0 is all traffic without a hint, pool 1 the ratio true / hint of requests with one, the
    rest are groups. A group's distribution is its own counts plus PRIOR_WEIGHT requests drawn from
    pool 0.

    Attributes:
        version: grows with everything learned; while it stands, forecasts stay as they are.
    """

    def __init__(self, default_tokens: int) -> None:
        self.version = 0
        self._grid = _grid()
        # A cell is as wide as the step to the next grid point.
        self._width = self._grid * (2.0 ** (1.0 / GRID_PER_OCTAVE) - 1.0)
        self._counts = np.zeros((2 + GROUPS_MAX, self._grid.size))
        self._pools: dict[str, int] = {}
        # Requests in a cell or a later one, and their tokens; one more entry that stays zero.
        self._alive = np.zeros((2 + GROUPS_MAX, self._grid.size + 1))
        self._work = np.zeros_like(self._alive)
        # Before anything is seen: an exponential around the default, worth one request.
        body = np.exp(-self._grid / default_tokens)
        self._counts[0] = np.append(body[:-1] - body[1:], body[-1]) + 1e-9
        self._counts[0] /= self._counts[0].sum()
        self._counts[1, GRID_PER_OCTAVE * (GRID_OCTAVES // 2)] = 1.0
        self._sum_up(0)
        self._sum_up(1)
        # Ratios live around 1: their grid is the same one, moved down by half its octaves.
        self._ratio_unit = 2.0 ** (GRID_OCTAVES // 2)

    def forecast(self, request: Request) -> Forecast:
        """Forecast one request: its hint if it has one, else the mean of its pool, capped.

        A floor above the mean is a hint itself: the engine decodes at least that much.
        """
        if request.decode_tokens_hint is not None:
            tokens, pool, scale = request.decode_tokens_hint, 1, float(request.decode_tokens_hint)
        else:
            pool = self._pools.get(request.group, 0)
            tokens, scale = round(self._mean(pool)), 1.0
            floor = request.decode_tokens_floor
            if floor is not None and floor > tokens:
                tokens, pool, scale = floor, 1, float(floor)
        if request.decode_tokens_limit is not None:
            tokens = min(tokens, request.decode_tokens_limit)
        return Forecast(max(1, tokens), pool, scale)

    def observe(self, request: Request, decode_tokens: int) -> None:
        """Learn from a completed request."""
        if decode_tokens < 1:
            return
        if request.decode_tokens_hint is not None:
            self._count(1, decode_tokens / request.decode_tokens_hint * self._ratio_unit)
            return
        self._count(0, decode_tokens)
        if request.group:
            if request.group not in self._pools and len(self._pools) < GROUPS_MAX:
                self._pools[request.group] = 2 + len(self._pools)
            if request.group in self._pools:
                self._count(self._pools[request.group], decode_tokens)

    def remaining(self, pool: IntArray, scale: FloatArray, produced: FloatArray) -> FloatArray:
        """Conditional expected remaining length of requests that already produced some tokens.

        Args:
            pool: (n,) from the forecasts.
            scale: (n,) likewise.
            produced: (n,) tokens so far.

        Returns:
            (n,) E[o - d | o > d] >= 1, from each pool's survival function (spec section 7.3).
        """
        unit = np.where(pool == 1, self._ratio_unit / scale, 1.0)
        reached = produced * unit
        # What is on the grid must not fall below its own cell by rounding.
        position = np.log2(np.maximum(reached, 1.0)) * GRID_PER_OCTAVE + 1e-9
        cell = np.minimum(position.astype(np.int64), self._grid.size - 1)
        # Survivors are those in later cells; before the first token that is everybody.
        alive, work = self._blended(pool, cell + (reached >= 1.0))
        mean = np.divide(work, alive, out=reached + self._width[cell], where=alive > 0)
        return np.asarray(np.maximum((mean - reached) / unit, 1.0))

    def _mean(self, pool: int) -> float:
        """Mean length of a pool."""
        alive, work = self._blended(np.array([pool]), np.array([0]))
        return float(work[0] / alive[0])

    def _blended(self, pool: IntArray, cell: IntArray) -> tuple[FloatArray, FloatArray]:
        """(n,) requests from a cell on, and their tokens; groups are shrunk towards pool 0."""
        prior = np.where(pool >= 2, PRIOR_WEIGHT / self._alive[0, 0], 0.0)
        alive = self._alive[pool, cell] + prior * self._alive[0, cell]
        return alive, self._work[pool, cell] + prior * self._work[0, cell]

    def _count(self, pool: int, value: float) -> None:
        cell = round(float(np.log2(max(value, 1.0))) * GRID_PER_OCTAVE)
        cell = min(cell, self._grid.size - 1)
        self._counts[pool, cell] += 1.0
        self._alive[pool, : cell + 1] += 1.0
        self._work[pool, : cell + 1] += self._grid[cell]
        if self._alive[pool, 0] > MEMORY:
            self._counts[pool] *= 0.5
            self._sum_up(pool)
        self.version += 1

    def _sum_up(self, pool: int) -> None:
        """Make a pool's sums over later cells anew."""
        counts = self._counts[pool]
        self._alive[pool, :-1] = counts[::-1].cumsum()[::-1]
        self._work[pool, :-1] = (counts * self._grid)[::-1].cumsum()[::-1]
