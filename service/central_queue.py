"""2 central queue: where request tasks wait; sole owner and caller of the Router.

Never calls the Router across an `await`. Time is the loop's, so a test swaps the loop. What a
decision says is not here (control), nor what is done with a placement (4 forwarder.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from service.control.events import (
    Arrived,
    Command,
    Event,
    Outcome,
    Prefilled,
    Progressed,
    Refusal,
    Request,
    Returned,
    Role,
    Start,
    WorkerGone,
    WorkerReported,
    WorkerState,
)
from service.errors import ClientGoneError, RefusedError, RouterBrokeError
from service.merged_tokens import MergedTokens
from service.placement import Placement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from structlog.typing import FilteringBoundLogger

    from service.control.config import ControlConfig
    from service.control.prices import PriceProblem, PriceSolution
    from service.control.router import Router
    from service.control.stats import RouterStats

TICK_RETRY_S: Final = 0.1
STARTS_REMEMBERED: Final = 64
PACE_WINDOW_S: Final = 30.0
RETRY_AFTER_MIN_S: Final = 1
RETRY_AFTER_MAX_S: Final = 60


class Refresher(Protocol):
    """Solves price problems away from the decision."""

    @property
    def busy(self) -> bool:
        """Whether a problem is being solved."""

    def solve(self, problem: PriceProblem, adopt: Callable[[PriceSolution], None]) -> None:
        """Solve, then call adopt on the loop; at once or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How the queue drives the router.

    Attributes:
        tick_share_max: most of the event loop's time that ticks may take, in (0, 1]; a tick that
            comes too soon after a long one waits.
        tick_late_s: a decision that takes longer than this is late.
        late_ticks_max: late decisions in a row after which requests start first come first
            served; the policy is tried again after late_pause_s.
        late_pause_s: for how long that lasts.
    """

    tick_share_max: float = 0.5
    tick_late_s: float = 0.25
    late_ticks_max: int = 3
    late_pause_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse a share or bounds that are none."""
        if not 0 < self.tick_share_max <= 1:
            raise ValueError(f"tick_share_max must be in (0, 1], got {self.tick_share_max}")
        if not (self.tick_late_s > 0 and self.late_pause_s > 0 and self.late_ticks_max >= 1):
            raise ValueError(
                "tick_late_s and late_pause_s must be positive, late_ticks_max at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The queue and its router now.

    Attributes:
        router: counters and gauges of the router, its view only.
        refused_at_door: requests turned away without entering the router (draining).
        tick_errors: ticks that raised.
        event_errors: events the router raised on.
        late_ticks: decisions of the policy that took too long.
        ticking: whether the last tick went well.
        falling_back: whether requests start first come first served, as the policy fails or is
            too slow.
        draining: whether new requests are turned away.
        held: requests inside `place` now.
    """

    router: RouterStats
    refused_at_door: int
    tick_errors: int
    event_errors: int
    late_ticks: int
    ticking: bool
    falling_back: bool
    draining: bool
    held: int

    @property
    def imbalance(self) -> int:
        """Entered minus waiting, running and ended: zero, or a request was lost or ended twice."""
        router = self.router
        ended = sum(router.ended.values()) + sum(router.refused.values())
        return router.entered - router.waiting - router.running - ended

    @property
    def usable_workers(self) -> int:
        """Workers that are up, prefill workers not counted."""
        return sum(worker.state is WorkerState.UP for worker in self.router.workers)

    @property
    def lacks_prefill(self) -> bool:
        """Whether all workers that are up need a prefill worker, and none of these is up."""
        up = [worker for worker in self.router.workers if worker.state is WorkerState.UP]
        return all(worker.role is Role.DECODE for worker in up) and not any(
            worker.state is WorkerState.UP for worker in self.router.prefillers
        )


class CentralQueue:
    """Lets request tasks wait for a worker and tells the router what happens to them.

    Attributes:
        stopwatch: seconds, for durations only; what happens when is the loop's clock.
    """

    def __init__(
        self,
        *,
        router: Router,
        refresher: Refresher,
        config: QueueConfig,
        on_tick: Callable[[float], None],
        stopwatch: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self._router = router
        self._refresher = refresher
        self._config = config
        self._on_tick = on_tick
        # uvloop's clock counts milliseconds: enough to wait by, too coarse to measure with.
        self.stopwatch = stopwatch
        self._log = log
        self._ids = itertools.count(1)
        self._held: dict[str, Placement] = {}
        self._progress: dict[str, int] = {}
        self._merged = MergedTokens()
        self._start_times_s: deque[float] = deque(maxlen=STARTS_REMEMBERED)
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._not_before_s = -math.inf
        self._draining = False
        self._ticking = True
        self._tick_errors = 0
        self._event_errors = 0
        self._fallbacks_told = (0, "")
        self._fell_back = False
        self._late_ticks = 0
        self._late_in_a_row = 0
        self._rests_until_s = -math.inf
        self._refused_at_door = 0

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[Placement]:
        """Wait for a start, hold it for the block, and end the request exactly once.

        The request id is replaced by one of our own, as clients may repeat theirs. Leaving the
        block normally ends the request as `placement.outcome`; ClientGoneError and cancellation
        end it as cancelled, any other exception as failed. A client that leaves while its request
        waits is taken out of the queue.

        Raises:
            RefusedError: the router turned the request away, which ends it as refused.
        """
        placement = self._enter(request)
        try:
            await placement.start()
            yield placement
        except (asyncio.CancelledError, GeneratorExit, ClientGoneError):
            placement.outcome = Outcome.CANCELLED
            raise
        except BaseException:
            placement.outcome = Outcome.FAILED
            raise
        finally:
            self._leave(placement)

    def publish(self, event: Event) -> None:
        """Book an event of the fleet or of a placement, and decide soon."""
        match event:
            case WorkerReported(worker_id, report):
                # The engine's own count corrects what the events of our streams showed.
                self._progress |= self._merged.reconcile(worker_id, report)
            case WorkerGone(worker_id):
                self._merged.drop_worker(worker_id)
            case _:
                pass
        with suppress(RouterBrokeError):
            self._book(event)

    def note_progress(self, request_id: str, decode_tokens: int, *, exact: bool) -> None:
        """Remember tokens per sequence for the next tick; progress alone wakes no tick.

        A busy worker yields hundreds of tokens an iteration; the decision reads them when
        something that can change it happens.
        """
        self._progress[request_id] = self._merged.note(request_id, decode_tokens, exact=exact)

    def take_back(self, request_id: str, worker_id: str) -> None:
        """Book that a started request waits again, and which worker did not take it ("": its own).

        Raises:
            RouterBrokeError: it could not be booked, so nothing would ever start the request.
        """
        self._progress.pop(request_id, None)
        self._merged.end(self._held[request_id].request)
        self._book(Returned(request_id, worker_id))

    def hold(self, request_id: str) -> None:
        """Book that a request that was prefilled ahead waits for a decode slot.

        Raises:
            RouterBrokeError: it could not be booked, so nothing would ever start the request.
        """
        self._book(Prefilled(request_id))

    def reconfigure(self, config: QueueConfig, control: ControlConfig) -> None:
        """Take other settings for queue and router; nobody inside notices."""
        self._config = config
        self._router.reconfigure(control)

    def drain(self) -> None:
        """Turn new requests away from now on; those inside end as they would."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether new requests are turned away."""
        return self._draining

    @property
    def held(self) -> int:
        """Requests inside `place` now."""
        return len(self._held)

    def close(self) -> None:
        """Stop ticking; for the end of the loop."""
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None

    async def run(self) -> None:
        """Start ticking, and stop when cancelled."""
        self._tick_soon()
        try:
            await asyncio.Event().wait()
        finally:
            self.close()

    def stats(self) -> QueueStats:
        """Read the counters of queue and router."""
        now_s = asyncio.get_running_loop().time()
        return QueueStats(
            router=self._router.stats(now_s),
            refused_at_door=self._refused_at_door,
            tick_errors=self._tick_errors,
            event_errors=self._event_errors,
            late_ticks=self._late_ticks,
            falling_back=self._fell_back or now_s < self._rests_until_s,
            ticking=self._ticking,
            draining=self._draining,
            held=len(self._held),
        )

    def retry_after_s(self) -> int:
        """In how many whole seconds those who wait now will have started, at the pace of late.

        The pace is that of the last STARTS_REMEMBERED starts within PACE_WINDOW_S, the time since
        the last one included: a queue that has stopped draining says so.
        """
        waiting = self._router.waiting
        if not waiting:
            return RETRY_AFTER_MIN_S
        now_s = asyncio.get_running_loop().time()
        recent = [start_s for start_s in self._start_times_s if start_s > now_s - PACE_WINDOW_S]
        if not recent:
            return RETRY_AFTER_MAX_S if self._start_times_s else RETRY_AFTER_MIN_S
        pace_s = (now_s - recent[0]) / len(recent)
        return min(max(RETRY_AFTER_MIN_S, math.ceil(waiting * pace_s)), RETRY_AFTER_MAX_S)

    def price(self, request: Request, worker_id: str) -> float:
        """What a request costs at a worker now: its slots and its prompt's KV for one iteration."""
        slot, kv_token = self._router.prices_of(worker_id)
        return request.sequences * (slot + request.prompt_tokens * kv_token)

    def new_turn(self) -> asyncio.Future[Command]:
        """A future the next command for a placement resolves."""
        return asyncio.get_running_loop().create_future()

    def _enter(self, request: Request) -> Placement:
        if self._draining:
            self._refused_at_door += 1
            raise RefusedError(Refusal.DRAINING, "bidgate is shutting down")
        request = replace(request, request_id=f"r{next(self._ids)}")
        placement = Placement(self, request)
        self._held[request.request_id] = placement
        try:
            self._book(Arrived(request))
        except RouterBrokeError:
            del self._held[request.request_id]
            raise
        return placement

    def _book(self, event: Event) -> None:
        """Tell the router, obey its word, and decide soon."""
        now_s = asyncio.get_running_loop().time()
        try:
            commands = self._router.handle(event, now_s)
        except Exception as error:
            self._event_errors += 1
            self._log.exception("event_failed", event_type=type(event).__name__)
            raise RouterBrokeError("the router could not book the request") from error
        finally:
            self._tick_soon()
        self._obey(commands, now_s)

    def _leave(self, placement: Placement) -> None:
        request_id = placement.request.request_id
        del self._held[request_id]
        self._progress.pop(request_id, None)
        unseen_tokens = self._merged.end(placement.request)
        if not placement.gone:
            self.publish(placement.farewell(unseen_tokens))

    def _obey(self, commands: Iterable[Command], now_s: float) -> None:
        for command in commands:
            placement = self._held.get(command.request_id)
            if placement is None:
                self._event_errors += 1
                self._log.error("command_for_unknown_request", request_id=command.request_id)
                continue
            if isinstance(command, Start):
                self._start_times_s.append(now_s)
                self._merged.start(placement.request, command.worker_id)
            placement.obey(command)

    def _tick_soon(self) -> None:
        if self._soon is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._not_before_s:
            self._soon = loop.call_soon(self._tick)
        else:
            self._soon = loop.call_at(self._not_before_s, self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.close()
        began_s = self.stopwatch()
        fault: Exception | None = None
        try:
            next_s = self._decide(loop.time())
        except Exception as error:
            self._tick_errors += 1
            fault = error
            next_s = loop.time() + TICK_RETRY_S
        news, self._ticking = self._ticking != (fault is None), fault is None
        duration_s = self.stopwatch() - began_s
        self._mind_lateness(duration_s, loop.time())
        self._not_before_s = loop.time() + duration_s * (1 / self._config.tick_share_max - 1)
        if next_s is not None:
            self._timer = loop.call_at(max(next_s, self._not_before_s), self._tick)
        # The next tick is set before anything is told: a log that cannot be written stops nothing.
        self._on_tick(duration_s)
        if news and fault is not None:
            self._log.error("tick_failed", exc_info=fault)

    def _decide(self, now_s: float) -> float | None:
        if self._progress:
            progress, self._progress = self._progress, {}
            self._obey(self._router.handle(Progressed(progress), now_s), now_s)
        self._obey(self._router.tick(now_s), now_s)
        self._tell_of_fallbacks()
        if not self._refresher.busy:
            problem = self._router.price_problem(now_s)
            if problem is not None:
                self._refresher.solve(problem, self._adopt)
        return self._router.next_tick_s(now_s)

    def _mind_lateness(self, duration_s: float, now_s: float) -> None:
        """Rest the policy for a while when its decisions take too long one after the other."""
        if duration_s <= self._config.tick_late_s:
            self._late_in_a_row = 0
            return
        self._late_ticks += 1
        self._late_in_a_row += 1
        if self._late_in_a_row >= self._config.late_ticks_max:
            self._late_in_a_row = 0
            self._rests_until_s = now_s + self._config.late_pause_s
            self._router.rest_policy(self._rests_until_s)

    def _tell_of_fallbacks(self) -> None:
        """Say that the policy failed: at the first time, and whenever the fault is another one."""
        count, fault = self._router.fallbacks
        self._fell_back = count > self._fallbacks_told[0]
        if count > self._fallbacks_told[0] and fault != self._fallbacks_told[1]:
            self._log.error("policy_failed", fault=fault, fallback_ticks=count)
        self._fallbacks_told = (count, fault)

    def _adopt(self, solution: PriceSolution) -> None:
        self._router.adopt(solution, asyncio.get_running_loop().time())
