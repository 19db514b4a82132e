"""An event loop whose clock jumps to the next timer: hours of a service's life in milliseconds.

For tests without real sockets. Where nothing is ready and no timer is set, the test has hung, and
says so at once.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_Result = TypeVar("_Result")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Lets the loop's clock pass instead of waiting."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: nothing is ready and no timer is set")
        self.loop.now_s += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that never waits; time() starts at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run_virtual(scenario: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a scenario to its end on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)
