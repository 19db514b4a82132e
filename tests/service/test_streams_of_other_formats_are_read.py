"""Streams of responses and messages are counted by their events' names; unknown ones are passed."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.sse import EVENT_BYTES_MAX, NamedEventMeter, OpaqueMeter, SseMeter, meter_of
from service.surface import Api


def event(name: str, **message: object) -> bytes:
    """One event, as vLLM writes it."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **message})}\n\n".encode()


HOSTILE = 'x\n\nevent: error\ndata: {"output_tokens":99}\n\nevent: message_stop\n'
MESSAGE = b"".join(
    [
        event("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 0}}),
        event("content_block_start", index=0),
        *(event("content_block_delta", delta={"text": piece}) for piece in ("a", HOSTILE, "c")),
        event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5}),
        event("message_stop"),
    ]
)
RESPONSE = b"".join(
    [
        event("response.created", response={"id": "resp_1", "usage": None}),
        event("response.reasoning_text.delta", delta="hm"),
        *(event("response.output_text.delta", delta=piece) for piece in ("a", HOSTILE)),
        event("response.completed", response={"usage": {"output_tokens": 7}}),
    ]
)


@pytest.mark.parametrize(("stream", "tokens"), [(MESSAGE, 5), (RESPONSE, 7)])
@given(cuts=st.lists(st.integers(0, 1500), max_size=12), crlf=st.booleans())
def test_the_count_does_not_depend_on_where_the_bytes_are_cut(
    stream: bytes, tokens: int, cuts: list[int], crlf: bool
) -> None:
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    meter = NamedEventMeter()
    for start, end in itertools.pairwise(edges):
        meter.feed(stream[start:end])
    assert (meter.tokens, meter.done, meter.failed) == (tokens, True, False)
    assert not meter.mid_event


def test_tokens_count_before_the_usage_comes() -> None:
    meter = NamedEventMeter()
    meter.feed(event("response.output_text.delta", delta="a"))
    meter.feed(event("response.output_text.delta", delta="b") + b"event: res")
    assert (meter.tokens, meter.done, meter.mid_event) == (2, False, True)


@pytest.mark.parametrize(
    ("name", "done", "failed"),
    [
        ("response.completed", True, False),
        ("response.incomplete", True, False),
        ("response.cancelled", True, False),
        ("response.failed", False, True),
        ("error", False, True),
        ("message_stop", True, False),
        ("message_delta", False, False),
        ("ping", False, False),
    ],
)
def test_a_name_says_whether_the_stream_is_over_and_how(
    name: str, done: bool, failed: bool
) -> None:
    meter = NamedEventMeter()
    meter.feed(event(name))
    assert (meter.done, meter.failed, meter.tokens) == (done, failed, 0)


def test_an_endless_event_does_not_fill_the_memory() -> None:
    meter = NamedEventMeter()
    for _ in range(3):
        meter.feed(b"data: " + b"x" * EVENT_BYTES_MAX)
    assert len(meter._rest) <= EVENT_BYTES_MAX


@pytest.mark.parametrize("cut", [b"a: 1", b"a: 1\n", b"a: 1\r\n"])
def test_of_an_unknown_stream_only_the_middle_of_an_event_is_known(cut: bytes) -> None:
    meter = OpaqueMeter()
    assert meter.done
    meter.feed(b"data: 1\n\n")
    assert not meter.mid_event
    meter.feed(cut)
    assert meter.mid_event
    meter.feed(b"\n" if cut.endswith(b"\n") else b"\r\n\r\n")
    assert not meter.mid_event or cut.endswith(b"\r\n")


@pytest.mark.parametrize("api", Api)
def test_every_format_has_a_reader_whose_error_event_others_read_too(api: Api) -> None:
    meter = meter_of(api)
    meter.feed(meter.error_event(b'{"error":{"message":"m","code":502}}'))
    assert not meter.mid_event
    assert meter.failed or isinstance(meter, OpaqueMeter)
    if isinstance(meter, SseMeter):
        assert meter.error_code == 502
