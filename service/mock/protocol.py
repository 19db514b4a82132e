"""Requests as vLLM takes them: limits applied, lengths settled, refusals in vLLM's words.

Differs from vLLM where a mock must: there is no tokenizer and no model, so text is counted by
rule (TEXT_BYTES_PER_TOKEN) and the output's length comes from the request or from a distribution.
"""

from __future__ import annotations

import math
import random
import zlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from service.mock.bodies import (
    ApiError,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    StreamOptions,
    parse_body,
)
from service.mock.engine import Decode
from service.mock.named_bodies import MessagesBody

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from service.mock.worker_config import MockWorkerConfig

TEXT_BYTES_PER_TOKEN: Final = 4
"""Text is one token for every four bytes of UTF-8, rounded up, and at least one."""
MESSAGE_TOKENS: Final = 4
"""What a chat template adds to each message."""
PART_TOKENS: Final = 256
"""A content part that is not text: an image, a sound."""
SEQUENCES_MAX: Final = 1024
"""Most choices of one request, over all its prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked request.

    Attributes:
        chat: whether it came as a chat.
        model: name to answer under.
        decodes: its sequences: n for each prompt.
        prompt_tokens: of all prompts, each counted once.
        text_keys: what each sequence's text is made from.
        stream: whether tokens are sent as they come.
        include_usage: whether a stream ends with its usage.
        continuous_usage: whether every chunk carries it.
        request_id: as sent in the body, or None.
        prompt_key: tells the first prompt from others.
        tells_cached: whether its usage says what was found in the prefix cache.
        kv_transfer: kv_transfer_params, or None where the worker has no connector.
        turns: the conversation, of a response that is to be stored.
    """

    chat: bool
    model: str
    decodes: tuple[Decode, ...]
    prompt_tokens: int
    text_keys: tuple[int, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    request_id: str | None
    prompt_key: int
    kv_transfer: dict[str, object] | None
    tells_cached: bool = False
    turns: tuple[Message, ...] = ()


class Reader:
    """Turns bodies into checked requests for one worker."""

    def __init__(self, config: MockWorkerConfig) -> None:
        self._config = config
        self._rng = random.Random(config.seed)
        sigma = config.decode_tokens_sigma
        self._log_mean = math.log(config.decode_tokens_mean) - sigma * sigma / 2

    def completion(self, raw: bytes) -> Asked:
        """Read a body of /v1/completions.

        Raises:
            ApiError: vLLM would refuse it.
        """
        body = parse_body(CompletionBody, raw)
        lengths, keys, texts = [], [], []
        for prompt in body.prompts():
            texts.append(prompt if isinstance(prompt, bytes) else array("i", prompt).tobytes())
            if isinstance(prompt, bytes):
                lengths.append(text_tokens(prompt))
                keys.append(zlib.crc32(prompt))
            else:
                lengths.append(len(prompt))
                keys.append(zlib.crc32(array("i", prompt)))
        if not lengths or not all(lengths):
            raise ApiError(400, "The decoder prompt cannot be empty", param="prompt")
        return self._asked(body, lengths, keys, texts)

    def chat(self, raw: bytes) -> Asked:
        """Read a body of /v1/chat/completions.

        Raises:
            ApiError: vLLM would refuse it.
        """
        return self.of_chat(parse_body(ChatBody, raw))

    def messages(self, raw: bytes) -> Asked:
        """Read a body of /v1/messages.

        Raises:
            ApiError: vLLM would refuse it.
        """
        body = parse_body(MessagesBody, raw)
        if body.max_tokens is None or not body.messages:
            raise ApiError(400, "max_tokens and messages: Field required", kind="Bad Request")
        return self.of_chat(body.as_chat())

    def of_chat(self, body: ChatBody) -> Asked:
        """Settle a chat, or what is generated as one.

        Raises:
            ApiError: vLLM would refuse it.
        """
        key = zlib.crc32(repr(body.messages).encode())
        length = sum(MESSAGE_TOKENS + _content_tokens(m.content) for m in body.messages)
        text = b"".join(f"{m.role} {m.content}".encode() for m in body.messages)
        return self._asked(body, [length], [key], [text])

    def _asked(
        self,
        body: CompletionBody | ChatBody,
        lengths: Sequence[int],
        keys: Sequence[int],
        texts: Sequence[bytes],
    ) -> Asked:
        """Check what depends on the worker, and settle every sequence's length."""
        wanted = body.wanted_tokens()
        self._check_fields(body, len(lengths))
        self._check_lengths(wanted, max(lengths))
        decodes, text_keys = [], []
        for prompt_tokens, key, text in zip(lengths, keys, texts, strict=True):
            pieces = self._pieces(text)
            room = self._config.max_model_len - prompt_tokens
            limit = room if wanted is None else min(wanted, room)
            for index in range(body.n):
                text_key = zlib.crc32(f"{key} {index} {body.seed}".encode())
                decode_tokens = min(limit, self._decode_tokens(body, limit, text_key))
                reason = "length" if decode_tokens == limit else "stop"
                decodes.append(Decode(prompt_tokens, decode_tokens, reason, pieces=pieces))
                text_keys.append(text_key)
        options = body.stream_options or StreamOptions(include_usage=False)
        return Asked(
            chat=isinstance(body, ChatBody),
            model=self._config.model,
            decodes=tuple(decodes),
            prompt_tokens=sum(lengths),
            text_keys=tuple(text_keys),
            stream=bool(body.stream),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            request_id=body.request_id,
            prompt_key=keys[0],
            kv_transfer=body.kv_transfer_params if self._config.kv_transfer else None,
            tells_cached=self._config.prefix_caching,
        )

    def _pieces(self, text: bytes) -> tuple[int, ...]:
        """Ids of the whole blocks of a prompt, each of all the text up to its end."""
        if not self._config.prefix_caching:
            return ()
        size, piece, pieces = TEXT_BYTES_PER_TOKEN * self._config.block_tokens, 0, []
        for start in range(0, len(text) - size + 1, size):
            piece = hash((piece, text[start : start + size]))
            pieces.append(piece)
        return tuple(pieces)

    def _decode_tokens(self, body: GenerationBody, limit: int, text_key: int) -> int:
        """Length the answer will have: told, else as long as allowed, else drawn.

        Draws are lognormal with the configured mean. At temperature 0 or with a seed the same
        prompt gets the same length; otherwise draws follow each other in order of arrival.
        """
        if body.mock_decode_tokens is not None:
            return body.mock_decode_tokens
        if body.ignore_eos:
            return limit
        repeatable = body.temperature == 0 or body.seed is not None
        rng = random.Random(f"{self._config.seed} {text_key}") if repeatable else self._rng
        drawn = rng.lognormvariate(self._log_mean, self._config.decode_tokens_sigma)
        return max(1, body.min_tokens, math.ceil(min(drawn, limit)))

    def _check_fields(self, body: GenerationBody, prompts: int) -> None:
        """Refuse another model, and fields whose values make no sense together."""
        if body.model is not None and body.model != self._config.model:
            message = (
                f"The model `{body.model}` does not exist. Valid aliases: {self._config.model}."
            )
            raise ApiError(404, message, kind="NotFoundError", param="model")
        if body.stream_options is not None and not body.stream:
            message = "Stream options can only be defined when `stream=True`."
            raise ApiError(400, message, param="stream_options")
        if body.temperature is not None and not body.temperature >= 0:
            raise ApiError(400, "temperature must be non-negative", param="temperature")
        if not 1 <= body.n * prompts <= SEQUENCES_MAX:
            raise ApiError(400, f"n must be in 1..{SEQUENCES_MAX}, got {body.n}", param="n")
        if body.n > 1 and body.temperature == 0:
            raise ApiError(400, f"n must be 1 when using greedy sampling, got {body.n}.", param="n")

    def _check_lengths(self, wanted: int | None, longest: int) -> None:
        """Refuse limits out of range, and prompts that leave no room for a token."""
        context = self._config.max_model_len
        if wanted is not None and not 1 <= wanted <= context:
            message = f"max_tokens must be at least 1 and at most {context}, got {wanted}."
            raise ApiError(400, message, param="max_tokens")
        if longest > context:
            message = (
                f"This model's maximum context length is {context} tokens. However, your request "
                f"has {longest} input tokens. Please reduce the length of the input."
            )
            raise ApiError(400, message, param="input_tokens")
        if longest == context:
            raise ApiError(400, "max_tokens must be at least 1, got 0.", param="max_tokens")


def text_tokens(text: bytes) -> int:
    """Tokens of a text by the documented rule."""
    return max(1, -(-len(text) // TEXT_BYTES_PER_TOKEN))


def _content_tokens(content: str | Sequence[Mapping[str, object]] | None) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return text_tokens(content.encode())
    tokens = 0
    for part in content:
        text = part.get("text")
        tokens += text_tokens(text.encode()) if isinstance(text, str) else PART_TOKENS
    return tokens
