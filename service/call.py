"""4 forwarder, its words: what is sent to a worker, the place it has there, where answers go."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Protocol

from service.control.events import Outcome
from service.headers import RawHeaders
from service.surface import Api
from service.trace import RELAY, Trace, Untraced


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as it goes to whichever worker.

    Attributes:
        path: with a query string, if any: "/v1/completions".
        headers: cleaned by headers.to_worker, request id included.
        body: as sent; parts that come as they come can be sent only once.
        method: HTTP method.
        api: format of request and answer.
        leg: name of its span.
        trace: told how far it is.
        deadline_s: when the answer is worth nothing any more, on the loop's clock, or None.
    """

    path: str
    headers: RawHeaders
    body: bytes | AsyncIterable[bytes]
    method: str = "POST"
    api: Api = Api.TEXT
    deadline_s: float | None = None
    leg: str = RELAY
    trace: Trace = field(default_factory=Untraced)


class Place(Protocol):
    """A place at a worker: a reservation of the queue, or a light one.

    Attributes:
        worker_id: where the request goes now.
        decode_tokens: output tokens of all its sequences seen so far, or None.
        told_prompt_tokens: tokens of all its prompts by the answer's word, or None.
        outcome: how the request ends if nothing is raised.
    """

    worker_id: str
    decode_tokens: int | None
    told_prompt_tokens: int | None
    outcome: Outcome

    def first_token(self) -> None:
        """Take note of the first output token."""

    def progressed(self, decode_tokens: int, *, exact: bool = False) -> None:
        """Take note of output tokens so far, over all sequences."""

    async def returned(self) -> None:
        """Give the place back, as the worker did not take the request, and wait for another."""


class Reply(Protocol):
    """Where the response goes."""

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers."""

    async def write(self, chunk: bytes) -> None:
        """Send a part of the body; waits while the client does not read."""

    async def end(self) -> None:
        """Finish the response; a reply that is not ended is cut off."""
