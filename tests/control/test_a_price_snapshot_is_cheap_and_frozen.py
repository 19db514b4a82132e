"""The event loop only copies for a price refresh; what takes long is done later, elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from service.control import (
    ControlConfig,
    Left,
    Outcome,
    Progressed,
    Router,
    Start,
    Variant,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerState,
    prices,
    started,
)
from tests.control.driving import SMALL, ask, spec, with_prices

CONFIGS = [
    pytest.param(with_prices(SMALL, history_max=200), id="forward"),
    pytest.param(with_prices(SMALL, variant=Variant.PUBLISHED), id="published"),
    pytest.param(
        replace(with_prices(SMALL, variant=Variant.PUBLISHED), fixed_horizon=True), id="fixed"
    ),
]


def busy(config: ControlConfig, seed: int) -> tuple[Router, list[str]]:
    """A router with three workers, requests that decode, late and unseen ones among them."""
    rng, router, running = np.random.default_rng(seed), Router(replace(config, queue_max=500)), []
    for worker in range(3):
        router.handle(WorkerJoined(spec(f"w{worker}", 12, 3000)), 0.0)
    for tick in range(4):
        now_s = 0.05 * tick
        for number in range(20):
            hint = int(rng.integers(1, 40)) if rng.random() < 0.5 else None
            event = ask(
                f"{tick}-{number}",
                now_s,
                prompt=int(rng.integers(1, 60)),
                decode_tokens_hint=hint,
                streams=bool(rng.random() < 0.8),
                group=f"g{number % 3}",
            )
            router.handle(event, now_s)
        running += [one.request_id for one in router.tick(now_s) if isinstance(one, Start)]
        router.handle(Progressed({one: int(rng.integers(1, 60)) for one in running}), now_s)
        ended = running.pop()
        router.handle(Left(ended, Outcome.COMPLETED, 30), now_s)
        snapshot = router.price_problem(now_s)
        if snapshot is not None and tick < 2:
            router.adopt(snapshot.solve(), now_s)
    return router, running


def move_on(router: Router, running: list[str]) -> None:
    """Whatever can happen while prices are being solved."""
    router.handle(Progressed(dict.fromkeys(running, 99)), 1.0)
    router.handle(ask("late", 1.0, streams=False), 1.0)
    for request_id in running[::2]:
        router.handle(Left(request_id, Outcome.COMPLETED, 99), 1.0)
    router.tick(1.0)
    router.handle(WorkerChanged("w1", WorkerState.DOWN), 1.1)
    router.handle(WorkerGone("w1"), 1.1)
    router.tick(1.1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_is_solved_as_things_were_however_they_moved_on(
    config: ControlConfig, seed: int
) -> None:
    (router, running), (twin, _) = busy(config, seed), busy(config, seed)
    snapshot, at_once = router.price_problem(0.9), twin.price_problem(0.9)
    assert snapshot is not None
    assert at_once is not None
    expected = at_once.problem()
    move_on(router, running)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(snapshot.problem).result()
    for some, other in (
        (found.scarcity, expected.scarcity),
        (found.solve().prices, expected.solve().prices),
    ):
        assert some.batch.tobytes() == other.batch.tobytes()
        assert some.kv.tobytes() == other.kv.tobytes()
    assert found.scarcity.kv.any()


@pytest.mark.parametrize("config", CONFIGS)
def test_no_column_is_made_and_no_price_moved_while_the_loop_waits(
    config: ControlConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(module: object, name: str) -> None:
        real = getattr(module, name)

        def note(*args: object, **more: object) -> object:
            made.append(name)
            return real(*args, **more)

        monkeypatch.setattr(module, name, note)

    router, _ = busy(config, seed=0)
    noted(started, "hold")
    noted(prices, "descend")
    snapshot = router.price_problem(0.9)
    assert snapshot is not None
    assert made == []
    snapshot.solve()
    assert set(made) == {"hold", "descend"}
