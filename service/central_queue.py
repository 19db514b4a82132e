"""2 central queue: where request tasks wait; sole owner and caller of the Router.

Never calls the Router across an `await`. Time is the loop's, so a test swaps the loop. What a
decision says is not here (control), nor what is done with a placement (4 forwarder.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
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
    Start,
    WorkerGone,
    WorkerReported,
)
from service.errors import ClientGoneError, RefusedError, RouterBrokeError
from service.lateness import Lateness
from service.merged_tokens import MergedTokens
from service.pace import Pace
from service.placement import Placement
from service.queue_stats import QueueStats
from service.trace import Untraced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from structlog.typing import FilteringBoundLogger

    from service.control.config import ControlConfig
    from service.control.displacement import Bid
    from service.control.prices import PriceSnapshot, PriceSolution
    from service.control.router import Router
    from service.queue_stats import QueueConfig
    from service.trace import Trace

TICK_RETRY_S: Final = 0.1


def _holds_nothing() -> None:
    """What a request without a body in memory gives back."""


class Refresher(Protocol):
    """Solves price problems away from the decision."""

    @property
    def busy(self) -> bool:
        """Whether a problem is being solved."""

    def solve(self, problem: PriceSnapshot, adopt: Callable[[PriceSolution], None]) -> None:
        """Solve, then call adopt on the loop; at once or later."""


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
        self._pace = Pace()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._not_before_s = -math.inf
        self._decides_since_s = 0.0
        self._draining = False
        self._ticking = True
        self._tick_errors = 0
        self._event_errors = 0
        self._fallbacks_told = (0, "")
        self._fell_back = False
        self._lateness = Lateness()
        self._refused_at_door = 0

    @asynccontextmanager
    async def place(
        self,
        request: Request,
        trace: Trace | None = None,
        release: Callable[[], None] = _holds_nothing,
    ) -> AsyncIterator[Placement]:
        """Wait for a start, hold it for the block, and end the request exactly once.

        The request id is replaced by one of our own, as clients may repeat theirs. Leaving the
        block normally ends the request as `placement.outcome`; ClientGoneError and cancellation
        end it as cancelled, any other exception as failed. A client that leaves while its request
        waits is taken out of the queue. `release` gives back the memory of its body, should the
        request have to make room.

        Raises:
            RefusedError: the router turned the request away, which ends it as refused.
        """
        placement = self._enter(request, trace or Untraced(), release)
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

    def make_room(self, bid: Bid, size: int) -> None:
        """Refuse requests that wait, hold so many bytes and are worth less than a newcomer.

        Their bytes are given back at once, for the newcomer; nobody goes where that is not enough.
        """
        now_s = asyncio.get_running_loop().time()
        commands = self._router.make_room(bid, size, now_s)
        for command in commands:
            self._held[command.request_id].release()
        self._obey(commands, now_s)

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
            late_ticks=self._lateness.late_ticks,
            falling_back=self._fell_back or now_s < self._lateness.rests_until_s,
            ticking=self._ticking,
            draining=self._draining,
            held=len(self._held),
        )

    def retry_after_s(self) -> int:
        """In how many whole seconds those who wait now will have started, at the pace of late."""
        now_s = asyncio.get_running_loop().time()
        return self._pace.retry_after_s(self._router.waiting, now_s)

    def prices_of(self, worker_id: str) -> tuple[float, float]:
        """Price of a batch slot and of a KV token at a worker now, for one iteration."""
        return self._router.prices_of(worker_id)

    def decided_for_s(self) -> float:
        """For how long the decision in progress has been going on."""
        return self.stopwatch() - self._decides_since_s

    def new_turn(self) -> asyncio.Future[Command]:
        """A future the next command for a placement resolves."""
        return asyncio.get_running_loop().create_future()

    def _enter(self, request: Request, trace: Trace, release: Callable[[], None]) -> Placement:
        if self._draining:
            self._refused_at_door += 1
            raise RefusedError(Refusal.DRAINING, "bidgate is shutting down")
        request = replace(request, request_id=f"r{next(self._ids)}")
        placement = Placement(self, request, trace, release)
        self._held[request.request_id] = placement
        try:
            self._book(Arrived(request))
        except RouterBrokeError:
            del self._held[request.request_id]
            raise
        return placement

    def _book(self, event: Event) -> None:
        """Tell the router, obey its word, and decide soon."""
        self._decides_since_s = self.stopwatch()
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
                self._pace.started(now_s)
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
        self._decides_since_s = began_s = self.stopwatch()
        fault: Exception | None = None
        try:
            next_s = self._decide(loop.time())
        except Exception as error:
            self._tick_errors += 1
            fault = error
            next_s = loop.time() + TICK_RETRY_S
        news, self._ticking = self._ticking != (fault is None), fault is None
        duration_s = self.stopwatch() - began_s
        if self._lateness.note(duration_s, loop.time(), self._config):
            self._router.rest_policy(self._lateness.rests_until_s)
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

    def _tell_of_fallbacks(self) -> None:
        """Say that the policy failed: at the first time, and whenever the fault is another one."""
        count, fault = self._router.fallbacks
        self._fell_back = count > self._fallbacks_told[0]
        if count > self._fallbacks_told[0] and fault != self._fallbacks_told[1]:
            self._log.error("policy_failed", fault=fault, fallback_ticks=count)
        self._fallbacks_told = (count, fault)

    def _adopt(self, solution: PriceSolution) -> None:
        self._router.adopt(solution, asyncio.get_running_loop().time())
