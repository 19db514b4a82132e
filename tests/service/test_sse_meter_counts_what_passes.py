"""Tokens are counted from the bytes of a stream, however they are cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.sse import EVENT_BYTES_MAX, USAGE_BYTES_MAX, SseMeter, UsageReader, usage_tokens

DONE = b"data: [DONE]\n\n"


def pack(message: object) -> bytes:
    """One event, as vLLM writes it."""
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def text(piece: str, **choice: object) -> bytes:
    return pack({"id": "c", "choices": [{"index": 0, "text": piece, **choice}]})


def delta(finish: str | None = None, **content: object) -> bytes:
    return pack({"id": "c", "choices": [{"index": 0, "delta": content, "finish_reason": finish}]})


def usage(tokens: int) -> bytes:
    return pack({"id": "c", "choices": [], "usage": {"completion_tokens": tokens}})


def measure(*chunks: bytes) -> SseMeter:
    meter = SseMeter()
    for chunk in chunks:
        meter.feed(chunk)
    return meter


TEXT_STREAM = b"".join([*(text(piece) for piece in "abcd"), DONE])
CHAT_STREAM = b"".join(
    [
        delta(role="assistant", content=""),
        *(delta(content=piece) for piece in ("a", "\n\ndata: [DONE]", '"error":', "d")),
        delta("stop", content=""),
        usage(6),
        DONE,
    ]
)
TOOL_STREAM = b"".join(
    [
        delta(role="assistant", content=None),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"error": 1}'}}]),
        delta(reasoning_content="hm"),
        delta(content="x"),
        DONE,
    ]
)


@pytest.mark.parametrize(
    ("stream", "tokens"), [(TEXT_STREAM, 4), (CHAT_STREAM, 6), (TOOL_STREAM, 3)]
)
@given(cuts=st.lists(st.integers(0, 2000), max_size=12), crlf=st.booleans())
def test_the_count_does_not_depend_on_where_the_bytes_are_cut(
    stream: bytes, tokens: int, cuts: list[int], crlf: bool
) -> None:
    if crlf:
        stream = stream.replace(b"\n\n", b"\r\n\r\n")
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    meter = measure(*(stream[a:b] for a, b in itertools.pairwise(edges)))
    assert (meter.tokens, meter.done, meter.failed) == (tokens, True, False)
    assert not meter.mid_event


def test_one_byte_at_a_time_is_no_different() -> None:
    meter = measure(*(bytes([byte]) for byte in CHAT_STREAM))
    assert (meter.tokens, meter.done, meter.failed) == (6, True, False)


def test_a_role_alone_is_no_token() -> None:
    assert measure(delta(role="assistant", content="")).tokens == 0


def test_events_count_as_they_come() -> None:
    meter = measure(delta(role="assistant", content=""), delta(content="a"))
    assert meter.tokens == 1
    meter.feed(delta(content="b") + delta(content="c"))
    assert meter.tokens == 3


def test_running_usage_corrects_the_count() -> None:
    chunk = pack({"choices": [{"index": 0, "text": "abc"}], "usage": {"completion_tokens": 7}})
    assert measure(text("a"), chunk).tokens == 7


@pytest.mark.parametrize(
    "error",
    [
        pack({"error": {"message": "died", "code": 500}}),
        pack({"object": "error", "message": "died"}),
        b'data: { "error" : {"message": "died"}}\n\n',
    ],
)
@pytest.mark.parametrize("before", [b"", TEXT_STREAM.removesuffix(DONE)], ids=["first", "later"])
def test_an_error_event_is_seen_though_done_follows(error: bytes, before: bytes) -> None:
    meter = measure(before, error, DONE)
    assert meter.failed
    assert meter.done


@pytest.mark.parametrize("quote", ['{"error": "x"}', "data: [DONE]", '"completion_tokens":999'])
def test_what_a_model_says_is_not_taken_for_protocol(quote: str) -> None:
    meter = measure(text("a"), text(quote), text("c"))
    assert (meter.tokens, meter.done, meter.failed) == (3, False, False)


def test_comments_are_not_counted() -> None:
    assert measure(text("a"), b": keep-alive\n\n", text("b")).tokens == 2


def test_what_is_no_json_is_skipped() -> None:
    assert measure(b"data: {oops\n\n", b"data: 3\n\n", text("a")).tokens == 1


def test_an_endless_event_does_not_fill_the_memory() -> None:
    meter = SseMeter()
    for _ in range(8):
        meter.feed(b"x" * (EVENT_BYTES_MAX // 4))
    assert meter.mid_event
    meter.feed(b"\n\n" + text("a"))
    assert meter.tokens == 1


def test_the_usage_of_a_whole_answer_is_found_in_its_tail() -> None:
    body = json.dumps(
        {"choices": [{"text": '"completion_tokens":9'}], "usage": {"completion_tokens": 31}}
    )
    assert usage_tokens(body.encode()) == 31
    assert usage_tokens(b'{"usage":null}') is None
    assert usage_tokens(b'{"completion_tokens":%s}' % (b"9" * 5000)) is None


TOLD = {"prompt_tokens": 900, "completion_tokens": 123456789}


@given(
    before=st.integers(0, 9000),
    after=st.integers(0, 9000),
    cuts=st.lists(st.integers(0, 20_000), max_size=12),
    indent=st.sampled_from([None, 1]),
)
def test_usage_is_found_wherever_it_stands_and_however_it_is_cut(
    before: int, after: int, cuts: list[int], indent: int | None
) -> None:
    body = json.dumps({"a": "x" * before, "usage": TOLD, "z": "y" * after}, indent=indent).encode()
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    reader = UsageReader()
    for a, b in itertools.pairwise(edges):
        reader.feed(body[a:b])
    assert (reader.prompt_tokens, reader.decode_tokens) == (900, 123456789)


def test_usage_is_found_one_byte_at_a_time() -> None:
    reader = UsageReader()
    for byte in json.dumps({"usage": TOLD}).encode():
        reader.feed(bytes([byte]))
    assert (reader.prompt_tokens, reader.decode_tokens) == (900, 123456789)
    longest = max(f'"{name}": {number}' for name, number in TOLD.items())
    assert len(longest) < USAGE_BYTES_MAX


@pytest.mark.parametrize("before", [True, False])
def test_an_engine_that_repeats_a_clients_words_is_not_made_cheaper(before: bool) -> None:
    # A schema of a response's text or tools comes back as it was sent, beside the usage.
    planted: dict[str, object] = {"text": {"schema": {"completion_tokens": 0, "prompt_tokens": 1}}}
    usage: dict[str, object] = {"usage": TOLD}
    parts = {**planted, **usage} if before else {**usage, **planted}
    reader = UsageReader()
    reader.feed(json.dumps(parts).encode())
    assert (reader.prompt_tokens, reader.decode_tokens) == (900, 123456789)
