"""3 controller, kernels of chance: random words, and which recorded columns a step looks at.

The words are those of numpy's default generator (PCG64, seeded by its SeedSequence): numpy's own
takes ten times as long to make one for a seed, and every price refresh has a seed of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from service.control.columns import FloatArray, IntArray
from service.control.kernels.compiled import (
    FLOAT,
    FLOATS_OUT,
    INT,
    INTS_2D_OUT,
    NOTHING,
    dense,
    kernel,
    part,
)

SEED_WORDS: Final = types.Array(types.uint64, 1, "C", readonly=True)
WORDS_OUT: Final = types.Array(types.uint64, 1, "C")
POOL: Final = 4
"""Words of 32 bits that a seed is spread over."""
STATE: Final = 8
"""Words of 32 bits that a generator starts with."""
LOW_32: Final = np.uint64(2**32 - 1)
SPREAD: Final = (np.uint64(0x43B0D7E5), np.uint64(0x931E8875))
DRAWN: Final = (np.uint64(0x8B51F9DD), np.uint64(0x58F38DED))
MIXED: Final = (np.uint64(0xCA01F9DD), np.uint64(0x4973F715))
"""Start and factor of the two hashes, and the factors of what is mixed (numpy's SeedSequence)."""
STEP_HIGH: Final = np.uint64(2549297995355413924)
STEP_LOW: Final = np.uint64(4865540595714422341)
"""Factor of PCG64's state (O'Neill, PCG, 2014)."""
N11, N16, N32, N58, N63 = (np.uint64(bits) for bits in (11, 16, 32, 58, 63))
ZERO, ONE, N64 = np.uint64(0), np.uint64(1), np.uint64(64)
WORDS: Final = types.Array(types.uint32, 1, "C", readonly=True)
LOW_BITS: Final = 2**32 - 1


@part
def _hashed(value: np.uint64, key: np.uint64, factor: np.uint64) -> tuple[np.uint64, np.uint64]:
    """A hash of 32 bits, and the key of the next one."""
    after = (key * factor) & LOW_32
    value = ((value ^ key) * after) & LOW_32
    return value ^ (value >> N16), after


@part
def _times(
    high: np.uint64, low: np.uint64, by_high: np.uint64, by_low: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """The lower 128 bits of a product of two numbers of 128 bits."""
    a, b, c, d = low >> N32, low & LOW_32, by_low >> N32, by_low & LOW_32
    bottom, cross = b * d, a * d
    middle = (bottom >> N32) + (cross & LOW_32) + b * c
    carried = a * c + (cross >> N32) + (middle >> N32)
    return carried + high * by_low + low * by_high, low * by_low


@part
def _plus(
    high: np.uint64, low: np.uint64, more_high: np.uint64, more_low: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """The lower 128 bits of a sum of two numbers of 128 bits."""
    total = low + more_low
    return high + more_high + (ONE if total < low else ZERO), total


@part
def _seeded(seed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """(4,) words of 64 bits for a generator's start, from (4,) words of 32 bits of a seed."""
    pool, state, key = np.empty(POOL, np.uint64), np.zeros(POOL, np.uint64), SPREAD[0]
    for at in range(POOL):
        pool[at], key = _hashed(seed[at], key, SPREAD[1])
    for source in range(POOL):
        for at in range(POOL):
            if at != source:
                value, key = _hashed(pool[source], key, SPREAD[1])
                value = (MIXED[0] * pool[at] - MIXED[1] * value) & LOW_32
                pool[at] = value ^ (value >> N16)
    key = DRAWN[0]
    for at in range(STATE):
        value, key = _hashed(pool[at % POOL], key, DRAWN[1])
        state[at // 2] |= value << N32 if at % 2 else value
    return state


@kernel(NOTHING(SEED_WORDS, WORDS_OUT, FLOAT, dense(FLOATS_OUT)))
def draw_words(
    seed: NDArray[np.uint64], words: NDArray[np.uint64], most: float, numbers: FloatArray
) -> None:
    """Fill (n,) `words` with a seed's first random words; of the first m make numbers.

    Args:
        seed: (4,) its words of 32 bits, lowest first.
        words: is filled with what `numpy.random.PCG64(seed).random_raw` gives.
        most: no number is larger.
        numbers: (m,), m <= n; is filled with whole numbers: uniform ones from 0 up to `most`, made
            as `numpy.random.Generator.random` makes them, and rounded.
    """
    start = _seeded(seed)
    add_high, add_low = (start[2] << ONE) | (start[3] >> N63), (start[3] << ONE) | ONE
    high, low = _plus(add_high, add_low, start[0], start[1])
    for at in range(-1, words.size):
        high, low = _times(high, low, STEP_HIGH, STEP_LOW)
        high, low = _plus(high, low, add_high, add_low)
        if at >= 0:
            folded, turn = high ^ low, high >> N58
            words[at] = (folded >> turn) | (folded << ((N64 - turn) & N63))
    for at in range(numbers.size):
        numbers[at] = np.rint(most * (float(words[at] >> N11) * 2.0**-53))


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
