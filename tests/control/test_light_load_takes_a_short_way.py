"""One request before an idle fleet is decided without the calendar, and decided alike."""

from dataclasses import replace

import numpy as np
import pytest

from service.control import (
    ControlConfig,
    Left,
    Outcome,
    PriceConfig,
    Progressed,
    Router,
    WorkerReport,
    WorkerReported,
)
from service.control.forward import ForwardLp
from tests.control.driving import ask, router_with, spec, starts

CONFIG = ControlConfig(horizon_iterations=512, max_wait_s=1e6)


def _run(seed: int, prices: PriceConfig) -> list[tuple[str, str]]:
    """Single arrivals, progress, ends and others' load on three unlike workers; every start."""
    rng = np.random.default_rng(seed)
    router: Router = router_with(
        replace(CONFIG, seed=seed, prices=prices),
        spec("w0", batch_limit=3, kv=900, block=16),
        spec("w1", batch_limit=7, kv=2000, block=16),
        spec("w2", batch_limit=5, kv=None, block=16),
    )
    running: dict[str, int] = {}
    log: list[tuple[str, str]] = []
    for step in range(200):
        now_s = step * 0.05
        name = f"r{step}"
        hint = int(rng.integers(1, 300))
        sequences = int(rng.choice([1, 1, 1, 2]))
        prompt = int(rng.integers(1, 200))
        router.handle(ask(name, now_s, prompt, decode_tokens_hint=hint, sequences=sequences), now_s)
        started = starts(router.tick(now_s))
        problem = router.price_problem(now_s)
        if problem is not None:
            router.adopt(problem.solve(), now_s)
        log += started
        running.update(dict.fromkeys((request for request, _ in started), 0))
        for request in list(running):
            running[request] += int(rng.integers(0, 60))
            router.handle(Progressed({request: running[request]}), now_s)
            if rng.random() < 0.25:
                del running[request]
                router.handle(Left(request, Outcome.COMPLETED), now_s)
        if rng.random() < 0.3:
            report = WorkerReport(running=4, kv_tokens_used=int(rng.integers(0, 900)))
            router.handle(WorkerReported("w1", report, now_s), now_s)
    return log


@pytest.mark.parametrize(
    "prices",
    [
        pytest.param(PriceConfig(zero=True), id="no prices"),
        pytest.param(PriceConfig(refresh_s=0.0, step_size=5.0), id="large prices"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_the_short_way_decides_as_the_calendar_does(
    seed: int, prices: PriceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0
    short_way = ForwardLp._start_alone

    def counted(self: ForwardLp, *arguments: object) -> object:
        nonlocal taken
        pair = short_way(self, *arguments)  # type: ignore[arg-type]
        taken += pair is not None
        return pair

    monkeypatch.setattr(ForwardLp, "_start_alone", counted)
    short = _run(seed, prices)
    assert taken > 20
    monkeypatch.setattr(ForwardLp, "_start_alone", lambda *_: None)
    assert short == _run(seed, prices)
