"""3 controller, kernels of the mini-batches: which recorded columns a step looks at."""

from __future__ import annotations

import numpy as np

from service.control.columns import IntArray
from service.control.kernels.compiled import INT, INTS_2D_OUT, INTS_OUT, NOTHING, dense, kernel


@kernel(NOTHING(INT, INT, INT, dense(INTS_OUT)))
def bounds_of_draws(count: int, size: int, batches: int, highest: IntArray) -> None:
    """Put the highest value of each random number that `samples` needs, in its order.

    Args:
        count: n columns.
        size: of a mini-batch, at most n.
        batches: K.
        highest: (K (2 size - 1),) is filled.
    """
    at = 0
    for _ in range(batches):
        for value in range(count - size, count):
            highest[at] = value
            at += 1
        for value in range(size - 1, 0, -1):
            highest[at] = value
            at += 1


@kernel(NOTHING(INT, dense(INTS_OUT), dense(INTS_2D_OUT)))
def samples(count: int, drawn: IntArray, chosen: IntArray) -> None:
    """Choose K mini-batches of distinct columns, all equally likely, in random order.

    By Floyd's algorithm and a shuffle, as `numpy.random.Generator.choice` does it.

    Args:
        count: n columns.
        drawn: random numbers from 0 to those of `bounds_of_draws`.
        chosen: (K, size) rows, is filled.
    """
    batches, size = chosen.shape
    at, taken = 0, np.zeros(count, np.bool_)
    for k in range(batches):
        for place in range(size):
            row = drawn[at]
            if taken[row]:
                row = count - size + place
            taken[row] = True
            chosen[k, place] = row
            at += 1
        for place in range(size - 1, 0, -1):
            other = drawn[at]
            chosen[k, place], chosen[k, other] = chosen[k, other], chosen[k, place]
            at += 1
        for place in range(size):
            taken[chosen[k, place]] = False
