"""Bodies of /v1/responses and /v1/messages: as a chat, which is what vLLM makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from service.mock.bodies import ChatBody, GenerationBody, Message, telling_mistakes

if TYPE_CHECKING:
    from collections.abc import Sequence

Content: TypeAlias = str | list[dict[str, object]]


class Item(Message):
    """One item of a response's input; what is no message counts as one without text."""

    role: str = "user"


class ResponsesBody(GenerationBody):
    """POST /v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True

    def turns(self, before: Sequence[Message]) -> list[Message]:
        """Return the conversation so far, this input included."""
        if isinstance(self.input, str):
            return [*before, Message(role="user", content=self.input)]
        return [*before, *self.input]

    def as_chat(self, turns: list[Message]) -> ChatBody:
        """Return the chat that generates the same."""
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        shared = self.model_dump(include=GenerationBody.model_fields.keys() - {"n", "max_tokens"})
        limit = self.max_output_tokens
        with telling_mistakes():
            return ChatBody(messages=system + turns, max_completion_tokens=limit, **shared)


class MessagesBody(GenerationBody):
    """POST /v1/messages, and of /v1/messages/count_tokens what it shares with that."""

    messages: list[Message]
    system: Content | None = None

    def turns(self) -> list[Message]:
        """Return the messages, the system's first."""
        system = [] if self.system is None else [Message(role="system", content=self.system)]
        return system + self.messages

    def as_chat(self) -> ChatBody:
        """Return the chat that generates the same."""
        shared = self.model_dump(include=GenerationBody.model_fields.keys() - {"n"})
        with telling_mistakes():
            return ChatBody(messages=self.turns(), **shared)
