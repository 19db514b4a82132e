"""1 edge, reading: what a completions request says about its own size, value and bounds.

The body passes on byte for byte; here it is parsed once, and only for what the controller needs.
Prompt length: token-id prompts count exactly, text as one token per 4 bytes of UTF-8, any other
part of a message (an image) as OTHER_PART_TOKENS, and each message MESSAGE_TOKENS for the
template. Several prompts, or n > 1, are parallel sequences of the mean prompt length.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import orjson

from service.errors import BadRequestError
from service.headers import RawHeaders

BYTES_PER_TOKEN: Final = 4
MESSAGE_TOKENS: Final = 4
OTHER_PART_TOKENS: Final = 512
COMPLETIONS_MAX_TOKENS: Final = 16
"""What vLLM generates for /v1/completions when max_tokens is missing."""
PRIORITY_STEPS_MAX: Final = 6
VALUE_MAX: Final = 2.0**PRIORITY_STEPS_MAX
TENANT_CHARS_MAX: Final = 128
COUNT_MAX: Final = 2**31
"""Larger numbers of tokens or sequences tell the controller nothing; the engine judges them."""

Payload: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFacts:
    """What the body says.

    Attributes:
        model: name asked for, "" when missing (the worker's own then).
        streams: whether the client wants server-sent events.
        prompt_tokens: estimate of one sequence's prompt.
        sequences: parallel sequences.
        decode_tokens_limit: most output tokens of one sequence, or None.
        decode_tokens_hint: a forecast of them, or None.
        value: from the body's `priority`, as vLLM means it: lower is sooner, each step doubles.
        body: bytes to send on; the client's own unless a field had to go.
    """

    model: str
    streams: bool
    prompt_tokens: int
    sequences: int
    decode_tokens_limit: int | None
    decode_tokens_hint: int | None
    value: float
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFacts:
    """What the headers say; they win over the body.

    Attributes:
        decode_tokens_hint: x-bidgate-decode-tokens, a forecast of the output length.
        value: x-bidgate-value, multiplies the reward; (0, 64].
        tenant: x-bidgate-tenant, or llm-d's x-llm-d-inference-fairness-id.
        ttft_bound_s: x-bidgate-ttft-ms, or llm-d's x-llm-d-slo-ttft-ms; in seconds.
        max_wait_s: x-bidgate-max-wait-ms; in seconds.
    """

    decode_tokens_hint: int | None
    value: float | None
    tenant: str
    ttft_bound_s: float | None
    max_wait_s: float | None


def read_headers(headers: RawHeaders) -> HeaderFacts:
    """Read the hints among the request headers.

    Raises:
        BadRequestError: one of ours is not a positive number.
    """
    named = dict(headers)
    tenant = named.get(b"x-bidgate-tenant") or named.get(b"x-llm-d-inference-fairness-id", b"")
    tokens = _header_number(named, b"x-bidgate-decode-tokens")
    value = _header_number(named, b"x-bidgate-value")
    ttft_ms = _header_number(named, b"x-bidgate-ttft-ms", b"x-llm-d-slo-ttft-ms")
    wait_ms = _header_number(named, b"x-bidgate-max-wait-ms")
    return HeaderFacts(
        decode_tokens_hint=None if tokens is None else math.ceil(min(tokens, COUNT_MAX)),
        value=None if value is None else min(value, VALUE_MAX),
        tenant=tenant.decode("latin-1")[:TENANT_CHARS_MAX],
        ttft_bound_s=None if ttft_ms is None else ttft_ms / 1e3,
        max_wait_s=None if wait_ms is None else wait_ms / 1e3,
    )


def read_body(body: bytes, *, chat: bool) -> BodyFacts:
    """Parse a request body and read what it says.

    Raises:
        BadRequestError: not JSON, not an object, or a field no engine can accept.
    """
    payload = _parse(body)
    model = payload.get("model", "")
    if not isinstance(model, str):
        raise BadRequestError("model must be a string", param="model")
    prompt_tokens, prompts = _chat_prompt(payload) if chat else _completions_prompt(payload)
    limit = _limit(payload, chat=chat)
    return BodyFacts(
        model=model,
        streams=payload.get("stream") is True,
        prompt_tokens=prompt_tokens,
        sequences=prompts * _branches(payload),
        decode_tokens_limit=limit,
        decode_tokens_hint=_hint(payload, limit),
        value=_value(payload.get("priority")),
        body=_without_kv_transfer(payload, body),
    )


def _parse(body: bytes) -> Payload:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        payload = _parse_as_python(body)
    if not isinstance(payload, dict):
        raise BadRequestError("the request body must be a JSON object")
    return payload


def _parse_as_python(body: bytes) -> object:
    """Parse what orjson refuses but engines accept: 1e400, NaN, lone surrogates."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request body is not valid JSON: {error}") from error


def _as_text(value: object) -> str:
    """Write as JSON what orjson may refuse; it reads deeper nesting than json writes."""
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise BadRequestError("the request body is nested too deeply") from error


def _chat_prompt(payload: Payload) -> tuple[int, int]:
    messages = payload.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise BadRequestError("messages must be a list", param="messages")
    tokens = sum(MESSAGE_TOKENS + _content_tokens(message) for message in messages or ())
    for extra in ("tools", "functions"):
        if payload.get(extra):
            tokens += _text_tokens(_as_text(payload[extra]))
    return max(1, tokens), 1


def _content_tokens(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return _text_tokens(content)
    if not isinstance(content, list):
        return 0
    return sum(_part_tokens(part) for part in content)


def _part_tokens(part: object) -> int:
    text = part.get("text") if isinstance(part, dict) else part
    return _text_tokens(text) if isinstance(text, str) else OTHER_PART_TOKENS


def _completions_prompt(payload: Payload) -> tuple[int, int]:
    """Tokens of one prompt and how many there are; str, [str], [int] or [[int]]."""
    prompt = payload.get("prompt")
    if isinstance(prompt, str):
        return max(1, _text_tokens(prompt)), 1
    if not isinstance(prompt, list) or not prompt:
        return 1, 1
    if isinstance(prompt[0], int):
        return len(prompt), 1
    total = sum(
        _text_tokens(one) if isinstance(one, str) else len(one) if isinstance(one, list) else 1
        for one in prompt
    )
    return max(1, math.ceil(total / len(prompt))), len(prompt)


def _text_tokens(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return math.ceil(size / BYTES_PER_TOKEN)


def _limit(payload: Payload, *, chat: bool) -> int | None:
    """The most tokens asked for; the newer name wins, as in the engines."""
    for name in ("max_completion_tokens", "max_tokens"):
        limit = _positive(payload, name)
        if limit is not None:
            return limit
    return None if chat else COMPLETIONS_MAX_TOKENS


def _branches(payload: Payload) -> int:
    return max(_positive(payload, "n") or 1, _positive(payload, "best_of") or 1)


def _positive(payload: Payload, name: str) -> int | None:
    number = payload.get(name)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise BadRequestError(f"{name} must be an integer of at least 1", param=name)
    return min(number, COUNT_MAX)


def _hint(payload: Payload, limit: int | None) -> int | None:
    """A forecast in the body: certain with ignore_eos, else the peers' fields."""
    if payload.get("ignore_eos") is True and limit is not None:
        return limit
    for path in (
        ("nvext", "agent_hints", "osl"),
        ("vllm_xargs", "agentic_context", "expected_output_length"),
    ):
        found: object = payload
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, int) and not isinstance(found, bool) and found >= 1:
            return min(found, COUNT_MAX)
    return None


def _value(priority: object) -> float:
    if not isinstance(priority, int) or isinstance(priority, bool):
        return 1.0
    return 2.0 ** -min(max(priority, -PRIORITY_STEPS_MAX), PRIORITY_STEPS_MAX)


def _without_kv_transfer(payload: Payload, body: bytes) -> bytes:
    """Take out kv_transfer_params, the one field that lets a client kill a decode engine."""
    if "kv_transfer_params" not in payload:
        return body
    exact = _parse_as_python(body)
    assert isinstance(exact, dict), "it was an object a moment ago"
    del exact["kv_transfer_params"]
    return _as_text(exact).encode()


def _header_number(headers: dict[bytes, bytes], *names: bytes) -> float | None:
    name = next((name for name in names if name in headers), None)
    if name is None:
        return None
    try:
        number = float(headers[name])
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise BadRequestError(f"header {name.decode()} must be a positive number")
    return number
