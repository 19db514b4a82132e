"""Whole runs of the published variant against Algorithms 1 and 2 in loops, [OLP] appendix B.

Both see the same arrivals, forecasts and ends; every start, its order and every price must agree in
every period. One period is one second and one iteration; buckets and KV blocks have size one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from service.control import (
    Arrived,
    ControlConfig,
    Kernel,
    Left,
    Outcome,
    PriceConfig,
    Progressed,
    Request,
    Router,
    Start,
    Variant,
    Weights,
    WorkerJoined,
    WorkerSpec,
)
from service.control.columns import Usage
from service.control.published import PublishedLp
from service.control.view import Pair, View
from tests.control.naive_olp import FREE, NaiveAlgorithm1, NaiveRequest, NaiveWeights, Tensor

LATENCY = NaiveWeights(beta=1.0, gamma=1.0)
PRICE_TOLERANCE = 1e-9
SATURATING = 40.0
"""A reward normaliser that many rewards exceed, as in the paper's own settings."""


@dataclass(frozen=True)
class Setting:
    """One run: the operator's choices, the fleet and the load."""

    kernel: Kernel = Kernel.DECODE_ONLY
    weights: NaiveWeights = LATENCY
    slots: int = 20
    fixed: bool = False
    batch_limits: tuple[int, ...] = (4, 4)
    kv_limits: tuple[int, ...] = (90, 90)
    length_max: int = 16
    arrivals_per_period: float = 1.2
    periods: int = 50
    steps: int = 2
    step_size: float = 0.0973
    history_max: int = 25
    normalizer: float = SATURATING
    empty_until: int = 0
    seed: int = 0


class Spy(PublishedLp):
    """The policy itself, and what it saw last."""

    view: View | None = None

    def decide(self, view: View) -> list[Pair]:
        self.view = view
        return super().decide(view)

    def prices(self) -> Usage:
        """p_k as the next refresh would start from it, on the look-ahead of the last decision."""
        assert self.view is not None
        problem = self.price_problem(self.view)
        assert problem is not None
        return problem.problem().warm


@dataclass
class Running:
    """A started request in the test's own engine: one step per period."""

    request: NaiveRequest
    worker: int
    steps_done: int = 0

    def tokens(self, mixed: bool) -> int:
        return max(0, self.steps_done - 1) if mixed else self.steps_done


def control_config(setting: Setting) -> ControlConfig:
    w = setting.weights
    return ControlConfig(
        kernel=setting.kernel,
        weights=Weights(
            throughput=w.alpha,
            e2e=w.beta,
            ttft=w.gamma,
            queries=w.sigma,
            tail_e2e=w.zeta1,
            tail_ttft=w.zeta2,
            e2e_bound_s=w.t1,
            ttft_bound_s=w.t2,
        ),
        prices=PriceConfig(
            variant=Variant.PUBLISHED,
            inline=True,
            steps=setting.steps,
            step_size=setting.step_size,
            batch=10**6,
            history_max=setting.history_max,
            reward_normalizer=setting.normalizer,
        ),
        horizon_iterations=setting.slots,
        bucket_iterations=1,
        fixed_horizon=setting.fixed,
        max_wait_s=1e9,
    )


def arrivals(setting: Setting) -> list[list[NaiveRequest]]:
    """Requests by period of arrival; the first period of a run always has one."""
    rng = np.random.default_rng(setting.seed)
    counts = rng.poisson(setting.arrivals_per_period, setting.periods)
    counts[0] += 1
    counts[: setting.empty_until] = 0
    names = iter(range(10**6))
    return [
        [
            NaiveRequest(
                f"r{next(names)}",
                arrival=k,
                prompt=int(rng.integers(0, 20)),
                length=int(rng.integers(1, setting.length_max + 1)),
                value=float(rng.choice([1.0, 1.0, 1.0, 2.0])),
            )
            for _ in range(count)
        ]
        for k, count in enumerate(counts)
    ]


class Twin:
    """The router and the loops, side by side."""

    def __init__(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setting = setting
        self.mixed = setting.kernel is Kernel.MIXED
        config = control_config(setting)
        self.spy = Spy(config)
        monkeypatch.setattr("service.control.router.make_policy", lambda _: self.spy)
        self.router = Router(config)
        for g, (batch, kv) in enumerate(zip(setting.batch_limits, setting.kv_limits, strict=True)):
            spec = WorkerSpec(
                worker_id=f"w{g}",
                batch_limit=batch,
                kv_capacity_tokens=kv,
                block_tokens=1,
                iteration_s=1.0,
            )
            self.router.handle(WorkerJoined(spec), 0.0)
        self.naive = NaiveAlgorithm1(
            mixed=self.mixed,
            weights=setting.weights,
            slots=setting.slots,
            fixed=setting.fixed,
            batch_limits=list(setting.batch_limits),
            kv_limits=list(setting.kv_limits),
            steps=setting.steps,
            step_size=setting.step_size,
            normalizer=setting.normalizer,
            history_max=setting.history_max,
            forecast=self.forecast,
        )
        self.waiting: dict[str, NaiveRequest] = {}
        self.running: dict[str, Running] = {}

    def forecast(self, k: int, left: int, waiting: int) -> float:
        """n^_remain: arrivals at the measured rate until the end, and those who wait already."""
        return self.router.stats(float(k)).arrivals_per_s * left + waiting

    def period(self, k: int, arriving: list[NaiveRequest]) -> list[tuple[str, int]]:
        """Let one period pass on both sides; returns the starts they agree on."""
        now_s = float(k)
        self._work(now_s)
        for one in arriving:
            self.waiting[one.name] = one
            request = Request(
                request_id=one.name,
                arrival_s=now_s,
                prompt_tokens=one.prompt,
                decode_tokens_hint=one.length,
                value=one.value,
            )
            assert self.router.handle(Arrived(request), now_s) == []
        seen = [(r.request, r.worker, r.steps_done) for r in self.running.values()]
        expected = self.naive.period(k, list(self.waiting.values()), seen)
        commands = self.router.tick(now_s)
        starts = [(c.request_id, int(c.worker_id[1:])) for c in commands if isinstance(c, Start)]
        assert len(starts) == len(commands)
        assert starts == expected
        self._assert_prices(k)
        for name, worker in starts:
            self.running[name] = Running(self.waiting.pop(name), worker)
        return starts

    def _work(self, now_s: float) -> None:
        """One iteration on every worker: tokens seen, and the ends of those that are done."""
        for name, one in list(self.running.items()):
            one.steps_done += 1
            if one.steps_done == one.request.length + self.mixed:
                self.router.handle(Left(name, Outcome.COMPLETED, one.request.length), now_s)
                del self.running[name]
            elif one.tokens(self.mixed):
                self.router.handle(Progressed({name: one.tokens(self.mixed)}), now_s)

    def _assert_prices(self, k: int) -> None:
        prices = self.spy.prices()
        first = 0 if self.setting.fixed else k
        for resource, ours in enumerate((prices.batch, prices.kv)):
            loops = [
                [self.naive.prices.get((g, first + s), FREE)[resource] for s in range(row.size)]
                for g, row in enumerate(ours)
            ]
            np.testing.assert_allclose(ours, loops, rtol=PRICE_TOLERANCE, atol=PRICE_TOLERANCE)


def run_both(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Tensor]:
    """Run the twins; returns how many requests started, and the highest price of each slot."""
    twin = Twin(setting, monkeypatch)
    starts, peak = 0, dict[tuple[int, int], tuple[float, float]]()
    for k, arriving in enumerate(arrivals(setting)):
        starts += len(twin.period(k, arriving))
        for at, (batch, kv) in twin.naive.prices.items():
            old_batch, old_kv = peak.get(at, FREE)
            peak[at] = (max(batch, old_batch), max(kv, old_kv))
    return starts, peak


BASE = Setting()
WALL = replace(BASE, fixed=True, slots=50)
SETTINGS = {
    "rolling": BASE,
    "fixed": WALL,
    "fixed, an empty beginning": replace(WALL, empty_until=7),
    "rolling, hardly any load": replace(BASE, arrivals_per_period=0.15, periods=100),
    "few KV tokens": replace(BASE, kv_limits=(45, 45), batch_limits=(30, 30)),
    "workers of different size": replace(
        WALL, batch_limits=(1, 6, 3), kv_limits=(40, 80, 200), arrivals_per_period=1.6
    ),
    "requests longer than the horizon": replace(
        BASE, slots=6, length_max=25, arrivals_per_period=0.6
    ),
    "fixed horizon shorter than a request": replace(WALL, slots=40, periods=40, length_max=60),
    "throughput only": replace(BASE, weights=NaiveWeights(alpha=1.0)),
    "queries only, so that most margins tie": replace(
        WALL, weights=NaiveWeights(sigma=1.0), normalizer=1.0
    ),
    "tail bounds only": replace(
        BASE, weights=NaiveWeights(zeta1=1.0, zeta2=2.0, t1=18.0, t2=4.0), normalizer=3.0
    ),
    "all six weights": replace(
        WALL, weights=NaiveWeights(0.5, 1.0, 0.25, 3.0, 10.0, 20.0, 25.0, 5.0), normalizer=100.0
    ),
    "no weight at all": replace(BASE, weights=NaiveWeights(), periods=20),
    "big steps": replace(BASE, step_size=0.973, steps=1, seed=3),
}


BOTH_KERNELS = ("rolling", "fixed", "few KV tokens", "workers of different size")
CASES = [
    (name, kernel)
    for place, name in enumerate(SETTINGS)
    for kernel in (list(Kernel) if name in BOTH_KERNELS else [list(Kernel)[place % 2]])
]


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_every_start_and_every_price_is_the_papers__algorithms_1_and_2(
    name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(SETTINGS[name], kernel=kernel)
    starts, peak = run_both(setting, monkeypatch)
    if setting.weights == NaiveWeights():
        assert starts == 0  # no margin is above zero
        return
    assert starts >= 10
    if setting.arrivals_per_period >= 1.0:
        assert max(batch + kv for batch, kv in peak.values()) > 0  # the prices had something to say
