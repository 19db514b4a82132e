"""How long a client of a chaos run waits: time in which this very process was not late itself.

Clients and mock workers share one event loop. On a machine short of processor time that loop is
late for seconds, with answers unread in its sockets; who then looks at the clock on the wall takes
answers that are there for missing.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TICK_S: Final = 0.05
"""A turn of the loop counts as much, however long it took."""


class Patience:
    """Ends the waiting of those who waited too long.

    Args:
        within_s: longest wait, of the loop's own time.

    Attributes:
        late_s: by how much the loop was behind the clock on the wall so far.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self.late_s = 0.0
        self._now_s = 0.0
        self._until_s: dict[asyncio.Timeout, float] = {}

    async def run(self) -> None:
        """Count time until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await asyncio.sleep(TICK_S)
            self.late_s += loop.time() - began_s - TICK_S
            self._now_s += TICK_S
            for limit, until_s in self._until_s.items():
                if self._now_s >= until_s and not limit.expired():
                    limit.reschedule(loop.time())

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Bound a block.

        Raises:
            TimeoutError: it took too long.
        """
        async with asyncio.timeout(None) as limit:
            self._until_s[limit] = self._now_s + self.within_s
            try:
                yield
            finally:
                del self._until_s[limit]
