"""3 controller, the shipped policy: bid prices that value the future, and a bounded wait.

What differs from the paper, and why (docs/decisions.md has the measurements):
- the look-ahead is relative to now and counted in iterations seen, so it cannot drift;
- recorded requests are re-timed as hypothetical arrivals over the look-ahead, so that the dual
  prices the capacity that future requests will want, not the slots that past ones had;
- rewards are normalised so that they never saturate;
- whoever waited its share of the backlog (aging.py) goes first, oldest first; if nothing fits, room
  is reserved on the worker that frees up soonest (later starts end before, or fit beside it).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.control.aging import AgeRule
from service.control.assign import Candidates, admit_balanced, preferred
from service.control.columns import Columns, FloatArray, IntArray, PrefixPrices, Usage
from service.control.config import ControlConfig
from service.control.prices import History, PriceProblem, PriceSolution
from service.control.published import kv_scale, scarcity
from service.control.rate import RateShift
from service.control.reward import StartTimes, largest_reward, start_reward
from service.control.room import Room
from service.control.view import Pair, View

RESERVATIONS_MAX = 2
"""Aged requests that fit nowhere and get room reserved, per tick; more would idle the fleet."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """Room reserved for an aged request: on which worker, and until when it may be kept waiting."""

    worker_id: str
    due_s: float


class ForwardLp:
    """Bid-price control with forward prices, an age bound and reservations."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._ageing = AgeRule(config)
        self._history = History(config.prices.history_max)
        self._promises: dict[int, _Promise] = {}
        self._last_recorded = 0
        self._solution: PriceSolution | None = None
        self._prefix: PrefixPrices | None = None
        self._refreshes = 0

    def decide(self, view: View) -> list[Pair]:
        """Aged requests first, then by reduced cost; everything fits on all its future slots."""
        columns, rewards = view.columns(), self._rewards(view)
        self._record(view, columns, rewards)
        bound_s = self._ageing.bound_s(view)
        workers = view.open_workers()
        if not workers.size:
            return []
        alone = self._start_alone(view, columns, rewards, workers)
        if alone is not None:
            return [alone]
        room = Room(view, workers)
        aged = _age_s(view) >= bound_s
        pairs = self._start_aged(view, columns, room, np.flatnonzero(aged))
        young = np.flatnonzero(~aged)
        if not young.size or not room.residual.has_slot().any():
            return pairs
        columns = columns.take(young)
        margin = rewards[young, None] - self._cost(view, columns, room.workers)
        allowed = view.waiting.allowed(room.workers)[young]
        candidates = Candidates(
            columns,
            np.where(allowed, margin, -np.inf),
            view.waiting.order[young],
            floor=-np.inf,
        )
        started = admit_balanced(
            candidates, room.residual, 1.0 / view.fleet.batch_limit[room.workers]
        )
        return pairs + [(int(young[row]), int(room.workers[worker])) for row, worker in started]

    def _start_alone(
        self, view: View, columns: Columns, rewards: FloatArray, workers: IntArray
    ) -> Pair | None:
        """Decide the case of light load without the calendar; None where it is needed.

        One request waits, no room is promised to anyone, and the worker that the whole decision
        would choose has room for it even if nobody there ever ends. The decision is the same, at
        a fraction of its time.
        """
        if len(view.waiting) != 1 or self._promises:
            return None
        free = view.fleet.batch_limit[workers] - view.fleet.outstanding[workers]
        allowed = view.waiting.allowed(workers)[0] & (free >= view.waiting.sequences[0])
        if not allowed.any():
            return None
        margin = np.where(allowed, rewards[0] - self._cost(view, columns, workers)[0], -np.inf)
        worker = int(workers[preferred(margin, (1.0 / view.fleet.batch_limit[workers]) * free)])
        spare = float(view.fleet.block_tokens[worker]) + view.horizon.bucket_iterations + 1.0
        one = float(columns.footprint[0] + columns.steps[0] + spare)
        held = view.kv_ceiling_tokens(worker, spare)
        room = float(view.fleet.kv_capacity_tokens[worker])
        return (0, worker) if held + float(columns.sequences[0]) * one <= room else None

    def price_problem(self, view: View) -> PriceProblem | None:
        """Snapshot the dual whose columns are hypothetical arrivals over the look-ahead."""
        if self._config.prices.zero or not len(view.fleet):
            return None
        settings = self._config.prices
        self._refreshes += 1
        rng = np.random.default_rng(self._config.seed + self._refreshes)
        columns, rewards = self._history.columns(0.0)
        retimed = Columns(
            worker=np.zeros(rewards.size, dtype=np.int64),
            start=rng.uniform(0.0, view.horizon.iterations, rewards.size).round(),
            steps=columns.steps,
            footprint=columns.footprint,
            sequences=columns.sequences,
        )
        capacity, used = view.capacity(), view.occupancy(view.horizon, 0.0, None)
        residual = Usage(batch=capacity.batch - used.batch, kv=capacity.kv - used.kv)
        scale = kv_scale(view.fleet.kv_capacity_tokens)
        return PriceProblem(
            horizon=view.horizon,
            scarcity=scarcity(residual, self.expected_arrivals(view), scale),
            columns=retimed,
            rewards=rewards,
            warm=self._prices(view),
            any_worker=True,
            steps=settings.steps,
            batch=settings.batch,
            step_size=settings.step_size,
            averaged=settings.averaged,
            seed=self._config.seed + self._refreshes,
            origin=0,
            worker_ids=view.fleet.worker_ids,
            normalizer=self._normalizer(),
            kv_scale=scale,
        )

    def adopt(self, solution: PriceSolution) -> None:
        """Use these prices from now on."""
        self._solution = solution
        self._prefix = None

    def follow_rise(self, shift: RateShift) -> None:
        """Learn from what came since the arrival rate rose: the mix may be another, too."""
        self._history.forget_before(shift.arrivals)

    def natural_prices(self, worker_ids: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
        """(g,) price of one batch slot and of one KV token for one iteration, mean over buckets."""
        if self._solution is None or self._solution.worker_ids != worker_ids:
            return np.zeros(len(worker_ids)), np.zeros(len(worker_ids))
        natural = self._solution.natural()
        q = self._config.bucket_iterations
        return natural.batch.mean(axis=1) / q, natural.kv.mean(axis=1) / q

    def expected_arrivals(self, view: View) -> float:
        """n^_remain: arrivals over the look-ahead at the measured rate, plus those waiting."""
        left_s = view.horizon.iterations * float(view.fleet.iteration_s.mean())
        return view.arrivals_per_s * left_s + len(view.waiting)

    def _start_aged(self, view: View, columns: Columns, room: Room, rows: np.ndarray) -> list[Pair]:
        """Start aged requests, oldest first; reserve room for the first few that fit nowhere."""
        self._keep_promises(view.waiting.order[rows])
        pairs: list[Pair] = []
        reserved = 0
        oldest_first = rows[np.lexsort((view.waiting.order[rows], -_age_s(view)[rows]))]
        for place, row in enumerate(oldest_first.tolist()):
            if not room.residual.has_slot().any():
                break
            reach = view.waiting.reach[view.waiting.kind[row]]
            fits = room.residual.fits(columns.take(np.array([row])))[0] & reach[room.workers]
            if fits.any():
                free = room.residual.batch[:, 0] / view.fleet.batch_limit[room.workers]
                worker = int(np.argmax(np.where(fits, free, -np.inf)))
                room.start(columns, row, worker)
                pairs.append((row, int(room.workers[worker])))
            elif reserved < RESERVATIONS_MAX:
                reserved += self._reserve(view, columns, room, row)
            else:
                return pairs + self._start_beside(view, columns, room, oldest_first[place:])
        return pairs

    def _start_beside(self, view: View, columns: Columns, room: Room, rows: IntArray) -> list[Pair]:
        """Start those aged requests, oldest first, that fit beside what is reserved."""
        allowed = view.waiting.allowed(room.workers)[rows]
        age = _age_s(view)[rows]
        candidates = Candidates(
            columns.take(rows),
            np.where(allowed, age[:, None], -np.inf),
            view.waiting.order[rows],
            floor=-np.inf,
        )
        started = admit_balanced(
            candidates, room.residual, 1.0 / view.fleet.batch_limit[room.workers]
        )
        return [(int(rows[row]), int(room.workers[worker])) for row, worker in started]

    def _reserve(self, view: View, columns: Columns, room: Room, row: int) -> bool:
        """Reserve room for an aged request, never later than it was promised before."""
        fleet, order = view.fleet, int(view.waiting.order[row])
        reach = view.waiting.reach[view.waiting.kind[row]]
        bucket_s = view.horizon.bucket_iterations * fleet.iteration_s
        promise, promised = self._promises.get(order), None
        if promise is not None and promise.worker_id in fleet.worker_ids:
            worker = fleet.worker_ids.index(promise.worker_id)
            left = max(0.0, promise.due_s - view.now_s) / bucket_s[worker]
            if reach[worker]:
                promised = (worker, int(min(left, view.horizon.buckets - 1)))
        found = room.reserve(columns, row, reach, promised)
        if found is not None and found != promised:
            worker, shift = found
            due_s = view.now_s + shift * float(bucket_s[worker])
            self._promises[order] = _Promise(fleet.worker_ids[worker], due_s)
        return found is not None

    def _keep_promises(self, aged: IntArray) -> None:
        """Forget what was promised to those who are not waiting any more."""
        if self._promises:
            waiting = set(aged.tolist())
            self._promises = {o: p for o, p in self._promises.items() if o in waiting}

    def _cost(self, view: View, columns: Columns, workers: IntArray) -> FloatArray:
        """(n, w) cost of starting each column on some workers; prices are summed once."""
        solution = self._solution
        if solution is None or solution.worker_ids != view.fleet.worker_ids:
            return np.zeros((columns.start.size, workers.size))
        if self._prefix is None or self._prefix.horizon != view.horizon:
            prices = solution.prices
            per_token = Usage(batch=prices.batch, kv=prices.kv * solution.kv_scale)
            self._prefix = PrefixPrices.of(per_token, view.horizon)
        return self._prefix.of_workers(workers).cost_on_every_worker(columns)

    def _record(self, view: View, columns: Columns, rewards: FloatArray) -> None:
        """Remember every request once, the first time a decision sees it."""
        new = np.flatnonzero(view.waiting.order > self._last_recorded)
        if new.size:
            self._history.extend(columns.take(new), 0.0, rewards[new])
            self._last_recorded = int(view.waiting.order[new].max())

    def _rewards(self, view: View) -> FloatArray:
        """(n,) normalised rewards of starting now."""
        pace_s = float(view.fleet.iteration_s.mean()) if len(view.fleet) else 1.0
        weights = self._config.weights
        ttft_s, e2e_s = view.waiting.ttft_bound_s, view.waiting.e2e_bound_s
        ttft_bound_s = np.where(np.isnan(ttft_s), weights.ttft_bound_s, ttft_s)
        e2e_bound_s = np.where(np.isnan(e2e_s), weights.e2e_bound_s, e2e_s)
        times = StartTimes(
            waited=(view.now_s - view.waiting.arrival_s) / pace_s,
            decode_tokens=view.waiting.decode_tokens,
            left=float(view.horizon.iterations),
            e2e_bound=e2e_bound_s / pace_s,
            ttft_bound=ttft_bound_s / pace_s,
        )
        value = view.waiting.value * view.waiting.discount
        return value * start_reward(weights, times) / self._normalizer()

    def _normalizer(self) -> float:
        chosen = self._config.prices.reward_normalizer
        return chosen or largest_reward(self._config.weights, self._config.horizon_iterations)

    def _prices(self, view: View) -> Usage:
        solution = self._solution
        if solution is None or solution.worker_ids != view.fleet.worker_ids:
            return Usage.zeros(len(view.fleet), view.horizon)
        return solution.prices


def _age_s(view: View) -> FloatArray:
    """(n,) seconds waited; those of a tenant over its share count less."""
    return (view.now_s - view.waiting.arrival_s) * view.waiting.discount
