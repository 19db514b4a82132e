"""Seconds of a batch slot for a token: told at first, seen later."""

import numpy as np
import pytest

from service.control import ControlConfig, Left, Outcome, Progressed
from service.control.token_pace import MEMORY_TOKENS, TokenPace
from tests.control.driving import ask, router_with, spec

TOLD_S = np.array([0.02, 0.02])


def _noted(pace: TokenPace, worker: int, slot_s: float, tokens: float) -> None:
    pace.note(np.array([worker]), np.array([[slot_s], [tokens]]), worker + 1)


def test_what_is_told_counts_until_tokens_came() -> None:
    pace = TokenPace()
    assert pace.token_s(TOLD_S) == pytest.approx(TOLD_S)
    _noted(pace, 1, 500.0, 10_000.0)
    assert pace.token_s(TOLD_S) == pytest.approx([0.02, 0.05], rel=0.03)


def test_a_worker_that_changed_its_pace_is_followed() -> None:
    pace = TokenPace()
    for _ in range(100):
        _noted(pace, 0, 10.0, 1000.0)
    for _ in range(int(4 * MEMORY_TOKENS / 1000)):
        _noted(pace, 0, 30.0, 1000.0)
    assert pace.token_s(TOLD_S)[0] == pytest.approx(0.03, rel=0.1)


def test_a_worker_that_leaves_takes_its_pace_along() -> None:
    pace = TokenPace()
    _noted(pace, 0, 1000.0, 10_000.0)
    _noted(pace, 1, 300.0, 10_000.0)
    pace.drop_worker(0)
    assert pace.token_s(TOLD_S) == pytest.approx([0.03, 0.02], rel=0.03)


@pytest.mark.parametrize("streams", [True, False])
def test_requests_seen_token_by_token_and_those_seen_at_their_end_tell_the_same(
    streams: bool,
) -> None:
    router = router_with(ControlConfig(), spec("w0", batch_limit=4, iteration_s=0.02))
    for index in range(40):
        name, now_s = f"r{index}", 50.0 * index
        router.handle(ask(name, now_s, decode_tokens_hint=500, streams=streams), now_s)
        router.tick(now_s)
        if streams:
            for step in range(1, 10):
                router.handle(Progressed({name: 50 * step}), now_s + 5.0 * step)
        router.handle(Left(name, Outcome.COMPLETED, 500), now_s + 50.0)
    assert router.stats(2000.0).workers[0].token_s == pytest.approx(0.1, rel=0.05)
