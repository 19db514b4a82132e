"""3 controller, the paper's policy: Algorithm 1 with prices by Algorithm 2, to the letter.

Periods are counted on one absolute axis, as in the paper; slots may be grouped into buckets. The
look-ahead rolls, or ends at a fixed T. Read forward.py for what the shipped variant does instead.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.control.assign import Candidates, admit
from service.control.columns import FloatArray, Horizon, PrefixPrices, Usage
from service.control.config import ControlConfig
from service.control.prices import History, PriceProblem, PriceSolution
from service.control.reward import StartTimes, largest_reward, start_reward
from service.control.room import working_residual
from service.control.view import Pair, View

NEVER_SCARCE = 1e12
"""Entry of d_k for KV capacity that is not known; finite, since 0 x inf is not a number."""


def kv_scale(kv_capacity_tokens: FloatArray) -> float:
    """mem_scale = 1 / max_g M_g, so that the two resources are commensurate ([OLP] B.2)."""
    finite = kv_capacity_tokens[np.isfinite(kv_capacity_tokens)]
    return 1.0 / float(finite.max()) if finite.size else 0.0


def scarcity(residual: Usage, expected_arrivals: float, scale: float) -> Usage:
    """d_k = remaining capacity / max(1, n^_remain), KV in normalised units.

    Source: [OLP] eq. (11). Unknown (infinite) KV capacity is never scarce: its entry is so large
    that no column can lift its price above zero.
    """
    share = 1.0 / max(1.0, expected_arrivals)
    kv = np.full_like(residual.kv, NEVER_SCARCE)
    # inf x 0 would be no number where no capacity is known at all.
    np.multiply(residual.kv, scale * share, out=kv, where=np.isfinite(residual.kv))
    return Usage(batch=np.maximum(residual.batch, 0.0) * share, kv=np.maximum(kv, 0.0))


class PublishedLp:
    """Action-history-dependent bid-price control ([OLP] Algorithm 1)."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._history = History(config.prices.history_max)
        self._clocked_s: float | None = None
        self._iterations = 0.0
        self._period = -1
        self._worker_ids: tuple[str, ...] = ()
        self._solution: PriceSolution | None = None
        self._refreshes = 0

    def decide(self, view: View) -> list[Pair]:
        """One period: price update (when inline), margins, record, greedy admission."""
        self._follow_fleet(view)
        origin, offset, period = self._clock(view)
        horizon = self._horizon(view, origin)
        view = replace(view, horizon=horizon)
        if self._config.prices.inline and period != self._period:
            problem = self.price_problem(view)
            if problem is not None:
                self.adopt(problem.solve())
        self._period = period
        prices = self._prices(view, origin)
        columns = view.columns(start=float(offset))
        rewards = self._rewards(view, period)
        scale = kv_scale(view.fleet.kv_capacity_tokens)
        per_token = Usage(batch=prices.batch, kv=prices.kv * scale)
        cost = PrefixPrices.of(per_token, horizon).cost_on_every_worker(columns)
        margin = np.where(view.waiting.allowed(), rewards[:, None] - cost, -np.inf)
        best = int(np.argmax(margin)) if margin.size else -1
        if best >= 0 and margin.flat[best] > -np.inf:
            row, worker = divmod(best, len(view.fleet))
            chosen = columns.on_worker(np.full(len(view.waiting), worker, dtype=np.int64))
            self._history.record(chosen, origin + offset, row, float(rewards[row]))
        workers = view.open_workers(engine_queue_empty=False)
        if not workers.size:
            return []
        residual = working_residual(view, workers, float(offset))
        candidates = Candidates(columns, margin[:, workers], view.waiting.order)
        return [(row, int(workers[place])) for row, place in admit(candidates, residual)]

    def price_problem(self, view: View) -> PriceProblem | None:
        """Snapshot f_k(p): what Algorithm 2 solves next."""
        if self._config.prices.zero or not len(view.fleet):
            return None
        self._follow_fleet(view)
        origin, offset, _ = self._clock(view)
        horizon = self._horizon(view, origin)
        view = replace(view, horizon=horizon)
        capacity, used = view.capacity(), view.occupancy(horizon, float(offset), None)
        residual = Usage(batch=capacity.batch - used.batch, kv=capacity.kv - used.kv)
        columns, rewards = self._history.columns(origin)
        scale = kv_scale(view.fleet.kv_capacity_tokens)
        self._refreshes += 1
        settings = self._config.prices
        return PriceProblem(
            horizon=horizon,
            scarcity=scarcity(residual, self.expected_arrivals(view), scale),
            columns=columns,
            rewards=rewards,
            warm=self._prices(view, origin),
            any_worker=False,
            steps=settings.steps,
            batch=settings.batch,
            step_size=settings.step_size,
            averaged=settings.averaged,
            seed=self._config.seed + self._refreshes,
            origin=origin,
            worker_ids=view.fleet.worker_ids,
            normalizer=self._normalizer(view),
            kv_scale=scale,
        )

    def adopt(self, solution: PriceSolution) -> None:
        """Use these prices from now on."""
        self._solution = solution

    def natural_prices(self, worker_ids: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
        """(g,) price of one batch slot and of one KV token for one iteration, mean over buckets."""
        if self._solution is None or self._solution.worker_ids != worker_ids:
            return np.zeros(len(worker_ids)), np.zeros(len(worker_ids))
        natural = self._solution.natural()
        q = self._config.bucket_iterations
        return natural.batch.mean(axis=1) / q, natural.kv.mean(axis=1) / q

    def expected_arrivals(self, view: View) -> float:
        """n^_remain: measured arrival rate x seconds left in the look-ahead, plus those waiting."""
        left_s = view.horizon.iterations * float(view.fleet.iteration_s.mean())
        return view.arrivals_per_s * left_s + len(view.waiting)

    def _follow_fleet(self, view: View) -> None:
        """Recorded columns name workers by index: a changed fleet makes them meaningless."""
        if view.fleet.worker_ids != self._worker_ids:
            self._history.forget_before(0)
            self._worker_ids = view.fleet.worker_ids

    def _clock(self, view: View) -> tuple[int, int, int]:
        """(left edge of the look-ahead, offset of now in it, period k), absolute iterations."""
        if self._clocked_s is not None:
            pace_s = float(view.fleet.iteration_s.mean())
            self._iterations += max(0.0, view.now_s - self._clocked_s) / pace_s
        self._clocked_s = view.now_s
        period = int(self._iterations + 1e-9)
        q = self._config.bucket_iterations
        origin = period - period % q
        return origin, period - origin, period

    def _horizon(self, view: View, origin: int) -> Horizon:
        q = self._config.bucket_iterations
        buckets = max(1, self._config.horizon_iterations // q)
        if self._config.fixed_horizon:
            buckets = max(1, buckets - origin // q)
        return Horizon(buckets, q)

    def _left(self, view: View, period: int) -> float:
        """T - k + 1: iterations left, this one included."""
        if self._config.fixed_horizon:
            return float(max(0, self._config.horizon_iterations - period))
        return float(self._config.horizon_iterations)

    def _rewards(self, view: View, period: int) -> FloatArray:
        """(n,) r^norm = min(r / normalizer, 1) ([OLP] B.2)."""
        pace_s = float(view.fleet.iteration_s.mean())
        weights = self._config.weights
        own = view.waiting.ttft_bound_s
        bound_s = np.where(np.isnan(own), weights.ttft_bound_s, own)
        times = StartTimes(
            waited=np.floor((view.now_s - view.waiting.arrival_s) / pace_s + 1e-9),
            decode_tokens=view.waiting.decode_tokens,
            left=self._left(view, period),
            e2e_bound=weights.e2e_bound_s / pace_s,
            ttft_bound=bound_s / pace_s,
        )
        reward = view.waiting.value * start_reward(weights, times)
        return np.minimum(reward / self._normalizer(view), 1.0)

    def _normalizer(self, view: View) -> float:
        chosen = self._config.prices.reward_normalizer
        return chosen or largest_reward(self._config.weights, self._config.horizon_iterations)

    def _prices(self, view: View, origin: int) -> Usage:
        """The current prices on the look-ahead that begins at `origin`; new slots are free."""
        workers, buckets = len(view.fleet), view.horizon.buckets
        solution = self._solution
        if solution is None or solution.worker_ids != view.fleet.worker_ids:
            return Usage.zeros(workers, view.horizon)
        passed = (origin - solution.origin) // self._config.bucket_iterations

        def rolled(values: FloatArray) -> FloatArray:
            kept = values[:, passed : passed + buckets]
            return np.pad(kept, ((0, 0), (0, buckets - kept.shape[1])))

        return Usage(batch=rolled(solution.prices.batch), kv=rolled(solution.prices.kv))
