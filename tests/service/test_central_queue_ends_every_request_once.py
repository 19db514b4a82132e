"""However a request ends, it ends once, and what it held is free again."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from service.central_queue import CentralQueue
from service.control.config import ControlConfig, PolicyName
from service.control.events import (
    Command,
    Event,
    FirstToken,
    Left,
    Outcome,
    Refusal,
    Request,
    Start,
    WorkerChanged,
    WorkerJoined,
    WorkerSpec,
    WorkerState,
)
from service.control.router import Router
from service.control.view import Pair, View
from service.errors import BidgateError, ClientGoneError, RefusedError, WorkerBrokeError
from service.queue_stats import QueueConfig
from service.refresher import InlineRefresher
from tests.clock import run_virtual
from tests.service.stage import ends


class RecordingRouter(Router):
    """The real router, with a log of what it was told and what it said."""

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        self.events: list[Event] = []
        self.commands: list[tuple[float, Command]] = []
        self.ticks: list[float] = []
        self.fail_ticks = 0

    def handle(self, event: Event, now_s: float) -> list[Command]:
        self.events.append(event)
        commands = super().handle(event, now_s)
        self.commands += [(now_s, command) for command in commands]
        return commands

    def tick(self, now_s: float) -> list[Command]:
        self.ticks.append(now_s)
        if self.fail_ticks:
            self.fail_ticks -= 1
            raise ArithmeticError("a bug")
        commands = super().tick(now_s)
        self.commands += [(now_s, command) for command in commands]
        return commands


def make_queue(
    *,
    slots: int = 1,
    workers: int = 1,
    on_tick: Callable[[float], None] = lambda _: None,
    **knobs: object,
) -> tuple[CentralQueue, RecordingRouter]:
    """A queue over workers that are up; call inside the loop."""
    config = ControlConfig(**{"policy": PolicyName.CENTRAL_FCFS, **knobs})
    router = RecordingRouter(config)
    queue = CentralQueue(
        router=router,
        refresher=InlineRefresher(),
        config=QueueConfig(),
        on_tick=on_tick,
        stopwatch=lambda: asyncio.get_running_loop().time(),
        log=structlog.get_logger(),
    )
    for number in range(workers):
        spec = WorkerSpec(
            worker_id=f"w{number}", batch_limit=slots, kv_capacity_tokens=10_000, iteration_s=0.01
        )
        queue.publish(WorkerJoined(spec))
    return queue, router


def request(**fields: object) -> Request:
    """A request that arrives now."""
    now_s = asyncio.get_running_loop().time()
    return Request(
        **{"request_id": "", "arrival_s": now_s, "prompt_tokens": 10, "decode_tokens_hint": 5}
        | fields
    )


async def hold(queue: CentralQueue, for_s: float, **fields: object) -> str:
    """Be placed, run for a while, end."""
    async with queue.place(request(**fields)) as placement:
        await asyncio.sleep(for_s)
        return placement.worker_id


def test_a_request_starts_at_once_on_an_idle_worker() -> None:
    async def scenario() -> None:
        queue, _ = make_queue()
        async with queue.place(request()) as placement:
            assert placement.worker_id == "w0"
            assert placement.queued_s == 0.0
            assert queue.stats().router.running == 1
        assert ends(queue.stats()) == {"completed": 1}

    run_virtual(scenario())


def test_a_second_request_waits_until_the_first_has_left() -> None:
    async def scenario() -> None:
        queue, _ = make_queue()
        first = asyncio.create_task(hold(queue, 3.0))
        await asyncio.sleep(1.0)
        async with queue.place(request()) as placement:
            assert asyncio.get_running_loop().time() == 3.0
            assert placement.queued_s == 2.0
        await first

    run_virtual(scenario())


def test_a_client_that_leaves_the_queue_is_never_started() -> None:
    async def scenario() -> None:
        queue, router = make_queue()
        running = asyncio.create_task(hold(queue, 3.0))
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(hold(queue, 1.0))
        await asyncio.sleep(0.5)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await running
        await asyncio.sleep(5.0)
        starts = [command for _, command in router.commands if isinstance(command, Start)]
        assert len(starts) == 1
        assert ends(queue.stats()) == {"completed": 1, "cancelled": 1}

    run_virtual(scenario())


def test_cancelled_between_start_and_use_the_place_is_returned() -> None:
    async def scenario() -> None:
        queue, router = make_queue()
        task = asyncio.create_task(hold(queue, 1.0))
        while not router.commands:  # noqa: ASYNC110 - the very moment matters
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert ends(queue.stats()) == {"cancelled": 1}
        assert await hold(queue, 0.0) == "w0"

    run_virtual(scenario())


def test_how_the_block_ends_is_how_the_request_ends() -> None:
    async def end_with(error: Exception | None) -> dict[str, int]:
        queue, _ = make_queue()
        with suppress(BidgateError):
            async with queue.place(request()):
                if error is not None:
                    raise error
        return ends(queue.stats())

    assert run_virtual(end_with(None)) == {"completed": 1}
    assert run_virtual(end_with(ClientGoneError("left"))) == {"cancelled": 1}
    assert run_virtual(end_with(WorkerBrokeError("reset"))) == {"failed": 1}


def test_a_wait_beyond_its_bound_is_refused_with_the_reason() -> None:
    async def scenario() -> None:
        queue, _ = make_queue()
        running = asyncio.create_task(hold(queue, 10.0))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await hold(queue, 1.0, max_wait_s=2.0)
        assert refused.value.reason is Refusal.WAITED_TOO_LONG
        assert (refused.value.retry_after_s or 0) >= 1
        assert 2.0 <= asyncio.get_running_loop().time() <= 2.1
        await running
        assert ends(queue.stats()) == {"completed": 1, "waited_too_long": 1}

    run_virtual(scenario())


def test_a_full_queue_refuses_the_newcomer_at_once() -> None:
    async def scenario() -> None:
        queue, _ = make_queue(queue_max=2)
        tasks = [asyncio.create_task(hold(queue, 1.0))]
        await asyncio.sleep(0.1)
        tasks += [asyncio.create_task(hold(queue, 1.0)) for _ in range(3)]
        await asyncio.sleep(0.1)
        outcomes = Counter(type(task.exception()) for task in tasks if task.done())
        await asyncio.gather(*tasks, return_exceptions=True)
        assert outcomes == {RefusedError: 1}
        assert ends(queue.stats()) == {"completed": 3, "queue_full": 1}

    run_virtual(scenario())


def test_a_returned_request_starts_on_another_worker() -> None:
    async def scenario() -> None:
        queue, _ = make_queue(workers=2)
        async with queue.place(request()) as placement:
            first = placement.worker_id
            await placement.returned()
            assert placement.worker_id != first
            assert placement.starts == 2
        assert ends(queue.stats()) == {"completed": 1}

    run_virtual(scenario())


def test_draining_refuses_newcomers_and_lets_the_others_end() -> None:
    async def scenario() -> None:
        queue, _ = make_queue()
        inside = [asyncio.create_task(hold(queue, 1.0)) for _ in range(3)]
        await asyncio.sleep(0)
        queue.drain()
        with pytest.raises(RefusedError) as refused:
            await hold(queue, 1.0)
        assert (refused.value.reason, refused.value.status) == (Refusal.DRAINING, 503)
        assert await asyncio.gather(*inside) == ["w0"] * 3
        stats = queue.stats()
        assert (stats.refused_at_door, stats.held, stats.imbalance) == (1, 0, 0)

    run_virtual(scenario())


def test_events_at_one_time_share_one_decision() -> None:
    async def scenario() -> None:
        queue, router = make_queue(slots=8)
        await asyncio.sleep(1.0)
        router.ticks.clear()
        tasks = [asyncio.create_task(hold(queue, 1.0)) for _ in range(8)]
        await asyncio.sleep(0.5)
        assert router.ticks == [1.0]
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.5)
        assert router.ticks == [1.0, 2.0]

    run_virtual(scenario())


def test_progress_wakes_no_decision_and_is_booked_with_the_next_per_sequence() -> None:
    async def scenario() -> None:
        queue, router = make_queue(slots=8)
        async with queue.place(request(sequences=2)) as placement:
            await asyncio.sleep(1.0)
            before = len(router.ticks)
            placement.progressed(6)
            placement.progressed(7)
            await asyncio.sleep(1.0)
            assert len(router.ticks) == before
            queue.publish(FirstToken(placement.request.request_id))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert router.events[-1].decode_tokens == {placement.request.request_id: 4}
        last = router.events[-1]
        assert last == Left(placement.request.request_id, Outcome.COMPLETED, 4)

    run_virtual(scenario())


def test_a_decision_that_raises_is_counted_logged_once_and_tried_again() -> None:
    async def scenario() -> None:
        queue, router = make_queue()
        await asyncio.sleep(1.0)
        router.fail_ticks = 3
        with capture_logs() as logs:
            assert await hold(queue, 0.0) == "w0"
        stats = queue.stats()
        assert [line["event"] for line in logs] == ["tick_failed"]
        assert (stats.tick_errors, stats.ticking) == (3, True)
        assert ends(stats) == {"completed": 1}

    run_virtual(scenario())


def test_a_failing_decision_shows_while_it_lasts() -> None:
    async def scenario() -> None:
        queue, router = make_queue()
        await asyncio.sleep(1.0)
        router.fail_ticks = 2
        task = asyncio.create_task(hold(queue, 0.0))
        await asyncio.sleep(0.05)
        assert not queue.stats().ticking
        await task
        assert queue.stats().ticking

    run_virtual(scenario())


def test_after_a_long_decision_the_loop_has_its_share() -> None:
    async def scenario() -> list[float]:
        queue, router = make_queue()
        loop = asyncio.get_running_loop()
        plain_tick = router.tick

        def slow_tick(now_s: float) -> list[Command]:
            loop.now_s += 0.2  # type: ignore[attr-defined]  # the virtual clock of tests
            return plain_tick(now_s)

        router.tick = slow_tick  # type: ignore[method-assign]
        for _ in range(20):
            queue.publish(WorkerChanged("w0", WorkerState.UP))
            await asyncio.sleep(0.05)
        return router.ticks

    ticks = run_virtual(scenario())
    # A tick of 0.2 s with a share of one half: never two within 0.4 s.
    assert min(later - earlier for earlier, later in itertools.pairwise(ticks)) >= 0.4 - 1e-9


async def _meddle(queue: CentralQueue, steps: list[tuple[float, int]]) -> None:
    for pause_s, kind in steps:
        await asyncio.sleep(pause_s)
        state = (WorkerState.UP, WorkerState.DOWN, WorkerState.DRAINING)[kind]
        queue.publish(WorkerChanged("w0", state))
    queue.publish(WorkerChanged("w0", WorkerState.UP))


async def _live(queue: CentralQueue, arrival_s: float, plan: tuple[float, float, int]) -> str:
    """One client: arrives, works, and is hit by a cancellation at any moment or none."""
    work_s, cancel_s, fate = plan
    await asyncio.sleep(arrival_s)

    async def work() -> None:
        async with queue.place(request(max_wait_s=3.0)) as placement:
            placement.first_token()
            placement.progressed(3)
            if fate == 1 and placement.starts == 1:
                await placement.returned()
            await asyncio.sleep(work_s)
            if fate == 2:
                raise WorkerBrokeError("reset")
            if fate == 3:
                raise ClientGoneError("left")

    task = asyncio.create_task(work())
    done, _ = await asyncio.wait([task], timeout=cancel_s)
    if not done:
        task.cancel()
        await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    if error is None:
        return "completed"
    match error:
        case RefusedError(reason=reason):
            return str(reason.value)
        case ClientGoneError():
            return "cancelled"
        case _:
            return "failed"


@settings(max_examples=60, deadline=None)
@given(
    plans=st.lists(
        st.tuples(
            st.floats(0.0, 3.0),
            st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 6.0), st.integers(0, 3)),
        ),
        max_size=20,
    ),
    meddling=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(0, 2)), max_size=5),
    slots=st.integers(1, 3),
    queue_max=st.integers(1, 6),
)
def test_every_request_that_enters_ends_exactly_once_whatever_is_cancelled_when(
    plans: list[tuple[float, tuple[float, float, int]]],
    meddling: list[tuple[float, int]],
    slots: int,
    queue_max: int,
) -> None:
    async def scenario() -> None:
        queue, router = make_queue(slots=slots, queue_max=queue_max, workers=2)
        clients = [asyncio.create_task(_live(queue, at_s, plan)) for at_s, plan in plans]
        meddler = asyncio.create_task(_meddle(queue, meddling))
        seen = Counter(await asyncio.gather(*clients))
        await meddler
        stats = queue.stats()
        assert ends(stats) == dict(seen)
        assert (stats.held, stats.router.waiting, stats.router.running) == (0, 0, 0)
        assert stats.router.entered == len(plans)
        assert (stats.event_errors, stats.tick_errors) == (0, 0)
        lefts = Counter(item.request_id for item in router.events if isinstance(item, Left))
        assert all(count == 1 for count in lefts.values())

    run_virtual(scenario())


def test_a_policy_that_is_too_slow_rests_and_requests_start_first_come_first_served() -> None:
    async def scenario() -> None:
        queue, router = make_queue(policy=PolicyName.ONLINE_LP)
        loop = asyncio.get_running_loop()
        decided = router._policy.decide
        decisions = 0

        def slow(view: View) -> list[Pair]:
            nonlocal decisions
            decisions += 1
            loop.now_s += 0.4  # type: ignore[attr-defined]  # the virtual clock of tests
            return decided(view)

        router._policy.decide = slow  # type: ignore[method-assign]
        with capture_logs() as logs:
            for _ in range(3):
                await hold(queue, 0.0)
            assert queue.stats().falling_back
            before = decisions
            for _ in range(5):
                await hold(queue, 0.0)
            assert decisions == before == 3
        stats = queue.stats()
        assert (stats.late_ticks, stats.router.fallback_ticks) == (3, 5)
        assert [line["event"] for line in logs] == ["policy_failed"]
        await asyncio.sleep(QueueConfig().late_pause_s)
        assert await hold(queue, 0.0) == "w0"
        assert decisions == 4
        assert not queue.stats().falling_back
        assert ends(queue.stats()) == {"completed": 9}

    run_virtual(scenario())
