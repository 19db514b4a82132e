"""3 controller, kernels of the mini-batches: which recorded columns a step looks at."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from service.control.columns import IntArray
from service.control.kernels.compiled import INT, INTS_2D_OUT, NOTHING, dense, kernel, part

WORDS: Final = types.Array(types.uint32, 1, "C", readonly=True)
LOW_BITS: Final = 2**32 - 1


@part
def _draw(most: int, bits: NDArray[np.uint32], at: int) -> tuple[int, int]:
    """Draw from 0 to `most`, all equally likely; and where the next random bits are.

    By Lemire's method (Fast Random Integer Generation in an Interval, 2019), as numpy does it.
    Bits that would favour some values are passed over while others are left; the last are used for
    all that would need more.
    """
    at = min(at, bits.size - 1)
    values = most + 1
    if most == 0:
        return 0, at
    uneven = (LOW_BITS - most) % values
    scaled = int(bits[at]) * values
    while (scaled & LOW_BITS) < uneven and at + 1 < bits.size:
        at += 1
        scaled = int(bits[at]) * values
    return scaled >> 32, at + 1


@kernel(NOTHING(INT, WORDS, dense(INTS_2D_OUT)))
def samples(count: int, bits: NDArray[np.uint32], chosen: IntArray) -> None:
    """Choose K mini-batches of distinct columns, all equally likely, in random order.

    By Floyd's algorithm and a shuffle, as `numpy.random.Generator.choice` does it.

    Args:
        count: n columns, fewer than 2**31.
        bits: random ones; more than K (2 size - 1), since a few may be passed over.
        chosen: (K, size) rows, is filled.
    """
    batches, size = chosen.shape
    at, taken = 0, np.zeros(count, np.bool_)
    for k in range(batches):
        for place in range(size):
            row, at = _draw(count - size + place, bits, at)
            if taken[row]:
                row = count - size + place
            taken[row] = True
            chosen[k, place] = row
        for place in range(size - 1, 0, -1):
            other, at = _draw(place, bits, at)
            chosen[k, place], chosen[k, other] = chosen[k, other], chosen[k, place]
        for place in range(size):
            taken[chosen[k, place]] = False
