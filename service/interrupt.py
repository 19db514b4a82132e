"""End what a task is doing for a named reason: the client left, the worker went silent.

`asyncio.timeout` with a reason and a trigger of our own. Racing tasks with `asyncio.wait` at each
chunk would cost two tasks a chunk; this costs nothing until it fires.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from service.errors import BidgateError


class Interrupt:
    """A block that `trip(reason)` ends from outside, by raising the reason inside it.

    Cancellation from elsewhere (shutdown) passes through unchanged, and blocks nest.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._reason: BidgateError | None = None

    def __enter__(self) -> Interrupt:
        """Guard the running task from here on."""
        self._task = asyncio.current_task()
        assert self._task is not None, "an Interrupt guards a task"
        self._cancelling = self._task.cancelling()
        return self

    def trip(self, reason: BidgateError) -> None:
        """End the block with this reason; the first call counts, and none after the block."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            self._task.cancel()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Turn our own cancellation into the reason."""
        task, self._task = self._task, None
        if self._reason is None or task is None:
            return
        ours = task.uncancel() <= self._cancelling
        if ours and isinstance(exc, asyncio.CancelledError):
            raise self._reason from exc


class OpenRequests:
    """The requests inside, so that all of them can be ended at once."""

    def __init__(self) -> None:
        self._interrupts: set[Interrupt] = set()

    @contextmanager
    def listed(self, interrupt: Interrupt) -> Iterator[None]:
        """List a request for a block."""
        self._interrupts.add(interrupt)
        try:
            yield
        finally:
            self._interrupts.discard(interrupt)

    def end_all(self, reason: Callable[[], BidgateError]) -> None:
        """End every one of them; each gets a reason of its own."""
        for interrupt in list(self._interrupts):
            interrupt.trip(reason())


class Watchdog:
    """Trips an interrupt when what is expected does not come in time.

    One timer per request, moved lazily: a streamed chunk costs two attribute writes, not a timer.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = math.inf
        self._deadline_s = 0.0
        self._reason: Callable[[], BidgateError] | None = None

    def expect(self, reason: Callable[[], BidgateError], within_s: float) -> None:
        """Wait for something new: trip with reason() unless `expect` or `stop` comes in time."""
        self._reason = reason
        self._deadline_s = self._now_s() + within_s
        if self._rings_s > self._deadline_s:
            self._arm()

    def stop(self) -> None:
        """Expect nothing any more."""
        self._reason = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._rings_s = math.inf

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_s = self._deadline_s
        self._timer = self._loop.call_at(self._deadline_s, self._check)

    def _check(self) -> None:
        self._timer, self._rings_s = None, math.inf
        if self._reason is None:
            return
        if self._now_s() >= self._deadline_s:
            self._interrupt.trip(self._reason())
        else:
            self._arm()
