"""3 controller, the shipped policy: bid prices that value the future, and a bounded wait.

What differs from the paper, and why (docs/decisions.md has the measurements):
- the look-ahead is relative to now and counted in iterations seen, so it cannot drift;
- recorded requests are re-timed as hypothetical arrivals over the look-ahead, so that the dual
  prices the capacity that future requests will want, not the slots that past ones had;
- rewards are normalised so that they never saturate;
- whoever waited its share of the backlog (aging.py) goes first, oldest first; if nothing fits, room
  is reserved on the worker that frees up soonest (aged.py; later starts end before, or fit beside);
- requests of a higher tier of value go before, and slots that their next arrivals will want are
  priced and kept for them (tiers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.control.aged import AgedStarts
from service.control.aging import LARGE_SHARE, AgeRule
from service.control.assign import NO_LIMIT, Candidates, admit_balanced, levelled, preferred
from service.control.columns import (
    Columns,
    FloatArray,
    IntArray,
    PrefixPrices,
    Usage,
    service_steps,
)
from service.control.config import ControlConfig
from service.control.prices import History, PriceProblem, PriceSolution
from service.control.pricing import expected_arrivals, mean_prices, normalizer, waiting_reward
from service.control.published import kv_scale, scarcity
from service.control.rate import RateShift
from service.control.room import Room
from service.control.sway import sway, unswayed
from service.control.tiers import TIERS_MAX, SeenArrivals, startable, tiers
from service.control.view import Pair, View

OVERDUE_SHARE = 0.25
"""Starts of lower tiers' requests that waited age_bound_s, for each start of the others."""
OVERDUE_CREDIT_MAX = 8.0


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    """Waiting rows that ask for a start, with everybody's columns and rewards, and how many may."""

    columns: Columns
    rewards: FloatArray
    rows: IntArray
    most: int


class ForwardLp:
    """Bid-price control with forward prices, an age bound and reservations."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._ageing = AgeRule(config)
        self._history = History(config.prices.history_max)
        self._seen = SeenArrivals(config.prices.history_max)
        self._aged = AgedStarts()
        self._overdue_credit = 1.0
        self._last_recorded = 0
        self._solution: PriceSolution | None = None
        self._prefix: PrefixPrices | None = None
        self._refreshes = 0

    def decide(self, view: View) -> list[Pair]:
        """Higher tiers first; in a tier aged requests, then by reduced cost.

        Everything fits on all its future slots, and leaves the slots that are worth more to the
        higher tiers' next arrivals.
        """
        prompt_steps = view.prompt_steps()
        held_up = prompt_steps * view.waiting.prompt_tokens
        columns, rewards = view.columns(), self._rewards(view, held_up)
        self._record(view, columns, rewards)
        tier = tiers(view.waiting.value * view.waiting.discount)
        work = service_steps(view.kernel, view.waiting.decode_tokens) + held_up
        large = self._seen.largest(LARGE_SHARE, prompt_steps)
        aged = view.age_s() >= self._ageing.bound_s(view, tier, work, large)
        workers = view.open_workers()
        if not workers.size:
            return []
        alone = self._start_alone(view, columns, rewards, workers)
        if alone is not None:
            return [alone]
        room = Room(view, workers)
        room.sway = sway(view, self._config, workers, normalizer(self._config))
        self._aged.forget_all_but(view.waiting.order[aged])
        pairs = self._start_overdue(view, columns, room, tier)
        gone = {row for row, _ in pairs}
        worth = tiers(view.waiting.value)
        group = tier * TIERS_MAX + worth
        for level in np.unique(group)[::-1].tolist():
            if not room.residual.has_slot().any():
                break
            rows = np.flatnonzero(group == level)
            most = self._startable(view, int(worth[rows[0]]), [row for row, _ in pairs])
            rows = rows if not gone else rows[~np.isin(rows, list(gone))]
            started = self._aged.start(view, columns, room, rows[aged[rows]], most)
            asking = _Asking(columns, rewards, rows[~aged[rows]], most - len(started))
            pairs += started + self._start_young(view, asking, room)
        self._overdue_credit += OVERDUE_SHARE * (len(pairs) - len(gone))
        return pairs

    def _start_overdue(
        self, view: View, columns: Columns, room: Room, tier: IntArray
    ) -> list[Pair]:
        """Give requests of lower tiers that waited age_bound_s their share of all starts."""
        bound_s = self._config.age_bound_s
        late = (view.age_s() >= bound_s) & (tier < tier.max(initial=0))
        if bound_s == 0 or not late.any():
            self._overdue_credit = 1.0
            return []
        self._overdue_credit = min(self._overdue_credit, OVERDUE_CREDIT_MAX)
        most = int(self._overdue_credit)
        pairs = self._aged.start(view, columns, room, np.flatnonzero(late), most) if most else []
        self._overdue_credit -= len(pairs)
        return pairs

    def _startable(self, view: View, tier: int, gone: list[int]) -> int:
        """How many requests of a tier of value may start now.

        Where tenants share by weight a value says nothing across them, and nothing is kept.
        """
        if self._config.prices.zero or (view.waiting.discount < 1.0).any():
            return NO_LIMIT
        return startable(view, self._config.weights, self._seen, tier, gone)

    def _start_young(self, view: View, asking: _Asking, room: Room) -> list[Pair]:
        """Start by decreasing reduced cost whatever fits."""
        rows = asking.rows
        if asking.most <= 0 or not rows.size or not room.residual.has_slot().any():
            return []
        columns = asking.columns.take(rows)
        margin = asking.rewards[rows, None] - self._cost(view, columns, room.workers)
        allowed = view.waiting.allowed(room.workers)[rows]
        liking = 1.0 / view.fleet.batch_limit[room.workers]
        margin = levelled(np.where(allowed, margin, -np.inf))
        plain, free, toll = margin, room.residual.batch[:, 0].copy(), None
        if room.sway is not None:
            margin, toll = margin + room.sway.reward[rows], room.sway.toll[rows]
        candidates = Candidates(
            columns,
            margin,
            view.waiting.order[rows],
            floor=-np.inf,
            most=asking.most,
            toll=toll,
        )
        started = admit_balanced(candidates, room.residual, liking)
        if room.sway is not None and view.cached is not None:
            without = unswayed(started, plain, liking, free)
            for (row, worker), other in zip(started, without, strict=True):
                room.sway.started(worker)
                view.cached.unswayed[int(rows[row])] = int(room.workers[other])
        return [(int(rows[row]), int(room.workers[worker])) for row, worker in started]

    def _start_alone(
        self, view: View, columns: Columns, rewards: FloatArray, workers: IntArray
    ) -> Pair | None:
        """Decide the case of light load without the calendar; None where it is needed.

        One request waits, no room is promised to anyone, and the worker that the whole decision
        would choose has room for it even if nobody there ever ends. The decision is the same, at
        a fraction of its time.
        """
        if len(view.waiting) != 1 or self._aged.promised:
            return None
        if self._startable(view, int(tiers(view.waiting.value)[0]), []) < 1:
            return None
        free = view.fleet.batch_limit[workers] - view.fleet.outstanding[workers]
        allowed = view.waiting.allowed(workers)[0] & (free >= view.waiting.sequences[0])
        if not allowed.any():
            return None
        margin = rewards[:1, None] - self._cost(view, columns, workers)[:1]
        margin = levelled(np.where(allowed, margin, -np.inf))[0]
        liking = (1.0 / view.fleet.batch_limit[workers]) * free
        worker = int(workers[preferred(margin, liking)])
        if view.cached is not None:
            view.cached.unswayed[0] = worker
            swayed = sway(view, self._config, workers, normalizer(self._config))
            if swayed is not None:
                worker = int(workers[preferred(margin + swayed.reward[0], liking)])
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
            scarcity=scarcity(residual, expected_arrivals(view), scale),
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
            normalizer=normalizer(self._config),
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
        return mean_prices(self._solution, worker_ids, self._config.bucket_iterations)

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
            self._history.extend(columns.take(new), 0.0, np.maximum(rewards[new], 0.0))
            self._seen.extend(view, new)
            self._last_recorded = int(view.waiting.order[new].max())

    def _rewards(self, view: View, held_up: FloatArray) -> FloatArray:
        """(n,) normalised rewards of starting now.

        Differs: [OLP] 3.1 counts a prefill as one iteration. Here the end-to-end time that it costs
        everybody on the worker is taken off, or long prompts with short answers go first.
        """
        pace_s = float(view.fleet.iteration_s.mean()) if len(view.fleet) else 1.0
        waited = (view.now_s - view.waiting.arrival_s) / pace_s
        value = view.waiting.value * view.waiting.discount
        left = float(view.horizon.iterations)
        weights = self._config.weights
        reward = waiting_reward(view, weights, waited, left, pace_s)
        reward -= (weights.e2e + weights.throughput) * held_up
        return value * reward / normalizer(self._config)

    def _prices(self, view: View) -> Usage:
        solution = self._solution
        if solution is None or solution.worker_ids != view.fleet.worker_ids:
            return Usage.zeros(len(view.fleet), view.horizon)
        return solution.prices
