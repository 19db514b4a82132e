"""What first come first served would make a newcomer wait, told from what waits and what runs."""

from dataclasses import replace

import numpy as np
import pytest

from service.control import ControlConfig, Left, Outcome, Progressed, Refuse, WorkerGone
from service.control.usual_work import SEEN_MIN, UsualWork
from tests.control.driving import SMALL, ask, router_with, spec, starts

LENGTHS = [5, 8, 13, 40, 90, 300] * 4


def naive_left(lives: list[tuple[int, int]]) -> float:
    """Mean, over all iterations of lives (forecast, true length), of what is left by forecast."""
    left = [max(forecast - (done + 0.5), 0.0) for forecast, true in lives for done in range(true)]
    return sum(left) / len(left)


def learned(lives: list[tuple[int, int]]) -> UsualWork:
    usual = UsualWork()
    for forecast, true in lives:
        usual.came(forecast)
        usual.ended(forecast, true)
    return usual


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param([(length, length) for length in LENGTHS], id="exact forecasts"),
        pytest.param([(60, length) for length in LENGTHS], id="one forecast for all"),
        pytest.param([(2 * length, length) for length in LENGTHS], id="twice too long"),
        pytest.param([(length, 2 * length) for length in LENGTHS], id="half of the length"),
    ],
)
def test_a_running_request_is_met_in_proportion_to_its_length(
    lives: list[tuple[int, int]],
) -> None:
    # The newest weigh most; with lengths that repeat that moves the mean a little.
    assert learned(lives).left_steps() == pytest.approx(naive_left(lives), rel=0.03)


def test_requests_that_still_run_are_counted_by_their_forecasts() -> None:
    usual = UsualWork()
    for length in LENGTHS:
        usual.came(length)
        if length < 50:
            usual.ended(length, length)
    exact = [(length, length) for length in LENGTHS]
    assert usual.left_steps() == pytest.approx(naive_left(exact), rel=0.03)


def test_nothing_is_told_after_a_few_arrivals() -> None:
    usual = UsualWork()
    for _ in range(int(SEEN_MIN) - 1):
        usual.came(100)
    assert usual.left_steps() == 0.0
    usual.came(100)
    usual.came(100)
    assert usual.left_steps() == pytest.approx(50.0)
    assert np.isfinite(usual.left_steps())


def test_a_request_of_several_sequences_is_met_in_as_many_slots() -> None:
    several, one_by_one = UsualWork(), UsualWork()
    for index in range(400):
        length, sequences = (10, 1) if index % 2 else (100, 4)
        several.came(length, sequences)
        several.ended(length, length / 2, sequences)
        for _ in range(sequences):
            one_by_one.came(length)
            one_by_one.ended(length, length / 2)
    assert several.left_steps() == pytest.approx(one_by_one.left_steps(), rel=0.03)


def test_requests_that_can_never_run_are_no_work() -> None:
    usual = []
    for refused in (0, 40):
        router = router_with(ControlConfig(), replace(spec("w0"), models=frozenset({"m"})))
        for index in range(2 * int(SEEN_MIN)):
            router.handle(ask(f"r{index}", model="m", decode_tokens_hint=100), 0.0)
        for index in range(refused):
            told = router.handle(ask(f"x{index}", model="none", decode_tokens_hint=9000), 0.0)
            assert [type(command) for command in told] == [Refuse]
        usual.append(router._ledger.usual_left_steps())
    assert usual[0] == usual[1] > 0


@pytest.mark.parametrize("seed", range(6))
def test_what_started_requests_have_left_is_counted_as_they_go(seed: int) -> None:
    rng, workers = np.random.default_rng(seed), ["w0", "w1", "w2"]
    router = router_with(SMALL, *(spec(name, batch_limit=9) for name in workers))
    held: dict[str, list[float]] = {}
    where: dict[str, str] = {}
    for step in range(120):
        now_s, name = 0.1 * step, f"r{step}"
        hint, sequences = int(rng.integers(1, 30)), int(rng.integers(1, 3))
        router.handle(ask(name, now_s, decode_tokens_hint=hint, sequences=sequences), now_s)
        held[name] = [hint, 0.0, sequences]
        where |= dict(starts(router.tick(now_s)))
        for one in rng.choice(list(where), min(3, len(where)), replace=False).tolist():
            held[one][1] = max(held[one][1], float(rng.integers(0, 40)))
            router.handle(Progressed({one: int(held[one][1])}), now_s)
        if step % 3 == 0 and where:
            gone = str(rng.choice(list(where)))
            router.handle(Left(gone, Outcome.CANCELLED, None), now_s)
            del where[gone]
        if step == 60:
            router.handle(WorkerGone(workers.pop(1)), now_s)
        left = [
            sum(
                sequences * max(forecast - produced, 0.0)
                for one, (forecast, produced, sequences) in held.items()
                if where.get(one) == worker
            )
            for worker in workers
        ]
        for g in range(len(workers)):
            some = np.arange(len(workers)) == g
            assert router._ledger.left_steps(some) == left[g]
        assert router._ledger.left_steps(np.ones(len(workers), dtype=np.bool_)) == sum(left)
