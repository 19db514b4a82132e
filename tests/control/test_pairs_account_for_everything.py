"""Random events on prefill and decode workers: every request ends once, every charge comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from service.control import (
    Command,
    FirstToken,
    HandoffConfig,
    Left,
    Outcome,
    Prefill,
    Prefilled,
    PrefillFailed,
    Progressed,
    Refuse,
    Returned,
    Role,
    Router,
    Start,
    WorkerChanged,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
    WorkerState,
)
from tests.control.driving import CENTRAL, POLICIES, PUSHING, accounted, ask, router_with

STEPS = 250
STEP_S = 0.05
LEASE_S = 3.0
BATCH_LIMIT = 3
WORKERS = {
    "p0": Role.PREFILL,
    "p1": Role.PREFILL,
    "d0": Role.DECODE,
    "d1": Role.DECODE,
    "b0": Role.BOTH,
}


@dataclass
class Held:
    """A request outside the waiting room, as the driver of a router knows it.

    Attributes:
        worker_id: where it decodes or will, "" while it is prefilled ahead.
        prefill_id: the worker whose answer is awaited, or "".
        tokens: output tokens so far.
    """

    worker_id: str
    prefill_id: str
    tokens: int = 0


@dataclass
class Random:
    """Drives a router with whatever may happen next."""

    router: Router
    rng: np.random.Generator
    now_s: float = 0.0
    asked: int = 0
    waiting: set[str] = field(default_factory=set)
    held: dict[str, Held] = field(default_factory=dict)

    def step(self) -> None:
        """Let something happen, then decide."""
        self.now_s += STEP_S
        happens = (self.arrive, self.arrive, self.advance, self.advance, self.advance)
        happens += (self.fail, self.give_up, self.report, self.shake)
        happens[int(self.rng.integers(len(happens)))]()
        self.obey(self.router.tick(self.now_s))

    def arrive(self) -> None:
        request_id = f"r{self.asked}"
        self.asked += 1
        self.waiting.add(request_id)
        event = ask(
            request_id,
            self.now_s,
            prompt=int(self.rng.integers(1, 60)),
            sequences=int(self.rng.choice([1, 1, 1, 2])),
            streams=bool(self.rng.integers(2)),
            decode_tokens_hint=int(self.rng.integers(1, 30)),
        )
        self.obey(self.router.handle(event, self.now_s))

    def advance(self) -> None:
        """One held request gets what it waits for."""
        request_id = self.one_of(self.held)
        if request_id is None:
            return
        held = self.held[request_id]
        if held.prefill_id:
            held.prefill_id = ""
            if not held.worker_id:
                del self.held[request_id]
                self.waiting.add(request_id)
            self.send(Prefilled(request_id))
        elif not held.tokens:
            held.tokens = 1
            self.send(FirstToken(request_id))
        elif self.rng.random() < 0.5:
            held.tokens += 3
            self.send(Progressed({request_id: held.tokens}))
        else:
            del self.held[request_id]
            self.send(Left(request_id, Outcome.COMPLETED, held.tokens))

    def fail(self) -> None:
        """The worker that is to do something for a request does not."""
        request_id = self.one_of(self.held)
        if request_id is None or self.held[request_id].tokens:
            return
        held = self.held.pop(request_id)
        if held.prefill_id:
            self.send(PrefillFailed(request_id, kept=bool(self.rng.integers(2))))
        self.waiting.add(request_id)
        event = Returned(request_id, held.prefill_id)
        self.obey(self.router.handle(event, self.now_s))

    def give_up(self) -> None:
        """A client leaves, wherever its request is."""
        request_id = self.one_of(self.waiting | self.held.keys())
        if request_id is not None:
            self.waiting.discard(request_id)
            self.held.pop(request_id, None)
            outcome = Outcome(self.rng.choice([Outcome.CANCELLED.value, Outcome.FAILED.value]))
            self.send(Left(request_id, outcome))

    def report(self) -> None:
        worker_id = str(self.rng.choice(list(WORKERS)))
        report = WorkerReport(
            running=0, waiting=0, kv_tokens_used=0, restarted=bool(self.rng.random() < 0.2)
        )
        self.send(WorkerReported(worker_id, report, self.now_s))

    def shake(self) -> None:
        worker_id = str(self.rng.choice(list(WORKERS)))
        state = WorkerState.DOWN if self.rng.random() < 0.3 else WorkerState.UP
        self.send(WorkerChanged(worker_id, state))

    def one_of(self, ids: object) -> str | None:
        known = sorted(ids)  # type: ignore[call-overload]
        return str(self.rng.choice(known)) if known else None

    def send(self, event: object) -> None:
        self.obey(self.router.handle(event, self.now_s))  # type: ignore[arg-type]

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            self.waiting.remove(command.request_id)
            match command:
                case Start(request_id, worker_id, prefill_id, handed):
                    assert not (prefill_id and handed)
                    assert WORKERS[worker_id] is not Role.PREFILL
                    if prefill_id or handed:
                        assert WORKERS[worker_id] is Role.DECODE
                    self.held[request_id] = Held(worker_id, prefill_id)
                case Prefill(request_id, worker_id):
                    assert WORKERS[worker_id] is Role.PREFILL
                    self.held[request_id] = Held("", worker_id)
                case Refuse():
                    pass

    def check(self) -> None:
        """The router's books agree with the driver's."""
        stats = self.router.stats(self.now_s)
        assert accounted(self.router, self.now_s)
        assert (stats.waiting, stats.running) == (len(self.waiting), len(self.held))
        for one in stats.prefillers:
            owed = [held for held in self.held.values() if held.prefill_id == one.worker_id]
            assert one.legs == len(owed)
            assert 0 <= one.orphaned_kv_tokens <= one.kv_tokens
            assert one.leg_tokens <= one.kv_tokens


@pytest.mark.parametrize("hold_s", [0.0, 1.0])
@pytest.mark.parametrize("name", ["forward", "published", "central_fcfs", "round_robin"])
def test_whatever_happens_the_books_agree_and_end_empty(name: str, hold_s: float) -> None:
    assert name in (*CENTRAL, *PUSHING)
    handoff = HandoffConfig(
        prefill_tokens_max=100, prefill_tokens_per_s=500.0, lease_s=LEASE_S, hold_s=hold_s
    )
    specs = [
        WorkerSpec(
            worker_id=worker_id,
            batch_limit=BATCH_LIMIT,
            kv_capacity_tokens=400,
            block_tokens=4,
            iteration_s=0.02,
            role=role,
        )
        for worker_id, role in WORKERS.items()
    ]
    for seed in range(3):
        router = router_with(replace(POLICIES[name], handoff=handoff), *specs)
        play = Random(router, np.random.default_rng(seed))
        for _ in range(STEPS):
            play.step()
            play.check()
        stats = router.stats(play.now_s)
        assert stats.fallback_ticks == 0
        assert stats.prefills > 0
        assert (stats.holds_passed > 0) <= (hold_s > 0)
        for request_id in list(play.held):
            del play.held[request_id]
            play.send(Left(request_id, Outcome.CANCELLED))
        play.now_s += 100.0
        play.obey(router.tick(play.now_s))
        play.now_s += LEASE_S + 1.0
        play.obey(router.tick(play.now_s))
        for one in router.stats(play.now_s).prefillers:
            assert (one.legs, one.leg_tokens) == (0, 0)
            assert (one.kv_tokens, one.orphaned_kv_tokens) == (0, 0)
