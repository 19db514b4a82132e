"""/v1/responses of one worker: answers it keeps, as with VLLM_ENABLE_RESPONSES_API_STORE."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from service.mock.bodies import ApiError, Message, parse_body
from service.mock.named_bodies import ResponsesBody
from service.mock.named_replies import ResponseReply

if TYPE_CHECKING:
    from service.mock.protocol import Asked, Reader

STORED_MAX: Final = 10_000
"""Answers that are kept; a real engine keeps all of them."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A complete answer.

    Attributes:
        turns: the conversation up to its end. body: as it was sent.
    """

    turns: tuple[Message, ...]
    body: bytes


class Responses:
    """Reads requests, makes replies, and keeps the newest STORED_MAX of them.

    Args:
        reader: of chats.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def read(self, raw: bytes) -> Asked:
        """Read a body of /v1/responses.

        Raises:
            ApiError: vLLM would refuse it.
        """
        body = parse_body(ResponsesBody, raw)
        before = self.find(body.previous_response_id) if body.previous_response_id else None
        turns = body.turns(before.turns if before else ())
        asked = self._reader.of_chat(body.as_chat(turns))
        name = asked.request_id or f"resp_{uuid.uuid4().hex}"
        return replace(
            asked, request_id=name, turns=tuple(turns) if body.store is not False else ()
        )

    def reply(self, asked: Asked, _: str, created_s: int) -> ResponseReply:
        """Make the reply; its id is its own, whatever the request's header says."""
        name = asked.request_id or ""

        def store(text: str, body: bytes) -> None:
            if asked.turns:
                said = Message(role="assistant", content=text)
                self._stored[name] = Stored((*asked.turns, said), body)
                while len(self._stored) > STORED_MAX:
                    self._stored.popitem(last=False)

        return ResponseReply(asked, name, created_s, store)

    def find(self, response_id: str) -> Stored:
        """Return what is stored.

        Raises:
            ApiError: nothing under this id.
        """
        stored = self._stored.get(response_id)
        if stored is None:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(404, message, kind="invalid_request_error", param="response_id")
        return stored
