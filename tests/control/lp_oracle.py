"""What scipy's HiGHS says about the linear programs of [OLP]: the tests' second oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from tests.control.naive_olp import FREE, Column, Recorded, Tensor

TOLERANCE = 1e-6
"""Absolute and relative; HiGHS itself stops at 1e-7."""


@dataclass(frozen=True)
class StartProblem:
    """The per-step LP (4)-(5): whom to start where.

    Attributes:
        columns: a_(j,g,k) of each request; the same on every worker.
        rewards: (n, g) r_(j,g,k); -inf where a start is not allowed.
        capacity: b, what is free on every (worker, slot).
    """

    columns: list[Column]
    rewards: NDArray[np.float64]
    capacity: Tensor


def _solve(
    objective: NDArray[np.float64], rows: NDArray[np.float64], limits: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Minimise over x >= 0 with rows x <= limits."""
    result = linprog(objective, A_ub=rows, b_ub=limits, bounds=(0, None), method="highs")
    assert result.success, result.message
    return float(result.fun), np.asarray(result.x)


def _matrix(problem: StartProblem) -> tuple[list[tuple[int, int]], NDArray[np.float64]]:
    """The pairs that are allowed, and their columns: one row per (worker, slot, resource)."""
    pairs = [(int(j), int(g)) for j, g in np.argwhere(np.isfinite(problem.rewards))]
    where = list(problem.capacity)
    a = np.zeros((2 * len(where), len(pairs)))
    for x, (j, g) in enumerate(pairs):
        for i, (worker, slot) in enumerate(where):
            if worker == g:
                a[2 * i : 2 * i + 2, x] = problem.columns[j].get(slot, FREE)
    return pairs, a


def lp_optimum(problem: StartProblem) -> float:
    """The optimum of (4)-(5), fractional starts allowed."""
    pairs, a = _matrix(problem)
    if not pairs:
        return 0.0
    once = np.array([[float(j == row) for j, _ in pairs] for row in range(len(problem.columns))])
    b = np.array([x for use in problem.capacity.values() for x in use])
    r = np.array([problem.rewards[pair] for pair in pairs])
    return -_solve(-r, np.vstack([a, once]), np.append(b, np.ones(len(once))))[0]


def dual_optimum(problem: StartProblem) -> float:
    """The optimum of the dual of [OLP] 3.2: min b^T p + sum of y, with a^T p + y_j >= r."""
    pairs, a = _matrix(problem)
    if not pairs:
        return 0.0
    n = len(problem.columns)
    y = np.array([[float(j == row) for row in range(n)] for j, _ in pairs])
    b = np.array([x for use in problem.capacity.values() for x in use])
    r = np.array([problem.rewards[pair] for pair in pairs])
    return _solve(np.append(b, np.ones(n)), -np.hstack([a.T, y]), -r)[0]


def saa_minimum(d: Tensor, choices: list[list[Recorded]]) -> float:
    """Minimise f_k(p) over p >= 0, eq. (6), as a linear program with one z per sample.

    Args:
        d: d_k.
        choices: for each sample the columns it may use; one for eq. (6), one per worker where the
            sample takes the cheapest worker (the max over g of the reduced dual).
    """
    n = len(choices)
    where = list(d)
    rows, limits = [], []
    for index, recorded in enumerate(choices):
        for r, g, a in recorded:
            prices = [x for w, slot in where for x in (a.get(slot, FREE) if w == g else FREE)]
            z = [float(index == other) for other in range(n)]
            rows.append([-x for x in (*prices, *z)])
            limits.append(-r)
    linear = np.array([x for use in d.values() for x in use])
    objective = np.append(linear, np.full(n, 1.0 / max(1, n)))
    return _solve(objective, np.array(rows), np.array(limits))[0]
