"""2 central queue, one request's reservation: waits for the router's word, reports what follows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from service.control.events import (
    Command,
    Event,
    FirstToken,
    Left,
    Outcome,
    Prefill,
    Prefilled,
    PrefillFailed,
    Refuse,
    Request,
    Start,
)
from service.errors import RefusedError
from service.trace import Trace


class Desk(Protocol):
    """What a placement needs of the queue that made it.

    Attributes:
        stopwatch: seconds, for durations.
    """

    stopwatch: Callable[[], float]

    def new_turn(self) -> asyncio.Future[Command]:
        """A future for the next command."""

    def publish(self, event: Event) -> None:
        """Book an event, and decide soon."""

    def note_progress(self, request_id: str, decode_tokens: int, *, exact: bool) -> None:
        """Remember tokens per sequence."""

    def take_back(self, request_id: str, worker_id: str) -> None:
        """Let a started request wait again; `worker_id` did not take it, or its worker if empty."""

    def hold(self, request_id: str) -> None:
        """Let a request that was prefilled ahead wait for a decode slot."""

    def retry_after_s(self) -> int:
        """When a refused client may try again."""

    def prices_of(self, worker_id: str) -> tuple[float, float]:
        """Price of a batch slot and of a KV token at a worker, for one iteration."""

    def decided_for_s(self) -> float:
        """For how long the decision has been going on that gave the present command."""


class Placement:
    """One request's reservation, from its arrival until `place` is left.

    Attributes:
        request: as the router knows it.
        worker_id: where it was started last; "" while it is prefilled ahead of a start.
        prefill_id: the prefill worker that is to compute its prompt for that start, or did; ""
            where the worker does all of it.
        prefill_due: whether it is still to do so.
        queued_s: time spent waiting for a start so far, seconds.
        starts: how often it was started; more than one after `returned`.
        first_token_s: when the first output token was seen, or None.
        decode_tokens: output tokens of all its sequences seen so far, or None.
        told_prompt_tokens: tokens of all its prompts by the answer's word, or None.
        column_tokens: output tokens that were set aside for it when it was started last.
        outcome: how it will end if the block is left without an exception.
        prices: of a batch slot and of a KV token where it was started last, when it was.
        release: gives back the memory of its body; called when it has to make room.
    """

    def __init__(
        self, desk: Desk, request: Request, trace: Trace, release: Callable[[], None]
    ) -> None:
        self.request = request
        self.worker_id = ""
        self.prefill_id = ""
        self.prefill_due = False
        self.queued_s = 0.0
        self.starts = 0
        self.first_token_s: float | None = None
        self.decode_tokens: int | None = None
        self.told_prompt_tokens: int | None = None
        self.column_tokens = 0
        self.outcome = Outcome.COMPLETED
        self.gone = False
        self.prices = (0.0, 0.0)
        self.release = release
        self._desk = desk
        self._trace = trace
        self._turn: asyncio.Future[Command] = desk.new_turn()

    def first_token(self) -> None:
        """Report the first output token."""
        self.first_token_s = asyncio.get_running_loop().time()
        self._desk.publish(FirstToken(self.request.request_id))

    def progressed(self, decode_tokens: int, *, exact: bool = False) -> None:
        """Report output tokens seen so far, over all sequences; booked with the next tick.

        Args:
            decode_tokens: so many.
            exact: whether the engine counted them, and not its events.
        """
        self.decode_tokens = decode_tokens
        tokens = self._per_sequence(decode_tokens)
        self._desk.note_progress(self.request.request_id, tokens, exact=exact)

    def price(self) -> float:
        """What its slots and its prompt's KV cost where it was started, for one iteration."""
        slot, kv_token = self.prices
        return self.request.sequences * (slot + self.request.prompt_tokens * kv_token)

    async def prefilled(self) -> None:
        """Report that the prompt is computed; wait for a decode slot where it has none yet.

        A wait that is too long ends with a start whose prefill is due again.

        Raises:
            RefusedError: the router turned the request away meanwhile.
        """
        self.prefill_due = False
        if self.worker_id:
            self._desk.publish(Prefilled(self.request.request_id))
            return
        self._turn = self._desk.new_turn()
        self._desk.hold(self.request.request_id)
        await self.start()

    def prefill_failed(self, *, kept: bool) -> None:
        """Report that the prefill came to nothing; `kept`: its worker may hold KV memory for it."""
        self.prefill_due = False
        self._desk.publish(PrefillFailed(self.request.request_id, kept))

    async def returned(self, worker_id: str = "") -> None:
        """Give the start back, as a worker did not take the request, and wait for another.

        Args:
            worker_id: the prefill worker that did not; "" for the one it was started on.

        Raises:
            RefusedError: when the router turns the request away instead.
        """
        self._turn = self._desk.new_turn()
        self._desk.take_back(self.request.request_id, worker_id)
        await self.start()

    async def start(self) -> None:
        """Wait for the router's word; `place` and `returned` call it."""
        stopwatch = self._desk.stopwatch
        since_s = stopwatch()
        self._trace.waits()
        try:
            command = await self._turn
        finally:
            self._trace.waited()
            self.queued_s += stopwatch() - since_s
        match command:
            case Start(
                worker_id=worker_id, prefill_id=prefill_id, handed=handed, decode_tokens=tokens
            ):
                self.worker_id, self.prefill_due = worker_id, bool(prefill_id)
                self.prefill_id = self.prefill_id if handed else prefill_id
                self.starts += 1
                self.column_tokens = tokens
            case Prefill(worker_id=prefill_id):
                self.worker_id, self.prefill_id, self.prefill_due = "", prefill_id, True
            case Refuse(reason=reason, detail=detail):
                raise RefusedError(reason, detail, retry_after_s=self._desk.retry_after_s())

    def obey(self, command: Command) -> None:
        """Take the router's word; a task that was cancelled meanwhile does not hear it."""
        self.gone = isinstance(command, Refuse)
        if isinstance(command, Start):
            self.prices = self._desk.prices_of(command.worker_id)
        self._trace.decided(command, self._desk.decided_for_s(), self.price())
        if not self._turn.done():
            self._turn.set_result(command)

    def farewell(self, unseen_tokens: int = 0) -> Left:
        """The one event that ends this request in the router's books.

        Args:
            unseen_tokens: of each sequence, that came in shared events.
        """
        seen = None
        if self.decode_tokens is not None:
            seen = self._per_sequence(self.decode_tokens) + unseen_tokens
        return Left(self.request.request_id, self.outcome, seen)

    def _per_sequence(self, decode_tokens: int) -> int:
        return math.ceil(decode_tokens / self.request.sequences)
