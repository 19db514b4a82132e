"""Whether a client of a chaos run got the text of its own prompt.

A mock worker's text follows from the prompt alone. A decode worker that fetched another prompt's
memory, or memory that was gone, answers with other text under status 200, as real engines do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from loadgen.chaos_plan import Kind
from loadgen.chaos_requests import generating_body
from service.mock.profiles import UNIT
from service.mock.protocol import Reader
from service.mock.replies import word
from service.mock.worker_config import MockWorkerConfig

if TYPE_CHECKING:
    from loadgen.chaos_plan import PlannedRequest

CHATS: Final = frozenset({Kind.CHAT, Kind.CHAT_STREAM})
CHECKED: Final = CHATS | {Kind.WHOLE, Kind.STREAM, Kind.LONG, Kind.TOKEN_IDS, Kind.TENANT}
"""Kinds that can be split into prefill and decode."""
DATA: Final = b"data: "
DONE: Final = b"[DONE]"


def wrong_text(request: PlannedRequest, body: bytes) -> bool:
    """Whether a whole answer has another text than the prompt's own."""
    return request.kind in CHECKED and _said(body) != expected_text(request)


def expected_text(request: PlannedRequest) -> str:
    """The text that belongs to a prompt."""
    reader = Reader(MockWorkerConfig(profile=UNIT))
    read = reader.chat if request.kind in CHATS else reader.completion
    asked = read(orjson.dumps(generating_body(request)))
    key, tokens = asked.text_keys[0], asked.decodes[0].decode_tokens
    return b"".join(word(key, position) for position in range(tokens)).decode()


def _said(body: bytes) -> str:
    """The text of an answer, whole or streamed, of a completion or a chat."""
    parts = [body] if body.startswith(b"{") else body.split(DATA)[1:]
    messages = [orjson.loads(part) for part in parts if part.strip() != DONE]
    return "".join(_text(choice) for one in messages for choice in one["choices"])


def _text(choice: dict[str, object]) -> str:
    inner = choice.get("message") or choice.get("delta")
    text = inner.get("content") if isinstance(inner, dict) else choice.get("text")
    return text if isinstance(text, str) else ""
