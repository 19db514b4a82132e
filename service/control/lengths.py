"""3 controller, decode lengths: a forecast per request, and what is left of one that runs.

Everything is a distribution over a log-spaced grid of lengths. Requests without a hint are pooled
by group, system prompt and prompt length, each shrunk towards the coarser one; those with a hint
are pooled by the ratio true / hinted, where a hint counts as what hint_scale.py makes of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from service.control.columns import FloatArray, IntArray
from service.control.events import Request
from service.control.hint_scale import HintScale
from service.control.kernels.calendar import OCTAVE_CELLS, left_tokens

GRID_PER_OCTAVE = OCTAVE_CELLS
GRID_OCTAVES = 17
GROUPS_MAX = 1024
LEAVES_MAX = 1024
"""Pools by system prompt and by prompt length, all groups together; the least used gives way."""
LEVELS = 3
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survival:
    """What the kernels ask of the pools (kernels/calendar.py).

    Attributes:
        used: so many pools are in use, the first ones.
        sums: (2, pools, cells + 1) requests of a pool in a cell or a later one, and their tokens.
        above: (pools, LEVELS) what lies above a pool and itself, coarsest first; -1 for nothing.
        grid: (cells,) lengths. width: (cells,) of each cell.
        shape: unit of ratios, PRIOR_WEIGHT, the settings' quantile or 0.
    """

    used: int
    sums: FloatArray
    above: IntArray
    grid: FloatArray
    width: FloatArray
    shape: FloatArray

    def frozen(self) -> Survival:
        """The same, to be kept while the predictor goes on learning."""
        sums, above = self.sums[:, : self.used].copy(), self.above[: self.used].copy()
        return replace(self, sums=sums, above=above)


class LengthPredictor:
    """Online length distributions with shrinkage and forgetting; bounded memory.

    Pool 0 is all traffic without a hint, pool 1 the ratio true / hint of requests with one. Below
    pool 0 lie groups, below them their system prompts, below those octaves of the prompt's length.
    A pool's distribution is its own counts plus PRIOR_WEIGHT requests drawn from the one above.

    Attributes:
        version: grows with everything learned; while it stands, forecasts stay as they are.
    """

    def __init__(self, default_tokens: int, quantile: float = 0.0) -> None:
        self.version = 0
        self._quantile = quantile
        self._hints = HintScale()
        self._grid = _grid()
        # A cell is as wide as the step to the next grid point.
        self._width = self._grid * (2.0 ** (1.0 / GRID_PER_OCTAVE) - 1.0)
        rows = 2 + GROUPS_MAX + LEAVES_MAX
        self._used = 2
        self._counts = np.zeros((rows, self._grid.size))
        self._pools: dict[str, int] = {}
        self._leaves: OrderedDict[tuple[str, str, int], int] = OrderedDict()
        # What lies above a pool and itself, coarsest first; -1 for nothing.
        self._above = np.full((rows, LEVELS), -1, dtype=np.int64)
        # Requests in a cell or a later one, and their tokens; one more entry that stays zero.
        self._sums = np.zeros((2, rows, self._grid.size + 1))
        self._alive, self._work = self._sums
        # Before anything is seen: an exponential around the default, worth one request.
        body = np.exp(-self._grid / default_tokens)
        self._counts[0] = np.append(body[:-1] - body[1:], body[-1]) + 1e-9
        self._counts[0] /= self._counts[0].sum()
        self._counts[1, GRID_PER_OCTAVE * (GRID_OCTAVES // 2)] = 1.0
        self._sum_up(0)
        self._sum_up(1)
        # Ratios live around 1: their grid is the same one, moved down by half its octaves.
        self._ratio_unit = 2.0 ** (GRID_OCTAVES // 2)
        self._survival: Survival | None = None
        self._shape = np.array([self._ratio_unit, PRIOR_WEIGHT, quantile])

    def forecast(self, request: Request) -> Forecast:
        """Forecast one request: its hint if it has one, set right, else its pool's mean, capped.

        A floor above the mean is a hint itself: the engine decodes at least that much.
        """
        if request.decode_tokens_hint is not None:
            scale = request.decode_tokens_hint * self._hints.of(request)
            tokens, pool = round(scale), 1
            if self._quantile:
                tokens = round(self._typical(1) * scale / self._ratio_unit)
        else:
            pool, scale = self._known(request), 1.0
            tokens = round(self._typical(pool))
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
            scale = request.decode_tokens_hint * self._hints.of(request)
            self._count(1, decode_tokens / scale * self._ratio_unit)
            self._hints.note(request, decode_tokens)
            return
        self._count(0, decode_tokens)
        above: list[int] = []
        if request.group:
            if request.group not in self._pools and len(self._pools) < GROUPS_MAX:
                self._pools[request.group] = self._new_pool()
            if request.group in self._pools:
                above.append(self._pools[request.group])
        for key in self._keys(request):
            above.append(self._leaf(key))
        for level, pool in enumerate(above):
            self._above[pool] = -1
            self._above[pool, : level + 1] = above[: level + 1]
            self._count(pool, decode_tokens)

    def remaining(self, pool: IntArray, scale: FloatArray, produced: FloatArray) -> FloatArray:
        """Conditional expected remaining length of requests that already produced some tokens.

        Args:
            pool: (n,) from the forecasts.
            scale: (n,) likewise.
            produced: (n,) tokens so far.

        Returns:
            (n,) E[o - d | o > d] >= 1, from each pool's survival function (spec section 7.3), or
            the settings' quantile of o - d given o > d.
        """
        left = np.empty(pool.size)
        one = self.survival()
        left_tokens(
            pool, scale, produced, one.sums, one.above, one.grid, one.width, one.shape, left
        )
        return left

    def survival(self) -> Survival:
        """What `remaining` follows from, which moves on."""
        if self._survival is None or self._survival.used != self._used:
            self._survival = Survival(
                used=self._used,
                sums=self._sums,
                above=self._above,
                grid=self._grid,
                width=self._width,
                shape=self._shape,
            )
        return self._survival

    def quantile(self, request: Request, level: float) -> float:
        """The length that a share `level` of such requests without a hint does not exceed."""
        pool = np.array([self._known(request)])
        return float(self._quantiles(pool, np.zeros(1, dtype=np.int64), level)[0])

    def _typical(self, pool: int) -> float:
        """Mean length of a pool, or the settings' quantile of it, in its own units."""
        if self._quantile:
            everybody = np.zeros(1, dtype=np.int64)
            return float(self._quantiles(np.array([pool]), everybody, self._quantile)[0])
        return self._mean(pool)

    def _mean(self, pool: int) -> float:
        """Mean length of a pool that is shrunk to those above it: `_blended` in plain numbers."""
        top = 1 if pool == 1 else 0
        alive, work = float(self._alive[top, 0]), float(self._work[top, 0])
        total = alive
        for above in self._above[pool].tolist():
            if above < 0:
                break
            own, weight = float(self._alive[above, 0]), PRIOR_WEIGHT / total
            alive, work = own + weight * alive, float(self._work[above, 0]) + weight * work
            total = own + PRIOR_WEIGHT
        return work / alive

    def _quantiles(self, pool: IntArray, first: IntArray, level: float) -> FloatArray:
        """(n,) a quantile of each pool's lengths among those in cell `first` or later ones."""
        cells = np.arange(self._grid.size + 1)
        alive, _ = self._blended(pool[:, None], np.tile(cells, (pool.size, 1)))
        left = (1.0 - level) * np.take_along_axis(alive, first[:, None], axis=1)
        reached = (alive[:, 1:] <= left) & (cells[:-1] >= np.minimum(first, cells[-2])[:, None])
        return np.asarray(self._grid[reached.argmax(axis=1)])

    def _known(self, request: Request) -> int:
        """The finest pool that has seen requests like this one."""
        found = self._pools.get(request.group, 0)
        for key in self._keys(request):
            found = self._leaves.get(key, found)
        return found

    def _keys(self, request: Request) -> list[tuple[str, str, int]]:
        """Names of the pools below a request's group, coarsest first."""
        group = request.group
        if group and group not in self._pools:
            return []
        octave = max(request.prompt_tokens, 1).bit_length() - 1
        by_length = (group, request.fingerprint, octave)
        return [(group, request.fingerprint, -1), by_length] if request.fingerprint else [by_length]

    def _new_pool(self) -> int:
        """The next unused pool: those in use are the first rows, so that few need be copied."""
        self._used += 1
        return self._used - 1

    def _leaf(self, key: tuple[str, str, int]) -> int:
        """The pool of a key, made anew from the least recently used one when there is no other.

        A request that was forecast from that one goes on with the new pool's lengths.
        """
        pool = self._leaves.get(key)
        if pool is None:
            if len(self._leaves) == LEAVES_MAX:
                pool = self._leaves.popitem(last=False)[1]
                self._counts[pool] = self._alive[pool] = self._work[pool] = 0.0
            else:
                pool = self._new_pool()
            self._leaves[key] = pool
        self._leaves.move_to_end(key)
        return pool

    def _blended(self, pool: IntArray, cell: IntArray) -> tuple[FloatArray, FloatArray]:
        """Requests from a cell on, and their tokens; every pool is shrunk to the one above it.

        Args:
            pool: (n,), or (n, 1).
            cell: (n,), or (n, m).
        """
        flat, width = self._sums.reshape(2, -1), self._sums.shape[2]
        top = (pool == 1).astype(np.int64)
        sums, total = flat.take(top * width + cell, axis=1), self._alive[top, 0]
        for level in range(LEVELS):
            at = self._above[pool, level]
            own = (at >= 0).nonzero()[0]
            # Pools are named coarsest first: where none is, none follows.
            if not own.size:
                break
            at = at[own]
            finer = flat.take(at * width + cell[own], axis=1)
            sums[:, own] = finer + PRIOR_WEIGHT / total[own] * sums[:, own]
            total[own] = self._alive[at, 0] + PRIOR_WEIGHT
        return sums[0], sums[1]

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
