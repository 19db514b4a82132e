"""3 controller, the paper's policy: Algorithm 1 with prices by Algorithm 2, to the letter.

Periods are counted on one absolute axis, as in the paper; slots may be grouped into buckets. With a
fixed T every vector lives on all T slots, those that have passed included, as in the paper.
Differs: a rolling look-ahead has no room for slots that have passed; a recorded column is priced on
what it still covers. Read forward.py for what the shipped variant does instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from service.control.assign import Candidates, admit
from service.control.columns import Columns, FloatArray, Horizon, Usage
from service.control.config import ControlConfig
from service.control.kernels.descent import scarce
from service.control.prices import History, PriceProblem, PriceSnapshot, PriceSolution
from service.control.pricing import expected_arrivals, mean, mean_prices, normalizer, waiting_reward
from service.control.rate import RateShift
from service.control.room import working_residual
from service.control.spans import PrefixPrices, Spans, total_usage
from service.control.view import Pair, View

NEVER_SCARCE = 1e12
"""Entry of d_k for KV capacity that is not known; finite, since 0 x inf is not a number."""


def kv_scale(kv_capacity_tokens: FloatArray) -> float:
    """mem_scale = 1 / max_g M_g, so that the two resources are commensurate ([OLP] B.2)."""
    most = float(kv_capacity_tokens.max(initial=0.0))
    if not math.isfinite(most):
        known = kv_capacity_tokens[np.isfinite(kv_capacity_tokens)]
        most = float(known.max(initial=0.0))
    return 1.0 / most if most else 0.0


def scarcity(residual: Usage, expected_arrivals: float, scale: float) -> Usage:
    """d_k = remaining capacity / max(1, n^_remain), KV in normalised units.

    Source: [OLP] eq. (11). Unknown (infinite) KV capacity is never scarce: its entry is so large
    that no column can lift its price above zero.
    """
    nothing = np.zeros(len(residual.batch))
    lacking = Usage(batch=-residual.batch, kv=-residual.kv)
    return scarcity_beside(Usage(batch=nothing, kv=nothing), lacking, expected_arrivals, scale)


def scarcity_beside(capacity: Usage, used: Usage, expected_arrivals: float, scale: float) -> Usage:
    """`scarcity` of (g, 1) capacity where (g, N) of it is used."""
    share = 1.0 / max(1.0, expected_arrivals)
    shape = used.batch.shape
    found = Usage(batch=np.empty(shape), kv=np.empty(shape))
    scarce(
        *(capacity.batch.ravel(), capacity.kv.ravel(), used.batch, used.kv),
        *(share, scale * share, NEVER_SCARCE),
        *(found.batch, found.kv),
    )
    return found


@dataclass(frozen=True, slots=True)
class _Moment:
    """Where a decision stands on the absolute axis of iterations.

    Attributes:
        period: k, counted from 0. origin: left edge of its bucket.
        ahead: the slots from `origin` on, which can still be used.
        first: left edge of the slots that have prices. priced: those slots.
    """

    period: int
    origin: int
    ahead: Horizon
    first: int
    priced: Horizon

    @property
    def passed(self) -> int:
        """Buckets that have a price and have passed."""
        return min((self.origin - self.first) // self.priced.bucket_iterations, self.priced.buckets)


class PublishedLp:
    """Action-history-dependent bid-price control ([OLP] Algorithm 1)."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._history = History(config.prices.history_max)
        self._clocked_s: float | None = None
        self._iterations = 0.0
        self._pace_s = 1.0
        self._period = -1
        self._worker_ids: tuple[str, ...] = ()
        self._solution: PriceSolution | None = None
        self._left_over: Usage | None = None
        self._refreshes = 0

    def decide(self, view: View) -> list[Pair]:
        """One period: price update (when inline), margins, record, greedy admission."""
        self._follow_fleet(view)
        moment = self._moment(view)
        view = replace(view, horizon=moment.ahead)
        if self._config.prices.inline and moment.period != self._period:
            problem = self.price_problem(view)
            if problem is not None:
                self.adopt(problem.solve())
        self._period = moment.period
        rewards = self._rewards(view, moment)
        margin = rewards[:, None] - self._cost(view, moment)
        margin = np.where(view.waiting.allowed(), margin, -np.inf)
        self._record(view, moment, margin, rewards)
        columns = view.columns(start=float(moment.period - moment.origin))
        pairs = self._admit(view, moment, columns, margin)
        if self._config.fixed_horizon:
            self._keep_left_over(view, moment, columns, pairs)
        return pairs

    def price_problem(self, view: View) -> PriceSnapshot | None:
        """Snapshot f_k(p): what Algorithm 2 solves next."""
        if self._config.prices.zero or not len(view.fleet):
            return None
        self._follow_fleet(view)
        moment, settings, fleet = self._moment(view), self._config.prices, view.fleet
        view = replace(view, horizon=moment.ahead)
        columns, rewards = self._history.columns(moment.first)
        self._refreshes += 1
        seed = self._config.seed + self._refreshes
        arrivals = expected_arrivals(view, mean(view.fleet.iteration_s))
        residual, warm = self._residual(view, moment), self._prices(view, moment)

        def problem() -> PriceProblem:
            scale = kv_scale(fleet.kv_capacity_tokens)
            return PriceProblem(
                horizon=moment.priced,
                scarcity=scarcity(residual(), arrivals, scale),
                columns=columns,
                rewards=rewards,
                warm=warm,
                any_worker=False,
                steps=settings.steps,
                batch=settings.batch,
                step_size=settings.step_size,
                averaged=settings.averaged,
                seed=seed,
                origin=moment.first,
                worker_ids=fleet.worker_ids,
                normalizer=normalizer(self._config),
                kv_scale=scale,
            )

        return PriceSnapshot(problem)

    def adopt(self, solution: PriceSolution) -> None:
        """Use these prices from now on."""
        self._solution = solution

    def follow_rise(self, shift: RateShift) -> None:
        """Drop the columns recorded before the arrival rate rose, and learn from what came since.

        Source: [OLP] section 4, robustness to non-stationary workloads, and B.2.
        """
        if self._clocked_s is not None:
            ago_s = max(0.0, self._clocked_s - shift.since_s)
            self._history.forget_started_before(self._iterations - ago_s / self._pace_s)

    def natural_prices(self, worker_ids: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
        """(g,) price of one batch slot and of one KV token for one iteration, mean over buckets."""
        return mean_prices(self._solution, worker_ids, self._config.bucket_iterations)

    def _follow_fleet(self, view: View) -> None:
        """Recorded columns name workers by index: a changed fleet makes them meaningless."""
        if view.fleet.worker_ids != self._worker_ids:
            self._history.forget_before(0)
            self._worker_ids = view.fleet.worker_ids

    def _moment(self, view: View) -> _Moment:
        """Count the iterations that passed since the last call, at the fleet's mean pace."""
        if self._clocked_s is not None:
            self._pace_s = float(view.fleet.iteration_s.mean())
            self._iterations += max(0.0, view.now_s - self._clocked_s) / self._pace_s
        self._clocked_s = view.now_s
        period = int(self._iterations + 1e-9)
        q = self._config.bucket_iterations
        origin = period - period % q
        whole = Horizon(max(1, self._config.horizon_iterations // q), q)
        if not self._config.fixed_horizon:
            return _Moment(period, origin, whole, origin, whole)
        return _Moment(period, origin, Horizon(max(1, whole.buckets - origin // q), q), 0, whole)

    def _cost(self, view: View, moment: _Moment) -> FloatArray:
        """(n, g) a^T p of starting each waiting request now."""
        prices, scale = self._prices(view, moment), kv_scale(view.fleet.kv_capacity_tokens)
        per_token = Usage(batch=prices.batch, kv=prices.kv * scale)
        columns = view.columns(start=float(moment.period - moment.first))
        spans = Spans.of(columns, moment.priced)
        return PrefixPrices.of(per_token, moment.priced).cost_on_every_worker(spans)

    def _record(self, view: View, moment: _Moment, margin: FloatArray, rewards: FloatArray) -> None:
        """Add the candidate with the largest margin to Hist; ties as in admission.

        Source: [OLP] Algorithm 1, line 9, and B.4.
        """
        best = margin.max(initial=-np.inf)
        if best == -np.inf:
            return
        rows, workers = np.nonzero(margin == best)
        first = np.lexsort((workers, view.waiting.order[rows]))[0]
        row, worker = int(rows[first]), int(workers[first])
        columns = view.columns().on_worker(np.full(len(view.waiting), worker, dtype=np.int64))
        self._history.record(columns, moment.period, row, float(rewards[row]))

    def _admit(
        self, view: View, moment: _Moment, columns: Columns, margin: FloatArray
    ) -> list[Pair]:
        """Lines 10-16 of Algorithm 1, on the workers where something can start."""
        workers = view.open_workers()
        if not workers.size:
            return []
        residual = working_residual(view, workers, float(moment.period - moment.origin))
        candidates = Candidates(columns, margin[:, workers], view.waiting.order)
        return [(row, int(workers[place])) for row, place in admit(candidates, residual)]

    def _residual(self, view: View, moment: _Moment) -> Callable[[], Usage]:
        """(g, N) b^(k-1) on the priced slots; of those that have passed, what was left of them."""
        capacity, kept, workers = view.capacity(), self._left_over, len(view.fleet)
        occupancy = view.frozen_occupancy(moment.ahead, float(moment.period - moment.origin))

        def residual() -> Usage:
            used, past = occupancy(), kept
            ahead = Usage(batch=capacity.batch - used.batch, kv=capacity.kv - used.kv)
            if not moment.passed:
                return ahead
            if past is None or len(past.batch) != workers:
                past = Usage(
                    batch=capacity.batch.repeat(moment.priced.buckets, axis=1),
                    kv=capacity.kv.repeat(moment.priced.buckets, axis=1),
                )
            return Usage(
                batch=_joined(past.batch, ahead.batch, moment),
                kv=_joined(past.kv, ahead.kv, moment),
            )

        return residual

    def _keep_left_over(
        self, view: View, moment: _Moment, columns: Columns, pairs: list[Pair]
    ) -> None:
        """Remember b^(k): a slot that has passed keeps its scarcity in every later d_k."""
        before = self._residual(view, moment)()
        rows, workers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        started = columns.take(rows).on_worker(workers)
        use = total_usage(started, moment.ahead, len(view.fleet))
        left = [before.batch.copy(), before.kv.copy()]
        for after, held in zip(left, (use.batch, use.kv), strict=True):
            after[:, moment.passed :] -= held[:, : after.shape[1] - moment.passed]
        self._left_over = Usage(batch=left[0], kv=left[1])

    def _left(self, moment: _Moment) -> float:
        """T - k + 1: iterations left, this one included."""
        if self._config.fixed_horizon:
            return float(max(0, self._config.horizon_iterations - moment.period))
        return float(self._config.horizon_iterations)

    def _rewards(self, view: View, moment: _Moment) -> FloatArray:
        """(n,) r^norm = min(r / normalizer, 1) ([OLP] B.2)."""
        pace_s = float(view.fleet.iteration_s.mean())
        waited = np.floor((view.now_s - view.waiting.arrival_s) / pace_s + 1e-9)
        reward = view.waiting.value * waiting_reward(
            view, self._config.weights, waited, self._left(moment), pace_s
        )
        return np.minimum(reward / normalizer(self._config), 1.0)

    def _prices(self, view: View, moment: _Moment) -> Usage:
        """The current prices on the priced slots; new ones are free."""
        workers, buckets = len(view.fleet), moment.priced.buckets
        solution = self._solution
        if solution is None or solution.worker_ids != view.fleet.worker_ids:
            return Usage.zeros(workers, moment.priced)
        passed = (moment.first - solution.origin) // self._config.bucket_iterations

        def rolled(values: FloatArray) -> FloatArray:
            kept = values[:, passed : passed + buckets]
            return np.pad(kept, ((0, 0), (0, buckets - kept.shape[1])))

        return Usage(batch=rolled(solution.prices.batch), kv=rolled(solution.prices.kv))


def _joined(past: FloatArray, future: FloatArray, moment: _Moment) -> FloatArray:
    """(g, N) slots that have passed, then those that can still be used."""
    return np.hstack([past[:, : moment.passed], future])[:, : moment.priced.buckets]
