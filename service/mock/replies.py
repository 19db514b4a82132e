"""Answers in vLLM's shape: JSON, and server-sent events made by joining prepared bytes.

A token costs a few joins and no JSON encoding: a batch of requests asks for thousands a second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from service.mock.bodies import ApiError
    from service.mock.engine import Decode
    from service.mock.protocol import Asked

# Every word is one token, its blank included.
_SENTENCE: Final = (
    " a queue of short tasks moves past one long task and each slot that is free gets its next"
    " word from a list so the text reads like none but has the right length"
)
WORDS: Final[tuple[bytes, ...]] = tuple(word.encode() for word in re.findall(" [a-z]+", _SENTENCE))
DONE: Final = b"data: [DONE]\n\n"
# The stride shares no factor with the number of words, so that a text visits all of them.
_STRIDE: Final = 7


def event(message: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(message) + b"\n\n"


def word(key: int, position: int) -> bytes:
    """One token of the text that belongs to a key."""
    return WORDS[(key + _STRIDE * position) % len(WORDS)]


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None
) -> dict[str, object]:
    """Return a usage object; what was cached only where that is told."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
    }


class Reply:
    """The answer to one request, as a stream or in one piece.

    Args:
        asked: the request.
        reply_id: as the client sees it: cmpl-... or chatcmpl-...
        created_s: Unix time.
    """

    def __init__(self, asked: Asked, reply_id: str, created_s: int) -> None:
        self._asked = asked
        self._reply_id = reply_id
        self._created_s = created_s
        self._sent = [0] * len(asked.decodes)
        self._opened = not asked.chat
        self._frames = [self._frame(index) for index in range(len(asked.decodes))]

    def news(self) -> bytes:
        """Return the events of all tokens that came since the last call, one a token."""
        parts: list[bytes] = []
        for index, decode in enumerate(self._asked.decodes):
            sent = self._sent[index]
            if decode.produced > sent:
                if not self._opened:
                    self._opened = True
                    parts.append(self._opening())
                self._sent[index] = decode.produced
                self._add_tokens(parts, index, sent, decode)
        return b"".join(parts)

    def closing(self) -> bytes:
        """Return the end of a stream: usage when it was asked for, and [DONE]."""
        if not self._asked.include_usage:
            return DONE
        return event({**self._stream_head(), "choices": [], "usage": self._usage()}) + DONE

    def whole(self, kv_transfer: dict[str, object] | None = None) -> bytes:
        """Return the answer in one piece, once it is complete; with how to fetch the prompt."""
        choices = [self._choice(index) for index in range(len(self._asked.decodes))]
        return orjson.dumps(
            {
                **self._head("chat.completion"),
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": None,
                "usage": self._usage(),
                "kv_transfer_params": kv_transfer,
            }
        )

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed: as in vLLM, [DONE] follows the error."""
        return event(error.body()) + DONE

    def _usage(self) -> dict[str, object]:
        produced = sum(decode.produced for decode in self._asked.decodes)
        cached = sum(decode.cached_tokens for decode in self._asked.decodes)
        told = cached if self._asked.tells_cached else None
        return usage(self._asked.prompt_tokens, produced, told)

    def _head(self, chat_object: str) -> dict[str, object]:
        return {
            "id": self._reply_id,
            "object": chat_object if self._asked.chat else "text_completion",
            "created": self._created_s,
            "model": self._asked.model,
        }

    def _stream_head(self) -> dict[str, object]:
        return self._head("chat.completion.chunk")

    def _opening(self) -> bytes:
        """One chunk a choice that only names the speaker, as chats begin."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            event(
                {
                    **self._stream_head(),
                    "choices": [
                        {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                    ],
                }
            )
            for index in range(len(self._asked.decodes))
        )

    def _frame(self, index: int) -> tuple[bytes, bytes, bytes]:
        """Bytes around a token of a choice: before, after, and after the last one."""
        ends = []
        for reason in (None, self._asked.decodes[index].finish_reason):
            choice: dict[str, object] = {"index": index}
            choice |= {"delta": {"content": "@"}} if self._asked.chat else {"text": "@"}
            choice |= {"logprobs": None, "finish_reason": reason, "stop_reason": None}
            message: dict[str, object] = {**self._stream_head(), "choices": [choice]}
            if self._asked.continuous_usage:
                message["usage"] = "%"
            ends.append(event(message).rpartition(b'"@"'))
        (before, _, after), (_, _, after_last) = ends
        return before + b'"', b'"' + after, b'"' + after_last

    def _add_tokens(self, parts: list[bytes], index: int, sent: int, decode: Decode) -> None:
        """Append the events of a choice's new tokens."""
        before, after, after_last = self._frames[index]
        key = self._asked.text_keys[index]
        for position in range(sent, decode.produced):
            last = position + 1 == decode.decode_tokens
            tail = after_last if last else after
            if self._asked.continuous_usage:
                produced = sum(self._sent) - decode.produced + position + 1
                now = orjson.dumps(usage(self._asked.prompt_tokens, produced))
                tail = tail.replace(b'"%"', now, 1)
            parts += (before, word(key, position), tail)

    def _choice(self, index: int) -> dict[str, object]:
        decode = self._asked.decodes[index]
        key = self._asked.text_keys[index]
        words = b"".join(word(key, position) for position in range(decode.produced)).decode()
        end = {"logprobs": None, "finish_reason": decode.finish_reason, "stop_reason": None}
        if not self._asked.chat:
            return {"index": index, "text": words, **end}
        message: dict[str, object]
        message = {"role": "assistant", "content": words, "refusal": None, "tool_calls": []}
        return {"index": index, "message": message, **end}
