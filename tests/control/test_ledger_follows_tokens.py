"""The ledger: what started requests hold from now on, kept up event by event (spec 7.2, 7.3).

A scripted policy starts requests where the test wants them and asks the view, as every policy does,
what is held on the look-ahead; loops over the requests that run say what it should be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from service.control import (
    ControlConfig,
    FirstToken,
    Kernel,
    Left,
    Outcome,
    Progressed,
    Returned,
    Router,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
)
from service.control.columns import Horizon, Usage
from service.control.view import Pair, Unpriced, View
from tests.control.driving import SMALL, ask, spec, with_prices
from tests.control.instances import Placed, naive_column, sum_of
from tests.control.naive_olp import NaiveRequest

FRAMES = [(Horizon(40, 1), 0), (Horizon(12, 3), 0), (Horizon(9, 4), 3)]
"""Look-aheads, and how many iterations after their left edge the present lies."""


class Scripted(Unpriced):
    """Starts whatever waits on the worker the test chose; keeps the last view."""

    def __init__(self) -> None:
        self.target = 0
        self.view: View | None = None

    def decide(self, view: View) -> list[Pair]:
        self.view = view
        return [(row, self.target) for row in range(len(view.waiting))]


class Driven:
    """A router under a scripted policy."""

    def __init__(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policy = Scripted()
        monkeypatch.setattr("service.control.router.make_policy", lambda _: self.policy)
        # Inline prices, so that a decision is asked for at every tick.
        config: ControlConfig = with_prices(SMALL, inline=True)
        self.router = Router(replace(config, kernel=kernel, queue_max=10**6))
        self.now_s = 0.0

    def join(self, worker_id: str, block: int = 1, kv: int | None = None) -> None:
        one = spec(worker_id, batch_limit=1000, kv=kv, block=block, iteration_s=1.0)
        self.router.handle(WorkerJoined(one), self.now_s)

    def start(self, name: str, target: int, prompt: int, **fields: object) -> None:
        self.policy.target = target
        self.router.handle(ask(name, self.now_s, prompt=prompt, **fields), self.now_s)
        self.router.tick(self.now_s)

    def tokens(self, name: str, tokens: int) -> None:
        self.router.handle(Progressed({name: tokens}), self.now_s)

    def held(self, horizon: Horizon, offset: int = 0) -> Usage:
        """What the ledger says is held from now on."""
        self.now_s += 1.0
        self.router.tick(self.now_s)
        assert self.policy.view is not None
        return self.policy.view.occupancy(horizon, float(offset), None)


@dataclass
class Runs:
    """A request that runs, as the loops know it."""

    request: NaiveRequest
    worker_id: str
    produced: int = 0


class LedgerBesideLoops(RuleBasedStateMachine):
    """Starts, tokens, ends and departures of workers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.runs: dict[str, Runs] = {}
        self.workers: list[str] = []
        self.foreign: dict[str, int] = {}
        self.entered = 0

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(kernel=st.sampled_from(list(Kernel)))
    def begin(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.driven = Driven(kernel, self.patch)

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join(self) -> None:
        worker_id = f"w{self.entered}"
        self.entered += 1
        self.driven.join(worker_id)
        self.workers.append(worker_id)

    @precondition(lambda self: self.workers)
    @rule(
        at=st.integers(0, 3),
        prompt=st.integers(0, 20),
        length=st.integers(1, 30),
        sequences=st.sampled_from((1, 1, 3)),
    )
    def start(self, at: int, prompt: int, length: int, sequences: int) -> None:
        name = f"r{self.entered}"
        self.entered += 1
        target = at % len(self.workers)
        self.driven.start(name, target, prompt, decode_tokens_hint=length, sequences=sequences)
        request = NaiveRequest(name, 0, prompt, length, sequences)
        self.runs[name] = Runs(request, self.workers[target])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), tokens=st.integers(0, 29), first=st.booleans())
    def progress(self, data: st.DataObject, tokens: int, first: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)))
        one = self.runs[name]
        tokens = 1 if first else tokens
        if tokens >= one.request.length:
            return  # outlived forecasts have tests of their own
        if first:
            self.driven.router.handle(FirstToken(name), self.driven.now_s)
        else:
            self.driven.tokens(name, tokens)
        one.produced = max(one.produced, tokens)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), returned=st.booleans())
    def end(self, data: st.DataObject, returned: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)))
        router, now_s = self.driven.router, self.driven.now_s
        if returned:
            router.handle(Returned(name), now_s)
        router.handle(Left(name, Outcome.CANCELLED), now_s)
        del self.runs[name]

    @precondition(lambda self: self.workers)
    @rule(at=st.integers(0, 3))
    def remove(self, at: int) -> None:
        worker_id = self.workers.pop(at % len(self.workers))
        self.driven.router.handle(WorkerGone(worker_id), self.driven.now_s)
        self.foreign.pop(worker_id, None)

    @precondition(lambda self: self.workers)
    @rule(at=st.integers(0, 3), others=st.integers(0, 3))
    def report_others(self, at: int, others: int) -> None:
        # Long after any end of ours, twice, so that it is believed.
        worker_id = self.workers[at % len(self.workers)]
        mine = sum(r.request.sequences for r in self.runs.values() if r.worker_id == worker_id)
        for _ in range(2):
            self.driven.now_s += 10.0
            report = WorkerReport(running=mine + others, waiting=0)
            event = WorkerReported(worker_id, report, self.driven.now_s)
            self.driven.router.handle(event, self.driven.now_s)
        self.foreign[worker_id] = others

    @invariant()
    def what_is_held_is_what_the_loops_say(self) -> None:
        if not self.workers:
            return
        for horizon, offset in FRAMES:
            held = self.driven.held(horizon, offset)
            columns = [
                (self.workers.index(one.worker_id), self.column_of(one, horizon, offset))
                for one in self.runs.values()
                if one.worker_id in self.workers
            ]
            expected = sum_of(columns, len(self.workers), horizon)
            others = [[self.foreign.get(worker_id, 0)] for worker_id in self.workers]
            np.testing.assert_array_equal(held.batch, expected.batch + np.array(others))
            np.testing.assert_array_equal(held.kv, expected.kv)

    def column_of(self, one: Runs, horizon: Horizon, offset: int) -> dict[int, tuple[float, float]]:
        """A column that began in the past: a begun prefill counts as a step done."""
        done = one.produced + (1 if self.kernel is Kernel.MIXED else 0)
        return naive_column(self.kernel, Placed(one.request, offset - done, 0), horizon)


LedgerBesideLoops.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestTheLedgerKeptUpByEventsIsTheSumOverWhatRuns = LedgerBesideLoops.TestCase


@pytest.mark.parametrize("kernel", list(Kernel))
def test_a_request_that_outlives_its_forecast_keeps_its_expected_rest__spec_7_3(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(kernel, monkeypatch)
    driven.join("w0")
    # Hints are right for three of four requests, and a quarter of the truth for the others.
    for i in range(400):
        driven.start(f"past{i}", 0, 5, decode_tokens_hint=8)
        driven.router.handle(Left(f"past{i}", Outcome.COMPLETED, 8 if i % 4 else 32), 0.0)
    driven.start("r", 0, 5, decode_tokens_hint=8)
    driven.tokens("r", 7)
    assert driven.held(Horizon(40, 1)).batch.sum() == 1
    driven.tokens("r", 8)
    # Now it is one of those with 32: 24 to go.
    assert driven.held(Horizon(40, 1)).batch.sum() == pytest.approx(24, abs=1)
    driven.tokens("r", 20)
    assert driven.held(Horizon(40, 1)).batch.sum() == pytest.approx(12, abs=1)
    driven.tokens("r", 500)
    assert driven.held(Horizon(400, 1)).batch.sum() >= 1
    driven.router.handle(Left("r", Outcome.COMPLETED, 500), 0.0)
    assert not driven.held(Horizon(40, 1)).batch.any()


def test_what_was_learned_since_corrects_a_request_that_is_late_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driven = Driven(Kernel.DECODE_ONLY, monkeypatch)
    driven.join("w0")
    driven.start("r", 0, 5, decode_tokens_hint=8)
    driven.tokens("r", 10)
    before = driven.held(Horizon(90, 1)).batch.sum()
    for i in range(400):
        driven.start(f"past{i}", 0, 5, decode_tokens_hint=8)
        driven.router.handle(Left(f"past{i}", Outcome.COMPLETED, 64), 0.0)
    assert driven.held(Horizon(90, 1)).batch.sum() == pytest.approx(54, abs=2) != before


def test_a_known_limit_bounds_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(Kernel.DECODE_ONLY, monkeypatch)
    driven.join("w0")
    # Whoever outlives this hint makes 64 tokens, but this request may only make 30.
    for i in range(100):
        driven.start(f"past{i}", 0, 5, decode_tokens_hint=8)
        driven.router.handle(Left(f"past{i}", Outcome.COMPLETED, 64), 0.0)
    driven.start("r", 0, 5, decode_tokens_hint=8, decode_tokens_limit=30)
    driven.tokens("r", 27)
    assert driven.held(Horizon(40, 1)).batch.sum() == 3


@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("block", [2, 4, 16])
@pytest.mark.parametrize("q", [1, 3, 4, 16])
def test_kv_in_blocks_is_never_understated_and_overstated_by_no_more_than_a_bucket_and_a_block(
    kernel: Kernel, block: int, q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(kernel, monkeypatch)
    driven.join("w0", block=block)
    horizon = Horizon(-(-48 // q), q)
    for prompt in (0, 1, 7, 15, 16, 33):
        name = f"r{prompt}"
        driven.start(name, 0, prompt, decode_tokens_hint=25)
        for produced in (0, 1, 3, 20):
            driven.tokens(name, produced)
            held = driven.held(horizon).kv[0]
            done = produced + (1 if kernel is Kernel.MIXED else 0)
            use = naive_column(
                kernel,
                Placed(NaiveRequest(name, 0, prompt, 25), -done, 0),
                Horizon(horizon.iterations, 1),
            )
            for bucket in range(horizon.buckets):
                slots = range(bucket * q, (bucket + 1) * q)
                tokens = max((use[s][1] for s in slots if s in use), default=0.0)
                blocks = -(-tokens // block) * block
                assert held[bucket] >= blocks
                if tokens:
                    # Whole blocks up to the end of the bucket, and less than one more.
                    assert held[bucket] < blocks + block + max(block, q)
        driven.router.handle(Left(name, Outcome.CANCELLED), 0.0)
