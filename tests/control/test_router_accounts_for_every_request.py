"""Whatever happens in whatever order, every request ends once and no start breaks a limit.

One machine of random events runs over every policy; a plain model beside it knows who waits, who
runs and which workers may be used. The same events to a second router give the same commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
    run_state_machine_as_test,
)

from service.control import (
    Arrived,
    Command,
    Event,
    FirstToken,
    Left,
    Outcome,
    PolicyName,
    Progressed,
    Refusal,
    Refuse,
    Request,
    Returned,
    Router,
    Start,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
    WorkerState,
)
from service.control.columns import Usage
from tests.control.driving import CENTRAL, POLICIES, accounted, spec

WORKER_IDS = ("w0", "w1", "w2", "w3")
MODELS = st.sampled_from((None, frozenset({"a"}), frozenset({"a", "b"})))
QUEUE_TRUST_S = 2.0
"""How long a report of requests waiting inside an engine keeps new ones away."""


@dataclass
class Held:
    """A request as the model knows it; worker is None while it waits."""

    request: Request
    worker: str | None = None
    produced: int = 0
    avoid: set[str] = field(default_factory=set)


@dataclass
class Known:
    """A worker as the model knows it."""

    state: WorkerState
    models: frozenset[str] | None
    engine_waiting: int = 0
    reported_at_s: float = -np.inf


class RouterUnderAnyEvents(RuleBasedStateMachine):
    """Random events; `policy` is set by the subclass that a test makes."""

    policy = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.config = POLICIES[self.policy]
        self.router = Router(self.config)
        self.now_s = 0.0
        self.held: dict[str, Held] = {}
        self.workers: dict[str, Known] = {}
        self.ended: set[str] = set()
        self.calls: list[Callable[[Router], object]] = []
        self.answers: list[object] = []

    def call(self, step: Callable[[Router], object]) -> object:
        """Do something to the router, and remember it for the replay."""
        answer = step(self.router)
        self.calls.append(step)
        self.answers.append(answer)
        return answer

    def send(self, event: Event) -> list[Command]:
        now_s = self.now_s
        commands = self.call(lambda router: router.handle(event, now_s))
        assert isinstance(commands, list)
        assert all(isinstance(command, Refuse) for command in commands)
        for command in commands:
            self.end(command.request_id)
        return commands

    def end(self, request_id: str) -> None:
        assert request_id not in self.ended
        self.ended.add(request_id)
        del self.held[request_id]

    def waiting(self) -> list[str]:
        return [name for name, one in self.held.items() if one.worker is None]

    def running(self) -> list[str]:
        return [name for name, one in self.held.items() if one.worker is not None]

    def may_use(self, one: Held, worker_id: str) -> bool:
        worker = self.workers[worker_id]
        model = one.request.model
        serves = not model or worker.models is None or model in worker.models
        return worker.state is WorkerState.UP and serves and worker_id not in one.avoid

    # Workers.

    @initialize(limit=st.integers(1, 4), kv=st.sampled_from((40, 200)))
    def begin_with_a_worker(self, limit: int, kv: int) -> None:
        self.join_spec(spec("w0", batch_limit=limit, kv=kv, block=4))

    @rule(
        worker_id=st.sampled_from(WORKER_IDS),
        limit=st.integers(1, 4),
        kv=st.sampled_from((None, 40, 200, 1000)),
        block=st.sampled_from((1, 4, 16)),
        models=MODELS,
    )
    def join(
        self, worker_id: str, limit: int, kv: int | None, block: int, models: frozenset[str] | None
    ) -> None:
        self.join_spec(spec(worker_id, limit, kv, block, models=models))

    def join_spec(self, one: WorkerSpec) -> None:
        self.send(WorkerJoined(one))
        self.workers[one.worker_id] = Known(WorkerState.UP, one.models)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), state=st.sampled_from(list(WorkerState)))
    def change(self, data: st.DataObject, state: WorkerState) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        self.send(WorkerChanged(worker_id, state))
        worker = self.workers[worker_id]
        worker.state = state
        if state is WorkerState.UP:
            for one in self.held.values():
                if one.worker is None:
                    one.avoid.discard(worker_id)
        if state is WorkerState.DOWN:
            worker.engine_waiting = 0

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        self.send(WorkerGone(worker_id))
        del self.workers[worker_id]
        # Another of that name would not be the one that these run on.
        for one in self.held.values():
            if one.worker == worker_id:
                one.worker = f"{worker_id}, gone"

    @precondition(lambda self: self.workers)
    @rule(
        data=st.data(),
        running=st.none() | st.integers(0, 6),
        waiting=st.none() | st.integers(0, 2),
        kv_used=st.none() | st.integers(0, 300),
        kv=st.none() | st.sampled_from((40, 500)),
        limit=st.none() | st.integers(1, 5),
        iteration_s=st.none() | st.sampled_from((0.0, 0.01, 0.5)),
        models=MODELS,
        lag_s=st.sampled_from((0.0, 0.3)),
    )
    def report(
        self,
        data: st.DataObject,
        running: int | None,
        waiting: int | None,
        kv_used: int | None,
        kv: int | None,
        limit: int | None,
        iteration_s: float | None,
        models: frozenset[str] | None,
        lag_s: float,
    ) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        report = WorkerReport(
            running=running,
            waiting=waiting,
            kv_tokens_used=kv_used,
            kv_capacity_tokens=kv,
            batch_limit=limit,
            iteration_s=iteration_s,
            models=models,
        )
        self.send(WorkerReported(worker_id, report, self.now_s - lag_s))
        worker = self.workers[worker_id]
        worker.models = worker.models if models is None else models
        worker.engine_waiting = waiting or 0
        worker.reported_at_s = self.now_s - lag_s

    # Requests.

    @rule(
        prompt=st.sampled_from((0, 1, 3, 10, 30, 38, 150, 5000)),
        hint=st.none() | st.integers(1, 30),
        limit=st.none() | st.integers(1, 40),
        model=st.sampled_from(("", "", "a", "b", "c")),
        sequences=st.sampled_from((1, 1, 1, 2, 7)),
        max_wait_s=st.sampled_from((None, None, 0.0, 1.0)),
        streams=st.booleans(),
        value=st.sampled_from((1.0, 0.1, 10.0)),
    )
    def arrive(
        self,
        prompt: int,
        hint: int | None,
        limit: int | None,
        model: str,
        sequences: int,
        max_wait_s: float | None,
        streams: bool,
        value: float,
    ) -> None:
        request = Request(
            request_id=f"r{len(self.held) + len(self.ended)}",
            arrival_s=self.now_s,
            prompt_tokens=prompt,
            decode_tokens_hint=hint,
            decode_tokens_limit=limit,
            model=model,
            sequences=sequences,
            max_wait_s=max_wait_s,
            streams=streams,
            value=value,
        )
        full = len(self.waiting()) == self.config.queue_max
        waiting = {
            name: math.floor(math.log2(self.held[name].request.value)) for name in self.waiting()
        }
        lowest = [name for name, tier in waiting.items() if tier == min(waiting.values())]
        lower = bool(lowest) and waiting[lowest[0]] < math.floor(math.log2(value))
        self.held[request.request_id] = Held(request)
        commands = self.send(Arrived(request))
        reasons = [command.reason for command in commands if isinstance(command, Refuse)]
        known = [w.models for w in self.workers.values()]
        served = any(not model or models is None or model in models for models in known)
        if full and reasons == [Refusal.DISPLACED]:
            assert lower
            assert commands[0].request_id == lowest[-1]
            assert max_wait_s != 0
            assert self.config.policy is PolicyName.ONLINE_LP
        elif full:
            assert reasons == [Refusal.QUEUE_FULL]
            assert commands[0].request_id == request.request_id
        elif known and not served:
            assert reasons == [Refusal.UNKNOWN_MODEL]
        else:
            assert reasons in ([], [Refusal.TOO_LARGE])
            assert prompt >= 38 or not reasons  # every worker has room for 40 tokens

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.running()))
        self.send(FirstToken(name))
        self.held[name].produced = max(self.held[name].produced, 1)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        names = data.draw(st.lists(st.sampled_from(self.running()), unique=True))
        self.send(Progressed(dict.fromkeys(names, tokens)))
        for name in names:
            self.held[name].produced = max(self.held[name].produced, tokens)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.running()))
        one = self.held[name]
        if self.send(Returned(name)):
            return
        self.note_end_at(one.worker, one.request.sequences)
        if one.worker in self.workers:
            one.avoid.add(str(one.worker))
        one.worker, one.produced = None, 0

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(list(Outcome)),
        tokens=st.none() | st.integers(0, 99),
    )
    def leave(self, data: st.DataObject, outcome: Outcome, tokens: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.send(Left(name, outcome, tokens))
        self.note_end_at(self.held[name].worker, self.held[name].request.sequences)
        self.end(name)

    def note_end_at(self, worker_id: str | None, sequences: int) -> None:
        worker = self.workers.get(str(worker_id))
        if worker is not None:
            worker.engine_waiting = max(0, worker.engine_waiting - sequences)

    # Time.

    @rule(passed_s=st.sampled_from((0.0, 0.02, 0.1, 2.5, 6.0)))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        now_s = self.now_s
        commands = self.call(lambda router: router.tick(now_s))
        assert isinstance(commands, list)
        touched = set[str]()
        for command in commands:
            one = self.held[command.request_id]
            assert one.worker is None
            if isinstance(command, Start):
                assert self.may_use(one, command.worker_id)
                one.worker = command.worker_id
                touched.add(command.worker_id)
            else:
                self.check_refusal(command, one)
                self.end(command.request_id)
        if self.policy in CENTRAL:
            self.check_limits(touched)
        for name in self.waiting():
            request = self.held[name].request
            wait_s = self.config.max_wait_s if request.max_wait_s is None else request.max_wait_s
            assert now_s < request.arrival_s + wait_s

    def check_refusal(self, command: Refuse, one: Held) -> None:
        waited_s = self.now_s - one.request.arrival_s
        bound_s = one.request.max_wait_s
        match command.reason:
            case Refusal.WAITED_TOO_LONG:
                assert bound_s != 0
                assert waited_s >= (self.config.max_wait_s if bound_s is None else bound_s)
            case Refusal.WOULD_WAIT:
                assert bound_s == 0
            case Refusal.NO_WORKER:
                assert waited_s >= self.config.no_worker_hold_s
                assert not any(self.may_use(one, worker_id) for worker_id in self.workers)
            case Refusal.TOO_LARGE:
                assert one.request.prompt_tokens >= 38
            case _:
                pytest.fail(f"{command.reason} is no reason of a tick")
        assert command.detail

    def check_limits(self, touched: set[str]) -> None:
        """A worker that just got a start has room for all it holds now, and no queue inside."""
        for worker in self.router.stats(self.now_s).workers:
            if worker.worker_id not in touched:
                continue
            assert worker.active + worker.foreign <= worker.batch_limit
            assert (
                worker.kv_capacity_tokens is None or worker.kv_tokens <= worker.kv_capacity_tokens
            )
            known = self.workers[worker.worker_id]
            trusted = self.now_s - known.reported_at_s <= QUEUE_TRUST_S
            assert not (known.engine_waiting and trusted)

    @rule(poison=st.sampled_from((None, None, np.nan, np.inf)))
    def refresh_prices(self, poison: float | None) -> None:
        now_s = self.now_s

        def refresh(router: Router) -> object:
            problem = router.price_problem(now_s)
            if problem is None:
                return None
            solution = problem.solve()
            prices = solution.prices
            assert (prices.batch >= 0).all()
            assert (prices.kv >= 0).all()
            if poison is not None:
                bad = Usage(batch=prices.batch, kv=np.full_like(prices.kv, poison))
                solution = replace(solution, prices=bad)
            dropped = router.stats(now_s).prices_dropped
            router.adopt(solution, now_s)
            assert router.stats(now_s).prices_dropped == dropped + (poison is not None)
            return prices.batch.tolist()

        self.call(refresh)

    # What always holds.

    @invariant()
    def everybody_is_accounted_for(self) -> None:
        stats = self.router.stats(self.now_s)
        assert accounted(self.router, self.now_s)
        assert stats.entered == len(self.held) + len(self.ended)
        assert stats.waiting == len(self.waiting())
        assert stats.running == len(self.running())
        assert stats.fallback_ticks == 0, stats.last_fault
        assert [w.worker_id for w in stats.workers] == list(self.workers)
        for worker in stats.workers:
            self.check_ledger(worker.worker_id, worker.active, worker.kv_tokens)

    def check_ledger(self, worker_id: str, active: int, kv_tokens: int) -> None:
        """The ledger's sums are those of the requests that run there."""
        mine = [one for one in self.held.values() if one.worker == worker_id]
        assert len(mine) <= active <= sum(one.request.sequences for one in mine)
        tokens = [one.request.prompt_tokens + one.produced for one in mine]
        if all(one.request.sequences == 1 for one in mine):
            assert active == len(mine)
            assert kv_tokens == sum(tokens)
        assert kv_tokens >= sum(tokens)

    @invariant()
    def the_next_tick_is_ahead_and_wanted_only_while_somebody_waits(self) -> None:
        due_s = self.router.next_tick_s(self.now_s)
        assert (due_s is None) == (not self.waiting())
        assert due_s is None or self.now_s < due_s < np.inf

    def teardown(self) -> None:
        for name in list(self.held):
            self.send(Left(name, Outcome.CANCELLED))
            self.end(name)
        stats = self.router.stats(self.now_s)
        assert stats.waiting == stats.running == 0
        assert all(w.active == 0 and w.kv_tokens == 0 for w in stats.workers)
        assert accounted(self.router, self.now_s)
        again = Router(self.config)
        assert [step(again) for step in self.calls] == self.answers


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_no_start_breaks_a_limit(policy: str) -> None:
    machine = type("Machine", (RouterUnderAnyEvents,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            settings.get_profile(settings.get_current_profile_name()),
            max_examples=max(8, settings().max_examples // 5),
            stateful_step_count=30,
        ),
    )
