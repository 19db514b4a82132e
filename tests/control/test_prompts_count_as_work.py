"""What a prompt costs those who decode beside it: learned from first tokens, then counted."""

from dataclasses import replace

import numpy as np
import pytest

from service.control import (
    ControlConfig,
    FirstToken,
    Kernel,
    Left,
    Outcome,
    PriceConfig,
    Progressed,
    Router,
    WorkerJoined,
)
from service.control.token_pace import PromptPace
from tests.control.driving import ask, router_with, spec, starts

ITERATION_S = 0.01
PROMPT_S = 0.0001
CONFIG = ControlConfig(prices=PriceConfig(zero=True), age_bound_s=0.0, max_wait_s=1e6)


def test_the_wait_for_a_first_token_tells_the_time_of_a_prompt_token() -> None:
    pace = PromptPace()
    rng = np.random.default_rng(0)
    for tokens in rng.integers(10, 3000, 200).tolist():
        pace.note(1, tokens, 0.02 + PROMPT_S * tokens + rng.uniform(0.0, ITERATION_S))
    assert pace.prompt_s(3) == pytest.approx([0.0, PROMPT_S, 0.0], rel=0.05)


def test_prompts_cost_nothing_where_first_tokens_come_as_fast_after_long_ones() -> None:
    pace = PromptPace()
    rng = np.random.default_rng(0)
    for tokens in rng.integers(10, 3000, 200).tolist():
        pace.note(0, tokens, rng.uniform(ITERATION_S, 2 * ITERATION_S))
    assert pace.prompt_s(1)[0] < PROMPT_S / 50


def test_a_worker_that_leaves_takes_its_pace_along() -> None:
    pace = PromptPace()
    for tokens in (100, 1000, 4000):
        pace.note(1, tokens, PROMPT_S * tokens)
    known = pace.prompt_s(2)[1]
    pace.drop_worker(0)
    assert pace.prompt_s(1) == pytest.approx([known])


def _experienced(config: ControlConfig) -> tuple[Router, float]:
    """One worker of four slots; prompts of two sizes have shown what a prompt token takes.

    A hundred requests of 10 tokens, one after the other: the wait for the first token is an
    iteration and the prompt, the others take an iteration each. Then four of 1,000 tokens start;
    the time is that of their start.
    """
    router = router_with(config, spec("w0", batch_limit=4, kv=10**6, iteration_s=ITERATION_S))
    now_s = 0.0
    for index in range(100):
        prompt, name = (100, 1100)[index % 2], f"taught{index}"
        router.handle(ask(name, now_s, prompt, decode_tokens_hint=10), now_s)
        router.tick(now_s)
        now_s += ITERATION_S + PROMPT_S * prompt
        router.handle(FirstToken(name), now_s)
        now_s += 9 * ITERATION_S
        router.handle(Progressed({name: 10}), now_s)
        router.handle(Left(name, Outcome.COMPLETED, 10), now_s)
    for index in range(4):
        router.handle(ask(f"running{index}", now_s, 10, decode_tokens_hint=1000), now_s)
    router.tick(now_s)
    return router, now_s


@pytest.mark.parametrize(
    ("prompt", "kernel", "first"),
    [
        pytest.param(10, Kernel.MIXED, "few", id="short prompts: the shorter answer goes first"),
        pytest.param(500, Kernel.MIXED, "few", id="20 iterations of four slots: 20 + 20 < 60"),
        pytest.param(1500, Kernel.MIXED, "many", id="60 slot-iterations: 20 + 60 > 60"),
        pytest.param(1500, Kernel.DECODE_ONLY, "few", id="prompts computed elsewhere cost nothing"),
    ],
)
def test_the_least_work_goes_first_its_prompt_included(
    prompt: int, kernel: Kernel, first: str
) -> None:
    """A prompt token takes 0.0001 s, 0.01 iterations, from each of four slots: 0.04 of one's."""
    router, now_s = _experienced(replace(CONFIG, kernel=kernel))
    now_s += 1000 * ITERATION_S
    router.handle(ask("few", now_s, prompt, decode_tokens_hint=20), now_s)
    router.handle(ask("many", now_s, 10, decode_tokens_hint=60), now_s)
    router.handle(Left("running0", Outcome.COMPLETED, 1000), now_s)
    assert starts(router.tick(now_s)) == [(first, "w0")]


@pytest.mark.parametrize("prompt", [10, 900_000])
def test_more_value_goes_first_even_where_a_prompt_costs_more_than_the_start_is_worth(
    prompt: int,
) -> None:
    router, now_s = _experienced(CONFIG)
    now_s += 1000 * ITERATION_S
    for name, value in (("less", 1.0), ("more", 1.9)):
        router.handle(ask(name, now_s, prompt, decode_tokens_hint=20, value=value), now_s)
    router.handle(Left("running0", Outcome.COMPLETED, 1000), now_s)
    assert starts(router.tick(now_s)) == [("more", "w0")]


def _two_workers(config: ControlConfig) -> Router:
    """Two equal workers of 32 slots that have shown what a prompt token takes; both are idle."""
    router = router_with(
        config, *(spec(f"w{g}", batch_limit=32, kv=10**6, iteration_s=ITERATION_S) for g in (0, 1))
    )
    for index in range(200):
        prompt, name, now_s = (100, 1100)[index // 2 % 2], f"taught{index}", float(index // 2)
        router.handle(ask(name, now_s, prompt, decode_tokens_hint=2), now_s)
        router.tick(now_s)
        first_s = now_s + ITERATION_S + PROMPT_S * prompt
        router.handle(FirstToken(name), first_s)
        if index % 2:
            for other in (f"taught{index - 1}", name):
                router.handle(Left(other, Outcome.COMPLETED, 2), first_s + ITERATION_S)
    return router


def _place(router: Router, name: str, prompt: int, now_s: float) -> str:
    router.handle(ask(name, now_s, prompt, decode_tokens_hint=400), now_s)
    ((started, worker_id),) = starts(router.tick(now_s))
    assert started == name
    return worker_id


@pytest.mark.parametrize(
    ("kernel", "computed", "worker_id"),
    [
        pytest.param(Kernel.MIXED, False, "w0", id="a long prompt is before it there"),
        pytest.param(Kernel.MIXED, True, "w1", id="computed: the worker with fewer requests"),
        pytest.param(Kernel.DECODE_ONLY, False, "w1", id="prompts are computed elsewhere"),
    ],
)
def test_a_request_goes_where_its_first_token_waits_for_the_fewest_prompts(
    kernel: Kernel, computed: bool, worker_id: str
) -> None:
    router, now_s = _two_workers(replace(CONFIG, kernel=kernel)), 200.0
    assert _place(router, "one", 100, now_s) == "w0"
    router.handle(FirstToken("one"), now_s)
    assert _place(router, "long", 4000, now_s) == "w1"
    assert _place(router, "two", 100, now_s) == "w0"
    router.handle(FirstToken("two"), now_s)
    if computed:
        router.handle(FirstToken("long"), now_s)
    assert _place(router, "next", 100, now_s) == worker_id


def test_prompts_that_come_at_once_are_spread() -> None:
    router, now_s = _two_workers(CONFIG), 200.0
    for index in range(8):
        router.handle(ask(f"{index}", now_s, 1000, decode_tokens_hint=400), now_s)
    workers = [worker_id for _, worker_id in starts(router.tick(now_s))]
    assert sorted(workers) == ["w0"] * 4 + ["w1"] * 4


def test_a_worker_that_has_shown_nothing_yet_does_not_look_fast() -> None:
    router, now_s = _two_workers(CONFIG), 200.0
    router.handle(WorkerJoined(spec("new", 32, kv=10**6, iteration_s=ITERATION_S)), now_s)
    now_s += 60.0
    for index in range(9):
        router.handle(ask(f"{index}", now_s, 1000, decode_tokens_hint=400), now_s)
    workers = [worker_id for _, worker_id in starts(router.tick(now_s))]
    assert sorted(workers) == ["new"] * 3 + ["w0"] * 3 + ["w1"] * 3
