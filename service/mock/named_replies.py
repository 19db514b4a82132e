"""Answers of /v1/responses and /v1/messages: JSON, and streams whose events have names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import orjson

from service.mock.replies import word

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.mock.bodies import ApiError
    from service.mock.protocol import Asked


class AnyReply(Protocol):
    """What the server needs of an answer in any format."""

    def news(self) -> bytes:
        """Return the events of all tokens that came since the last call."""

    def closing(self) -> bytes:
        """Return the end of a stream."""

    def whole(self, kv_transfer: dict[str, object] | None = None) -> bytes:
        """Return the answer in one piece."""

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""


def named(name: str, **message: object) -> bytes:
    """One event with a name, which is its type too."""
    return f"event: {name}\ndata: ".encode() + orjson.dumps({"type": name, **message}) + b"\n\n"


class _NamedReply(ABC):
    """What both formats share: one choice, told word by word.

    Args:
        asked: the request.
        reply_id: as the client sees it.
        created_s: Unix time.
    """

    def __init__(self, asked: Asked, reply_id: str, created_s: int) -> None:
        self._asked = asked
        self._reply_id = reply_id
        self._created_s = created_s
        self._decode = asked.decodes[0]
        self._sent = 0

    def news(self) -> bytes:
        """Return the events of all tokens that came since the last call, one a token."""
        produced = self._decode.produced
        if produced == self._sent:
            return b""
        opening = b"" if self._sent else self._opening()
        words = [self._word(position) for position in range(self._sent, produced)]
        self._sent = produced
        return opening + b"".join(map(self._delta, words))

    @property
    def text(self) -> str:
        """What was generated so far."""
        return "".join(map(self._word, range(self._decode.produced)))

    def _word(self, position: int) -> str:
        return word(self._asked.text_keys[0], position).decode()

    @property
    def _cut(self) -> bool:
        return self._decode.finish_reason == "length"

    @abstractmethod
    def _opening(self) -> bytes: ...

    @abstractmethod
    def _delta(self, said: str) -> bytes: ...


class MessageReply(_NamedReply):
    """An answer to /v1/messages."""

    def closing(self) -> bytes:
        """Return the end of a stream: why it ended, and its usage."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        return (
            named("content_block_stop", index=0)
            + named("message_delta", delta=delta, usage=self._usage())
            + named("message_stop")
        )

    def whole(self, kv_transfer: dict[str, object] | None = None) -> bytes:
        """Return the answer in one piece."""
        del kv_transfer
        content = [{"type": "text", "text": self.text}]
        return orjson.dumps(self._message(content, self._stop_reason()))

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that failed."""
        return named("error", error={"type": "internal_error", "message": str(error)})

    def _opening(self) -> bytes:
        block = {"type": "text", "text": ""}
        return named("message_start", message=self._message([], None)) + named(
            "content_block_start", index=0, content_block=block
        )

    def _delta(self, said: str) -> bytes:
        return named("content_block_delta", index=0, delta={"type": "text_delta", "text": said})

    def _message(self, content: list[dict[str, str]], why: str | None) -> dict[str, object]:
        return {
            "id": self._reply_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._asked.model,
            "stop_reason": why,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop_reason(self) -> str:
        return "max_tokens" if self._cut else "end_turn"

    def _usage(self) -> dict[str, object]:
        return {"input_tokens": self._asked.prompt_tokens, "output_tokens": self._decode.produced}


class ResponseReply(_NamedReply):
    """An answer to /v1/responses.

    Args:
        asked: the request.
        reply_id: as the client sees it.
        created_s: Unix time.
        store: takes the answer's text and JSON when it is complete.
    """

    def __init__(
        self, asked: Asked, reply_id: str, created_s: int, store: Callable[[str, bytes], None]
    ) -> None:
        super().__init__(asked, reply_id, created_s)
        self._store = store
        self._events = 0

    def closing(self) -> bytes:
        """Return the end of a stream: all of it once more, as its parts and as a whole."""
        item, part = self._item("completed", [self._part()]), self._part()
        place = self._place()
        response = orjson.loads(self.whole())
        return b"".join(
            (
                self._event("response.output_text.done", text=self.text, logprobs=[], **place),
                self._event("response.content_part.done", part=part, **place),
                self._event("response.output_item.done", item=item, output_index=0),
                self._event("response.completed", response=response),
            )
        )

    def whole(self, kv_transfer: dict[str, object] | None = None) -> bytes:
        """Return the answer in one piece, and have it stored."""
        del kv_transfer
        status = "incomplete" if self._cut else "completed"
        body = orjson.dumps(self._response(status, [self._item("completed", [self._part()])]))
        self._store(self.text, body)
        return body

    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that failed."""
        return self._event("error", code=str(error.status), message=str(error), param=error.param)

    def _opening(self) -> bytes:
        begun = self._response("in_progress", [])
        part = self._part() | {"text": ""}
        return b"".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event(
                    "response.output_item.added", item=self._item("in_progress", []), output_index=0
                ),
                self._event("response.content_part.added", part=part, **self._place()),
            )
        )

    def _delta(self, said: str) -> bytes:
        return self._event("response.output_text.delta", delta=said, logprobs=[], **self._place())

    def _event(self, name: str, **message: object) -> bytes:
        self._events += 1
        return named(name, sequence_number=self._events - 1, **message)

    def _place(self) -> dict[str, object]:
        return {"item_id": f"msg_{self._reply_id}", "output_index": 0, "content_index": 0}

    def _part(self) -> dict[str, object]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": None}

    def _item(self, status: str, content: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"msg_{self._reply_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str, output: list[dict[str, object]]) -> dict[str, object]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._reply_id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "incomplete_details": cut,
            "model": self._asked.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, object]:
        prompt, produced = self._asked.prompt_tokens, self._decode.produced
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._decode.cached_tokens},
            "output_tokens": produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + produced,
        }
