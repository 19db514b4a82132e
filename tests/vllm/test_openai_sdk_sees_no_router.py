"""The openai SDK gets from bidgate, byte for byte, what the engine itself answers.

Temperature 0 and one request at a time, so the engine is deterministic; both sides use one worker,
with its prefix cache warm. Masked: the time of creation, and ids of tool calls, which are random.
How a stream is cut into events depends on the engine's load (tokens that come while its front end
is busy share one), so streams are compared with the direct ones by what they say, and byte for
byte with what the engine sent to bidgate for the same request.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.vllm.router import running_router
from tests.vllm.tee import running_tee

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.conftest import Fleet
    from tests.vllm.tee import Tee

BLANKS = (*(" " * count for count in range(1, 33)), "\n", "\t", "\r", "\n\n")
COLOURS = ("red", "green", "blue")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": list(COLOURS)}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint", "parameters": SCHEMA, "strict": True},
}
MESSAGES = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Which colour? Grüße, 漢字, \U0001f600."},
]
FIXED = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
COMPLETION = FIXED | {"prompt": "The licence says"}
CHAT = FIXED | {"messages": MESSAGES}
STRUCTURED = {"temperature": 0, "max_tokens": 64, "messages": MESSAGES}


@dataclass(frozen=True, slots=True)
class Side:
    """An SDK client of the engine or of bidgate, and the bytes it received."""

    sdk: openai.OpenAI
    received: list[bytes]

    def ask(self, chat: bool, **request: Any) -> bytes:
        """Send one request through the SDK; the body as it came, masked."""
        route = self.sdk.chat.completions if chat else self.sdk.completions
        answer = route.with_raw_response.create(
            model="", extra_headers={"X-Request-Id": "same"}, **request
        )
        return masked(answer.http_response.content)

    def read(self, chat: bool, **request: Any) -> tuple[bytes, list[dict[str, Any]]]:
        """Stream one request through the SDK; the masked bytes and the SDK's own events."""
        self.received.clear()
        route = self.sdk.chat.completions if chat else self.sdk.completions
        events = route.create(
            model="",
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Id": "same"},
            **request,
        )
        parsed = [event.model_dump() for event in events]
        return masked(b"".join(self.received)), parsed


class _Recording(httpx2.SyncByteStream):
    """Passes a response on and keeps its bytes."""

    def __init__(self, inner: httpx2.SyncByteStream, kept: list[bytes]) -> None:
        self._inner = inner
        self._kept = kept

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            self._kept.append(chunk)
            yield chunk

    def close(self) -> None:
        self._inner.close()


@contextmanager
def side(url: str) -> Iterator[Side]:
    """An SDK client that keeps what it receives; no retries, so that nothing is hidden."""
    received: list[bytes] = []

    def keep(response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Recording(response.stream, received)

    http = httpx2.Client(trust_env=False, timeout=60.0, event_hooks={"response": [keep]})
    base = f"{url}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, http_client=http) as sdk:
        yield Side(sdk, received)


def masked(body: bytes) -> bytes:
    """The body without what differs between two equal answers."""
    body = re.sub(rb'"created":\s*\d+', b'"created":0', body)
    return re.sub(rb"chatcmpl-tool-[0-9a-f]+", b"chatcmpl-tool-0", body)


@dataclass(frozen=True, slots=True)
class Sides:
    """One worker, asked directly and through bidgate, with a copy of what it sends to bidgate.

    Attributes:
        without_blanks: a logit bias under which random weights end a JSON value, whose grammar
            allows any number of blanks.
    """

    direct: Side
    routed: Side
    tee: Tee
    without_blanks: dict[str, int]

    def request(self, name: str) -> tuple[bool, dict[str, Any]]:
        """A request by its name: chat or completions, and the SDK's arguments."""
        chat, request = REQUESTS[name]
        structured = "tools" in request or "response_format" in request
        return chat, request | ({"logit_bias": self.without_blanks} if structured else {})


def bias_against_blanks(url: str) -> dict[str, int]:
    """Forbid every token that the engine's tokenizer makes of blanks."""
    tokens: set[int] = set()
    with httpx2.Client(trust_env=False) as http:
        for text in BLANKS:
            body = {"prompt": text, "add_special_tokens": False}
            tokens.update(http.post(f"{url}/tokenize", json=body).json()["tokens"])
    return {str(token): -100 for token in sorted(tokens)}


@pytest.fixture(scope="module")
def sides(session_fleet: Fleet) -> Iterator[Sides]:
    """The first worker, direct and behind bidgate."""
    url = session_fleet.urls[0]
    with (
        running_tee(url) as tee,
        running_router([tee.url], batch_limit=session_fleet.batch_limit) as router,
        side(url) as direct,
        side(router.url) as routed,
    ):
        yield Sides(direct, routed, tee, bias_against_blanks(url))


REQUESTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "completion": (False, COMPLETION),
    "completion with echo": (False, COMPLETION | {"echo": True}),
    "completion with logprobs": (False, COMPLETION | {"logprobs": 3}),
    "completion with stop": (False, COMPLETION | {"stop": ["e", "t"]}),
    "completions of two prompts": (False, COMPLETION | {"prompt": ["one", "two three"]}),
    "completion of token ids": (False, COMPLETION | {"prompt": [5, 6, 7, 8]}),
    "completion with n": (False, COMPLETION | {"n": 2, "seed": 3, "temperature": 0.7}),
    "chat": (True, CHAT),
    "chat with logprobs": (True, CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat with stop": (True, CHAT | {"stop": "e"}),
    "chat with n": (True, CHAT | {"n": 3, "seed": 3, "temperature": 0.7}),
    "chat with a JSON schema": (
        True,
        STRUCTURED
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    "chat with a named tool": (
        True,
        STRUCTURED
        | {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "paint"}},
        },
    ),
    "fields the SDK does not know": (
        True,
        CHAT
        | {
            "extra_body": {
                "ignore_eos": True,
                "min_tokens": 3,
                "return_token_ids": True,
                "nobody_knows_this": {"a": [1, None, "\u00fc"]},
            }
        },
    ),
}
"""chat or completions, and the SDK's arguments; every one whole and streamed."""


@pytest.mark.parametrize("name", REQUESTS)
def test_whole_answers_are_equal_byte_for_byte(sides: Sides, name: str) -> None:
    chat, request = sides.request(name)
    sides.direct.ask(chat, **request)
    wanted = sides.direct.ask(chat, **request)
    assert sides.routed.ask(chat, **request) == wanted
    answer = json.loads(wanted)
    assert answer["usage"]["completion_tokens"] > 0
    if "response_format" in request:
        assert json.loads(answer["choices"][0]["message"]["content"])["colour"] in COLOURS
    if "tools" in request:
        call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"])["colour"] in COLOURS


def told(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a stream says for each choice, however it is cut into events."""
    said: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            so_far = said.setdefault(choice["index"], {"text": "", "finish": None, "tools": ""})
            delta = choice.get("delta") or {}
            so_far["text"] += choice.get("text") or delta.get("content") or ""
            so_far["finish"] = choice.get("finish_reason") or so_far["finish"]
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                so_far["tools"] += (function["name"] or "") + (function["arguments"] or "")
    return said


@pytest.mark.parametrize("name", REQUESTS)
def test_streams_say_the_same_and_pass_byte_for_byte(sides: Sides, name: str) -> None:
    chat, request = sides.request(name)
    sides.direct.ask(chat, **request)
    _, wanted = sides.direct.read(chat, **request)
    before = len(sides.tee.event_streams())
    got_bytes, got = sides.routed.read(chat, **request)
    assert told(got) == told(wanted)
    assert got[-1]["usage"] == wanted[-1]["usage"]
    assert [masked(sent) for sent in sides.tee.event_streams()[before:]] == [got_bytes]


WRONG: dict[str, tuple[type[openai.APIStatusError], dict[str, Any]]] = {
    "a field out of range": (openai.BadRequestError, {"presence_penalty": 99}),
    "a token outside the vocabulary": (openai.BadRequestError, {"prompt": [10**6]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_the_engine_pass_unchanged(sides: Sides, name: str) -> None:
    kind, wrong = WRONG[name]
    bodies = []
    for one in (sides.direct, sides.routed):
        with pytest.raises(kind) as caught:
            one.ask(False, **(COMPLETION | wrong))
        bodies.append(caught.value.response.content)
    assert bodies[0] == bodies[1]


def test_a_prompt_longer_than_the_context_is_the_engines_to_refuse(
    sides: Sides,
) -> None:
    listed = sides.direct.sdk.models.list().data[0].model_dump()
    context_max_tokens: int = listed["max_model_len"]
    bodies = []
    for one in (sides.direct, sides.routed):
        with pytest.raises(openai.BadRequestError) as caught:
            one.ask(False, **(COMPLETION | {"prompt": [5] * (context_max_tokens + 100)}))
        bodies.append(caught.value.response.content)
    assert bodies[0] == bodies[1]


def test_an_unknown_model_is_the_same_kind_of_error(sides: Sides) -> None:
    for one in (sides.direct, sides.routed):
        with pytest.raises(openai.NotFoundError):
            one.sdk.completions.create(model="nope", prompt="x", max_tokens=1)


def test_the_models_listed_are_the_engines_own(sides: Sides) -> None:
    direct, routed = sides.direct.sdk.models.list(), sides.routed.sdk.models.list()
    assert {model.id for model in routed} == {model.id for model in direct}
