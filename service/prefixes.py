"""1 edge, reading: by what a prompt's beginning is known again, so that its cache can be found.

The prompt's text is cut at fixed places and every piece hashed with all before it, so equal hashes
mean equal beginnings. What else decides about sharing goes in first: model or adapter, cache salt,
format, tools, template. What cannot be told by its text (an image, a sound) ends the chain, as what
follows it is not known. Hashes are this process's own and differ in every other, so nobody can
prepare two prompts that seem equal.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

import orjson

from service.control.events import Prefix
from service.prompts import BYTES_PER_TOKEN, Payload
from service.surface import Api

STEPS: Final = ((64, 256), (64, 512), (64, 1024), (64, 4096))
"""Number and bytes of the pieces: a 16-token block is 64 bytes, and nobody gains by more places."""
CUTS: Final = tuple(
    sum(n * size for n, size in STEPS[:step]) + (place + 1) * STEPS[step][1]
    for step in range(len(STEPS))
    for place in range(STEPS[step][0])
)
HASHED_BYTES_MAX: Final = CUTS[-1]
SESSION_BYTES_MAX: Final = 256
SHARED_ONLY_IF_EQUAL: Final = (
    "cache_salt",
    "tools",
    "functions",
    "documents",
    "tool_choice",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
)
"""Fields that come before the text in the prompt, or keep caches apart."""
NEVER_CACHED: Final = ("prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens")
"""Fields for which engines look nothing up, or cut the prompt's beginning."""


def prompt_prefix(payload: Payload, api: Api, model: str, session: bytes = b"") -> Prefix | None:
    """Hash a prompt's beginning; None where it is too short, or several prompts came at once.

    A session's name counts only where the text does not tell the whole prompt.
    """
    if any(payload.get(name) is not None for name in NEVER_CACHED):
        return None
    text, whole = _text(payload, api)
    if len(text) < CUTS[0] and (whole or not session):
        return None
    kept_apart = [payload.get(name) for name in SHARED_ONLY_IF_EQUAL]
    seed = hash((model, api.value, _dumped(kept_apart)))
    if session and not whole:
        return Prefix(session=hash((seed, session[:SESSION_BYTES_MAX])) or 1)
    hashes: list[int] = []
    start = 0
    for cut in CUTS:
        if cut > len(text):
            break
        seed = hash((seed, text[start:cut]))
        hashes.append(seed)
        start = cut
    ends = tuple(cut // BYTES_PER_TOKEN for cut in CUTS[: len(hashes)])
    return Prefix(tuple(hashes), ends) if hashes else None


def _text(payload: Payload, api: Api) -> tuple[bytes, bool]:
    """The first HASHED_BYTES_MAX bytes that make the prompt, and whether they could be told."""
    parts: list[bytes] = []
    size = 0
    for part in _parts(payload, api):
        if part is None:
            return b"".join(parts), False
        parts.append(part)
        size += len(part)
        if size >= HASHED_BYTES_MAX:
            break
    return b"".join(parts)[:HASHED_BYTES_MAX], True


def _parts(payload: Payload, api: Api) -> Iterator[bytes | None]:
    """The prompt piece by piece; None for what is not known by its text, and the end then."""
    match api:
        case Api.TEXT:
            yield _one_prompt(payload.get("prompt"))
        case Api.TOKENS:
            yield _token_ids(payload.get("token_ids"))
        case Api.CHAT | Api.MESSAGES:
            yield from _content(payload.get("system"))
            yield from _messages(payload.get("messages"))
        case Api.RESPONSES:
            if payload.get("previous_response_id"):
                yield None
            yield from _content(payload.get("instructions"))
            given = payload.get("input")
            yield from _content(given) if isinstance(given, str) else _messages(given)
        case _:
            yield None


def _one_prompt(prompt: object) -> bytes | None:
    """A text or token ids; several prompts are not followed."""
    if isinstance(prompt, str):
        return prompt[:HASHED_BYTES_MAX].encode("utf-8", "surrogatepass")
    return _token_ids(prompt)


def _token_ids(ids: object) -> bytes | None:
    """Token ids as BYTES_PER_TOKEN bytes each."""
    if not isinstance(ids, list):
        return None
    try:
        return array("I", ids[: HASHED_BYTES_MAX // BYTES_PER_TOKEN]).tobytes()
    except (TypeError, OverflowError):
        return None


def _messages(messages: object) -> Iterator[bytes | None]:
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            yield None
            return
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        role = message.get("role")
        yield b"\0" + (role.encode("utf-8", "surrogatepass") if isinstance(role, str) else b"")
        yield b"\0" + (_dumped(rest) if rest else b"")
        yield from _content(message.get("content"))


def _content(content: object) -> Iterator[bytes | None]:
    """A text or a list of parts, of which only texts are followed."""
    if content is None:
        return
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            yield None
            return
        yield b"\0" + text[:HASHED_BYTES_MAX].encode("utf-8", "surrogatepass")


def _dumped(value: object) -> bytes:
    """Bytes that are equal for equal values; what orjson refuses is like nothing else."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return repr(value).encode("utf-8", "surrogatepass")
