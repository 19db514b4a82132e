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

import numpy as np

from service.control.aged import AgedStarts
from service.control.aging import LARGE_SHARE, Ageing, AgeRule
from service.control.assign import NO_LIMIT, Asking, Offer, admit_priced, levelled, preferred
from service.control.columns import (
    BoolArray,
    Columns,
    FloatArray,
    Horizon,
    IntArray,
    Usage,
)
from service.control.config import ControlConfig
from service.control.delay import Delay, Waits
from service.control.kernels.queue import weigh
from service.control.prices import (
    SPARE_WORDS,
    History,
    PriceProblem,
    PriceSnapshot,
    PriceSolution,
    PriceSums,
    random_starts,
)
from service.control.pricing import Kept, expected_arrivals, mean, mean_prices, normalizer
from service.control.published import kv_scale, scarcity_beside
from service.control.rate import RateShift
from service.control.room import Room
from service.control.standing import Settled, Standing
from service.control.sway import sway
from service.control.tiers import TIERS_MAX, SeenArrivals, levels, startable, tiers
from service.control.view import FleetView, Pair, View

OVERDUE_SHARE = 0.25
"""Starts of lower tiers' requests that waited age_bound_s, for each start of the others."""
OVERDUE_CREDIT_MAX = 8.0


class ForwardLp:
    """Bid-price control with forward prices, an age bound and reservations."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._normalizer = normalizer(config)
        self._ageing = AgeRule(config)
        self._history = History(config.prices.history_max)
        self._seen = SeenArrivals(config.prices.history_max)
        self._aged = AgedStarts()
        self._overdue_credit = 1.0
        self._last_recorded = 0
        # Room for rows, whose contents are of one decision.
        self._new: IntArray = np.empty(0, dtype=np.int64)
        self._standing = Standing(config)
        self._solution: PriceSolution | None = None
        self._sums: PriceSums | None = None
        self._refreshes = 0
        self._iteration_s = Kept(mean)
        self._kv_scale = Kept(kv_scale)

    def decide(self, view: View) -> list[Pair]:
        """Higher tiers first; in a tier aged requests, then by reduced cost.

        Everything fits on all its future slots, and leaves the slots that are worth more to the
        higher tiers' next arrivals.
        """
        self._sum_prices(view)
        settled = self._standing.look(view, None if self._sums is None else self._sums.cheapest)
        waiting, prompt_steps = view.waiting, view.prompt_steps()
        columns, worth = settled.columns, settled.worth
        rewards = self._weigh(view, settled, prompt_steps)
        tier = tiers(waiting.value * waiting.discount) if waiting.shared else worth
        large = self._seen.largest(LARGE_SHARE, prompt_steps)
        highest_first = levels(tier)
        asked = Ageing(tier, highest_first, settled.steps, prompt_steps, large)
        aged = self._ageing.aged(view, asked)
        workers = view.open_workers()
        if not workers.size:
            return []
        alone = self._start_alone(view, columns, rewards, workers)
        if alone is not None:
            return [alone]
        room = Room(view, workers)
        room.sway = sway(view, self._config, workers, self._normalizer)
        if self._aged.promised:
            self._aged.forget_all_but(waiting.order[aged])
        group = worth
        if waiting.shared:
            group = tier * TIERS_MAX + worth
            highest_first = levels(group)
        one_tier = len(highest_first) == 1
        pairs = self._start_overdue(view, columns, room, None if one_tier else tier)
        gone = {row for row, _ in pairs}
        for level in highest_first:
            if room.residual.is_full():
                break
            here = None if one_tier else group == level
            first = 0 if here is None else int(here.argmax())
            most = self._startable(view, int(worth[first]), [row for row, _ in pairs])
            old, young = _parted(aged, here, gone)
            started = self._aged.start(view, columns, room, old, most)
            pairs += started
            if len(started) >= most or room.residual.is_full():
                continue
            asking = Asking(
                columns=columns,
                rewards=rewards,
                least_cost=settled.cost,
                asks=young,
                order=waiting.order,
                kind=waiting.kind,
                prompt=waiting.prompt_tokens,
                most=most - len(started),
            )
            pairs += self._start_young(view, asking, room)
        self._overdue_credit += OVERDUE_SHARE * (len(pairs) - len(gone))
        return pairs

    def _start_overdue(
        self, view: View, columns: Columns, room: Room, tier: IntArray | None
    ) -> list[Pair]:
        """Give requests of lower tiers that waited age_bound_s their share of all starts.

        With one tier, None, there are no lower ones.
        """
        bound_s = self._config.age_bound_s
        late = None
        if bound_s > 0 and tier is not None:
            late = (view.age_s() >= bound_s) & (tier < tier.max(initial=0))
        if late is None or not late.any():
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
        if self._config.prices.zero:
            return NO_LIMIT
        if view.waiting.shared and (view.waiting.discount < 1.0).any():
            return NO_LIMIT
        return startable(view, self._config.weights, self._seen, tier, gone)

    def _start_young(self, view: View, asking: Asking, room: Room) -> list[Pair]:
        """Start by decreasing reduced cost whatever fits."""
        started = admit_priced(asking, self._offer(view, room), room.residual)
        if room.sway is not None and view.cached is not None:
            for row, worker, other in started:
                room.sway.started(worker)
                view.cached.unswayed[row] = int(room.workers[other])
        return [(row, int(room.workers[worker])) for row, worker, _ in started]

    def _offer(self, view: View, room: Room) -> Offer:
        """What the open workers offer, with prices, waits for prompts, and caches."""
        prices = None if self._sums is None else self._sums.per_token
        waits = Waits.of(view, self._config, room.workers)
        return room.offer(prices, waits, swayed=True)

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
        if self._startable(view, int(tiers(view.waiting.value[:1])[0]), []) < 1:
            return None
        free = view.fleet.batch_limit[workers] - view.fleet.outstanding[workers]
        allowed = view.waiting.allowed(workers)[0] & (free >= view.waiting.sequences[0])
        if not allowed.any():
            return None
        margin = rewards[:1, None] - self._cost(columns, workers)[:1]
        margin = levelled(np.where(allowed, margin, -np.inf))[0]
        liking = (1.0 / view.fleet.batch_limit[workers]) * free
        delay = Delay.of(view, self._config, np.zeros(1, dtype=np.int64), workers)
        delayed = margin if delay is None else margin - delay.cost[0]
        worker = int(workers[preferred(delayed, liking)])
        if view.cached is not None:
            view.cached.unswayed[0] = worker
            swayed = sway(view, self._config, workers, self._normalizer)
            if swayed is not None:
                worker = int(workers[preferred(margin + swayed.reward[0], liking)])
        spare = float(view.fleet.block_tokens[worker]) + view.horizon.bucket_iterations + 1.0
        one = float(columns.footprint[0] + columns.steps[0] + spare)
        held = view.kv_ceiling_tokens(worker, spare)
        room = float(view.fleet.kv_capacity_tokens[worker])
        return (0, worker) if held + float(columns.sequences[0]) * one <= room else None

    def price_problem(self, view: View) -> PriceSnapshot | None:
        """Snapshot the dual whose columns are hypothetical arrivals over the look-ahead."""
        if self._config.prices.zero or not len(view.fleet):
            return None
        settings, fleet, horizon = self._config.prices, view.fleet, view.horizon
        self._refreshes += 1
        seed = self._config.seed + self._refreshes
        recorded, count = self._history.whenever(), len(self._history)
        capacity, warm, scale = (
            view.capacity(),
            self._solution,
            self._kv_scale.of(fleet.kv_capacity_tokens),
        )
        arrivals = expected_arrivals(view, self._iteration_s.of(fleet.iteration_s))
        occupancy = view.frozen_occupancy(horizon, 0.0)

        def problem() -> PriceProblem:
            drawn = max(count, settings.steps * settings.batch + SPARE_WORDS)
            # Re-timed: anywhere on the look-ahead, all alike.
            words, starts = random_starts(seed, drawn, count, float(horizon.iterations))
            columns, rewards = recorded(starts)
            return PriceProblem(
                horizon=horizon,
                scarcity=scarcity_beside(capacity, occupancy(), arrivals, scale),
                columns=columns,
                rewards=rewards,
                warm=_prices(warm, fleet, horizon),
                any_worker=True,
                steps=settings.steps,
                batch=settings.batch,
                step_size=settings.step_size,
                averaged=settings.averaged,
                seed=seed,
                words=words,
                origin=0,
                worker_ids=fleet.worker_ids,
                normalizer=self._normalizer,
                kv_scale=scale,
            )

        return PriceSnapshot(problem)

    def adopt(self, solution: PriceSolution) -> None:
        """Use these prices from now on."""
        self._solution = solution

    def follow_rise(self, shift: RateShift) -> None:
        """Learn from what came since the arrival rate rose: the mix may be another, too."""
        self._history.forget_before(shift.arrivals)

    def natural_prices(self, worker_ids: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
        """(g,) price of one batch slot and of one KV token for one iteration, mean over buckets."""
        return mean_prices(self._solution, worker_ids, self._config.bucket_iterations)

    def _sum_prices(self, view: View) -> None:
        """Take the sums of new prices; none of prices for another fleet."""
        solution = self._solution
        if solution is None or solution.worker_ids != view.fleet.worker_ids:
            self._sums = None
        elif self._sums is None or self._sums.prices is not solution.prices:
            sums = solution.sums
            if sums is None or sums.prices is not solution.prices:
                sums = PriceSums.of(solution.prices, solution.kv_scale, view.horizon)
            self._sums = sums

    def _cost(self, columns: Columns, workers: IntArray) -> FloatArray:
        """(n, w) cost of starting each column on some workers."""
        if self._sums is None:
            return np.zeros((columns.start.size, workers.size))
        return self._sums.of_workers(workers).cost_of_starts(columns)

    def _weigh(self, view: View, settled: Settled, prompt_steps: float) -> FloatArray:
        """(n,) normalised rewards of starting now, from those of [OLP] 3.1.

        Differs: [OLP] 3.1 counts a prefill as one iteration. Here the end-to-end time that it costs
        everybody on the worker is taken off, or long prompts with short answers go first. What is
        left may be below 0; a value then divides it, so that more of it is better there as well.

        Every request is remembered once, the first time a decision sees it.
        """
        waiting, weights = view.waiting, self._config.weights
        rewards, new = np.empty(len(waiting)), self._new
        if rewards.size > new.size:
            new = self._new = np.empty(2 * rewards.size, dtype=np.int64)
        found = weigh(
            waiting.order,
            waiting.prompt_tokens,
            waiting.value,
            waiting.discount,
            settled.rewards,
            waiting.shared,
            prompt_steps,
            weights.e2e + weights.throughput,
            self._normalizer,
            self._last_recorded,
            rewards,
            new,
        )
        if found:
            rows = new[:found]
            self._seen.extend(view, rows, settled.worth)
            self._history.extend(settled.columns, 0.0, rows, rewards)
            self._last_recorded = max(waiting.order[rows].tolist())
        return rewards


def _prices(solution: PriceSolution | None, fleet: FleetView, horizon: Horizon) -> Usage:
    """(g, N) prices to go on from; nothing costs anything where they are of another fleet."""
    if solution is None or solution.worker_ids != fleet.worker_ids:
        return Usage.zeros(len(fleet), horizon)
    return solution.prices


def _parted(aged: BoolArray, here: BoolArray | None, gone: set[int]) -> tuple[IntArray, BoolArray]:
    """Aged rows, and (n,) who else asks, of those that are `here` (None for all) and not gone."""
    young = ~aged if here is None else here & ~aged
    old = (aged if here is None else here & aged).nonzero()[0]
    if gone:
        left = list(gone)
        young[left] = False
        old = old[~np.isin(old, left)]
    return old, young
