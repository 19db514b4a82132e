"""Whatever the body, it is a checked request or a refusal, and never an error of ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import orjson
from hypothesis import given
from hypothesis import strategies as st

from service.mock.bodies import ApiError
from service.mock.protocol import MESSAGE_TOKENS, PART_TOKENS, Asked, Reader, text_tokens
from tests.mock.mock_client import unit_config

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXT = 64
reader = Reader(unit_config(context_tokens=CONTEXT))
scalars = st.none() | st.booleans() | st.integers(-5, 80) | st.floats(-2, 2) | st.text(max_size=5)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
fields = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "temperature",
        "seed",
        "stream",
        "stream_options",
        "request_id",
        "mock_decode_tokens",
    ]
)
likely = st.fixed_dictionaries(
    {"prompt": st.text(max_size=40) | st.lists(st.integers(-1, 99), max_size=70)},
    optional={
        "n": st.integers(-1, 4),
        "max_tokens": st.integers(-1, 70),
        "min_tokens": st.integers(-5, 80),
        "mock_decode_tokens": st.integers(-1, 90),
        "ignore_eos": st.booleans(),
        "temperature": st.sampled_from([0, 0.5, 1, None]),
        "stream": st.booleans(),
        "stream_options": st.none() | st.fixed_dictionaries({"include_usage": st.booleans()}),
    },
)


def read_or_refuse(read: Callable[[bytes], Asked], body: bytes) -> Asked | ApiError:
    try:
        return read(body)
    except ApiError as refusal:
        return refusal


def checked(body: bytes) -> None:
    for read in (reader.completion, reader.chat):
        answer = read_or_refuse(read, body)
        if isinstance(answer, ApiError):
            assert answer.status in (400, 404)
            assert orjson.dumps(answer.body())
        else:
            fits(answer)


def fits(asked: Asked) -> None:
    """Every sequence can be run by a worker of this context, and ends for a true reason."""
    assert asked.decodes
    assert len(asked.text_keys) == len(asked.decodes)
    for decode in asked.decodes:
        assert decode.prompt_tokens >= 1
        assert decode.decode_tokens >= 1
        assert decode.prompt_tokens + decode.decode_tokens <= CONTEXT
        assert decode.finish_reason in ("stop", "length")


@given(st.binary(max_size=60))
def test_bytes(noise: bytes) -> None:
    checked(noise)


@given(st.dictionaries(fields, anything, max_size=6))
def test_objects_of_known_fields_with_any_values(body: dict[str, object]) -> None:
    checked(orjson.dumps(body))


@given(likely)
def test_objects_that_are_almost_right(body: dict[str, object]) -> None:
    checked(orjson.dumps(body))


@given(st.text(max_size=100))
def test_text_is_a_token_for_every_four_bytes(text: str) -> None:
    tokens = text_tokens(text.encode())
    assert tokens == max(1, math.ceil(len(text.encode()) / 4))


def test_a_chat_counts_its_messages_its_texts_and_its_other_parts() -> None:
    parts = [{"type": "text", "text": "12345678"}, {"type": "image_url", "image_url": {}}]
    messages = [
        {"role": "system", "content": "1234"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts},
    ]
    asked = Reader(unit_config()).chat(orjson.dumps({"messages": messages}))
    assert asked.prompt_tokens == 3 * MESSAGE_TOKENS + 1 + 2 + PART_TOKENS
