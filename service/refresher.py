"""Price refreshes away from the decision: solve an immutable snapshot, hand the prices back.

The queue asks (central_queue.Refresher) and adopts; decisions never wait for a refresh. A refresh
that fails is counted and the old prices stay.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from service.control.prices import PriceSnapshot, PriceSolution

    Adopt = Callable[[PriceSolution], None]


class InlineRefresher:
    """Solves at once, for virtual time: the simulator's order of events."""

    busy = False

    def solve(self, problem: PriceSnapshot, adopt: Adopt) -> None:
        """Solve and adopt before returning."""
        adopt(problem.solve())


class ThreadRefresher:
    """Solves one problem at a time in one thread of its own; `run` must be running.

    Attributes:
        failures: refreshes that raised.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self.failures = 0
        self._log = log
        self._inbox: asyncio.Queue[tuple[PriceSnapshot, Adopt]] = asyncio.Queue(maxsize=1)
        self._solving = False

    @property
    def busy(self) -> bool:
        """Whether a problem waits or is being solved."""
        return self._solving or self._inbox.full()

    def solve(self, problem: PriceSnapshot, adopt: Adopt) -> None:
        """Take a problem; only when not busy."""
        self._inbox.put_nowait((problem, adopt))

    async def run(self) -> None:
        """Solve what comes, until cancelled."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prices") as thread:
            while True:
                problem, adopt = await self._inbox.get()
                self._solving = True
                try:
                    await self._refresh(thread, problem, adopt)
                finally:
                    self._solving = False

    async def _refresh(
        self, thread: ThreadPoolExecutor, problem: PriceSnapshot, adopt: Adopt
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            adopt(await loop.run_in_executor(thread, problem.solve))
        except Exception:
            self.failures += 1
            self._log.exception("price_refresh_failed", failures=self.failures)
