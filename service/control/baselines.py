"""3 controller, the rules we compare with: four that push at once, two that hold centrally.

The pushing rules release every request on arrival to the chosen worker's own queue, as routers do
today. The central ones release only what fits a worker on all its future slots.
"""

from __future__ import annotations

import numpy as np

from service.control.assign import Candidates, admit_balanced
from service.control.columns import IntArray
from service.control.room import working_residual
from service.control.view import Pair, Unpriced, View


def arrival_order(view: View) -> IntArray:
    """Rows by arrival, earliest first."""
    return np.argsort(view.waiting.order, kind="stable")


class RoundRobin(Unpriced):
    """Workers in turn, whatever their state."""

    def __init__(self) -> None:
        self._turn = 0

    def decide(self, view: View) -> list[Pair]:
        """Give every request to the next worker that is allowed for it."""
        pairs: list[Pair] = []
        reach = view.waiting.allowed()
        for row in arrival_order(view).tolist():
            allowed = np.flatnonzero(reach[row])
            if allowed.size:
                later = allowed[allowed >= self._turn]
                worker = int(later[0] if later.size else allowed[0])
                self._turn = (worker + 1) % len(view.fleet)
                pairs.append((row, worker))
        return pairs


class Random(Unpriced):
    """A worker at random."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def decide(self, view: View) -> list[Pair]:
        """Give every request to a random allowed worker."""
        pairs: list[Pair] = []
        reach = view.waiting.allowed()
        for row in arrival_order(view).tolist():
            allowed = np.flatnonzero(reach[row])
            if allowed.size:
                pairs.append((row, int(self._rng.choice(allowed))))
        return pairs


class LeastOutstanding(Unpriced):
    """The worker with the fewest outstanding requests; the lowest index wins ties."""

    def decide(self, view: View) -> list[Pair]:
        """Give every request to the least loaded allowed worker, counting this tick's own."""
        load = view.fleet.outstanding.copy()
        pairs: list[Pair] = []
        reach = view.waiting.allowed()
        for row in arrival_order(view).tolist():
            allowed = reach[row]
            if allowed.any():
                worker = int(np.argmin(np.where(allowed, load, np.inf)))
                load[worker] += view.waiting.sequences[row]
                pairs.append((row, worker))
        return pairs


class PowerOfTwo(Unpriced):
    """Two workers at random, then the one with fewer outstanding requests."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def decide(self, view: View) -> list[Pair]:
        """Give every request to the less loaded of two random allowed workers."""
        load = view.fleet.outstanding.copy()
        pairs: list[Pair] = []
        reach = view.waiting.allowed()
        for row in arrival_order(view).tolist():
            allowed = np.flatnonzero(reach[row])
            if allowed.size:
                two = self._rng.choice(allowed, size=min(2, allowed.size), replace=False)
                worker = int(two[np.argmin(load[two])])
                load[worker] += view.waiting.sequences[row]
                pairs.append((row, worker))
        return pairs


class CentralFcfs(Unpriced):
    """One queue, first come first served; a head that fits nowhere blocks the rest."""

    def decide(self, view: View) -> list[Pair]:
        """Start requests in order of arrival until one does not fit."""
        workers = view.open_workers()
        if not workers.size:
            return []
        residual = working_residual(view, workers)
        columns = view.columns()
        allowed = view.waiting.allowed(workers)
        anywhere = np.asarray(view.waiting.reach.any(axis=1))[view.waiting.kind]
        pairs: list[Pair] = []
        for row in arrival_order(view).tolist():
            if not anywhere[row]:
                continue
            fits = residual.fits(columns.take(np.array([row])))[0] & allowed[row]
            if not fits.any():
                break
            free = residual.batch[:, 0] / view.fleet.batch_limit[workers]
            worker = int(np.argmax(np.where(fits, free, -np.inf)))
            residual.subtract(columns, row, worker)
            pairs.append((row, int(workers[worker])))
        return pairs


class CentralShortestFirst(Unpriced):
    """One queue, shortest predicted decode first; whoever waited the age bound goes before."""

    def __init__(self, age_bound_s: float) -> None:
        self._age_bound_s = age_bound_s

    def decide(self, view: View) -> list[Pair]:
        """Start the shortest requests that fit; aged ones first, oldest first."""
        workers = view.open_workers()
        if not workers.size:
            return []
        waiting = view.waiting
        score = -waiting.decode_tokens
        if self._age_bound_s > 0:
            age_s = view.now_s - waiting.arrival_s
            score = np.where(age_s >= self._age_bound_s, age_s, score)
        margin = np.where(waiting.allowed(workers), score[:, None], -np.inf)
        candidates = Candidates(view.columns(), margin, waiting.order, floor=-np.inf)
        residual = working_residual(view, workers)
        pairs = admit_balanced(candidates, residual, 1.0 / view.fleet.batch_limit[workers])
        return [(row, int(workers[worker])) for row, worker in pairs]
