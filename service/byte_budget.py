"""1 edge: how many bytes of request bodies may be in memory at once, over all requests.

A bound on requests alone is none on memory: ten thousand may wait, each with a body of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from service.control.displacement import Bid
from service.control.events import Refusal
from service.errors import RefusedError


class Claim:
    """What one request holds.

    Attributes:
        held: bytes of its body that are here.
        expected: of its whole body, where it said so; else 0.
        bid: tells what it is worth, if that is known before its body is; others may have to make
            room for it.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held = 0
        self.expected = 0
        self.bid: Callable[[], Bid | None] = lambda: None

    def add(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            RefusedError: there are too many already.
        """
        budget = self._budget
        if budget.held + size > budget.bytes_max:
            self._ask_for_room(size)
        if budget.held + size > budget.bytes_max:
            raise RefusedError(
                Refusal.QUEUE_FULL,
                f"the requests inside hold {budget.held} bytes already",
            )
        budget.held += size
        self.held += size

    def _ask_for_room(self, size: int) -> None:
        """Ask once for the whole body: nobody is to go for one that is refused at its end."""
        bid = self.bid()
        if bid is not None:
            budget = self._budget
            wanted = max(size, self.expected - self.held)
            budget.make_room(bid, budget.held + wanted - budget.bytes_max)

    def release(self) -> None:
        """Hold nothing any more: what was held has gone on."""
        self._budget.held -= self.held
        self.held = 0

    def counting(self, receive: Receive) -> Receive:
        """Hold every byte of a body that comes this way."""

        async def counted() -> Message:
            message = await receive()
            self.add(len(message.get("body", b"")))
            return message

        return counted


class ByteBudget:
    """Counts the bytes of bodies, from the first part that arrives until they have gone on.

    Bodies that another worker may still be offered are held to the end of the request.

    Attributes:
        bytes_max: most that may be held. held: now.
        make_room: called for a request of known worth that lacks so many bytes.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self.make_room: Callable[[Bid, int], None] = lambda _bid, _size: None

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """Hold bytes for a block; however it ends, they are given back."""
        claim = Claim(self)
        try:
            yield claim
        finally:
            claim.release()
