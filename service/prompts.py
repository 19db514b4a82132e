"""1 edge, reading: how long a prompt is, in every request format that generates.

Token ids count exactly. Text counts one token per 4 bytes of UTF-8, each message MESSAGE_TOKENS
for the template, and any other part (an image, a sound, a file) OTHER_PART_TOKENS, whatever its
size: a bound for common image sizes, too small for long sounds and videos.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Final, TypeAlias

from service.errors import BadRequestError
from service.surface import Api

BYTES_PER_TOKEN: Final = 4
MESSAGE_TOKENS: Final = 4
OTHER_PART_TOKENS: Final = 512

SYSTEM_ROLES: Final = ("system", "developer")
FINGERPRINT_BYTES: Final = 8

Payload: TypeAlias = dict[str, object]


def prompt_size(payload: Payload, api: Api) -> tuple[int, int]:
    """(tokens of one prompt, how many prompts) of a request.

    Several prompts have the mean length of all.

    Raises:
        BadRequestError: a list is no list.
    """
    match api:
        case Api.TEXT:
            tokens, prompts = _texts(payload)
        case Api.CHAT_BATCH:
            tokens, prompts = _conversations(payload)
        case Api.TOKENS:
            ids = payload.get("token_ids")
            tokens, prompts = (len(ids) if isinstance(ids, list) else 1), 1
        case Api.RESPONSES:
            tokens, prompts = _items(payload), 1
        case _:
            tokens, prompts = _chat(_list_of(payload, "messages")), 1
    if api is not Api.TEXT:
        tokens += _extras(payload)
    return max(1, tokens), prompts


def _texts(payload: Payload) -> tuple[int, int]:
    """Completions: str, [str], [int] or [[int]]; or embeddings, whose length is not told."""
    prompt = payload.get("prompt")
    embeds = payload.get("prompt_embeds")
    if embeds and not prompt:
        count = len(embeds) if isinstance(embeds, list) else 1
        return OTHER_PART_TOKENS, count
    if isinstance(prompt, str):
        return text_tokens(prompt), 1
    if not isinstance(prompt, list) or not prompt:
        return 1, 1
    if isinstance(prompt[0], int):
        return len(prompt), 1
    total = sum(
        text_tokens(one) if isinstance(one, str) else len(one) if isinstance(one, list) else 1
        for one in prompt
    )
    return math.ceil(total / len(prompt)), len(prompt)


def _conversations(payload: Payload) -> tuple[int, int]:
    """A batch of chats."""
    chats = _list_of(payload, "messages")
    total = sum(_chat(chat) for chat in chats if isinstance(chat, list))
    return math.ceil(total / max(1, len(chats))), max(1, len(chats))


def _chat(messages: list[object]) -> int:
    return sum(MESSAGE_TOKENS + _content_tokens(message) for message in messages)


def _content_tokens(message: object) -> int:
    """Tokens of a chat message: its content, and the calls of tools that it repeats."""
    if not isinstance(message, dict):
        return 0
    calls = message.get("tool_calls")
    tokens = text_tokens(as_text(calls)) if calls else 0
    return tokens + _parts_tokens(message.get("content"))


def _parts_tokens(content: object) -> int:
    if isinstance(content, str):
        return text_tokens(content)
    if not isinstance(content, list):
        return 0
    return sum(_part_tokens(part) for part in content)


def _part_tokens(part: object) -> int:
    """Text, a tool's result with parts of its own, a call of a tool, or something to look at."""
    if isinstance(part, str):
        return text_tokens(part)
    if not isinstance(part, dict):
        return OTHER_PART_TOKENS
    for name in ("text", "thinking", "refusal"):
        text = part.get(name)
        if isinstance(text, str):
            return text_tokens(text)
    if part.get("type") == "tool_result":
        return _parts_tokens(part.get("content"))
    if part.get("type") == "tool_use":
        return text_tokens(as_text(part.get("input")))
    return OTHER_PART_TOKENS


def _items(payload: Payload) -> int:
    """Responses: a text, or items of which messages are one kind."""
    given = payload.get("input")
    if isinstance(given, str):
        return MESSAGE_TOKENS + text_tokens(given)
    if given is not None and not isinstance(given, list):
        raise BadRequestError("input must be a string or a list", param="input")
    return sum(MESSAGE_TOKENS + _item_tokens(item) for item in given or ())


def _item_tokens(item: object) -> int:
    if not isinstance(item, dict):
        return 0
    if item.get("content") is not None:
        return _parts_tokens(item["content"])
    told = (item.get(name) for name in ("arguments", "output", "summary"))
    return sum(_parts_tokens(one) for one in told)


def _extras(payload: Payload) -> int:
    """Instructions and descriptions of tools, which templates write into the prompt."""
    tokens = sum(_parts_tokens(payload.get(name)) for name in ("system", "instructions"))
    for name in ("tools", "functions", "documents"):
        if payload.get(name):
            tokens += text_tokens(as_text(payload[name]))
    return tokens


def _list_of(payload: Payload, name: str) -> list[object]:
    value = payload.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequestError(f"{name} must be a list", param=name)
    return value


def text_tokens(text: str) -> int:
    """Tokens of a text by the documented rule."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return math.ceil(size / BYTES_PER_TOKEN)


def as_text(value: object) -> str:
    """Write as JSON what orjson may refuse.

    Raises:
        BadRequestError: it is nested more deeply than json writes.
    """
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise BadRequestError("the request body is nested too deeply") from error


def system_fingerprint(payload: Payload) -> str:
    """A stable hash of the system prompt, under which answers' lengths are pooled; "" for none.

    It is what leads the messages as system or developer, or stands beside them as instructions.
    """
    messages = payload.get("messages")
    told = [payload.get("instructions"), payload.get("system")]
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict) or message.get("role") not in SYSTEM_ROLES:
            break
        told.append(message.get("content"))
    texts = [text for content in told for text in _told(content)]
    if not texts:
        return ""
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(joined, digest_size=FINGERPRINT_BYTES).hexdigest()


def _told(content: object) -> list[str]:
    """The text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return [content] if content else []
    parts = content if isinstance(content, list) else []
    found = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in found if isinstance(text, str)]
