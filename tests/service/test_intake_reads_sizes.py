"""From a body and headers the controller learns lengths, sequences, bounds and value."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import BadRequestError
from service.hints import read_headers
from service.intake import COUNT_MAX, BodyFacts, Rules, read_body
from service.prompts import MESSAGE_TOKENS, OTHER_PART_TOKENS
from service.surface import Api

AS_IT_IS = Rules(aliases={}, forward_priority=True)


def read(api: Api = Api.TEXT, **fields: object) -> BodyFacts:
    return read_raw(json.dumps(fields).encode(), api)


def read_raw(body: bytes, api: Api = Api.TEXT) -> BodyFacts:
    return read_body(body, api, AS_IT_IS)


@pytest.mark.parametrize(
    ("prompt", "tokens", "sequences"),
    [
        ("abcd", 1, 1),
        ("abcde", 2, 1),
        ("ü" * 4, 2, 1),
        ("", 1, 1),
        ([7] * 300, 300, 1),
        ([[7] * 300, [7] * 100], 200, 2),
        (["abcd", "abcdefghijkl"], 2, 2),
        ([], 1, 1),
        (None, 1, 1),
    ],
)
def test_token_ids_count_exactly_and_text_by_its_bytes(
    prompt: object, tokens: int, sequences: int
) -> None:
    facts = read(prompt=prompt)
    assert (facts.prompt_tokens, facts.sequences) == (tokens, sequences)


def test_a_chat_prompt_is_its_texts_its_parts_its_tools_and_the_template() -> None:
    messages = [
        {"role": "system", "content": "abcd"},
        {"role": "user", "content": [{"type": "text", "text": "abcdefgh"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None},
    ]
    tools = [{"type": "function"}]
    tool_tokens = -(-len(json.dumps(tools)) // 4)
    facts = read(Api.CHAT, messages=messages, tools=tools)
    assert facts.prompt_tokens == 3 * MESSAGE_TOKENS + 1 + 2 + OTHER_PART_TOKENS + tool_tokens


@pytest.mark.parametrize(
    ("chat", "fields", "limit"),
    [
        (False, {}, 16),
        (True, {}, None),
        (False, {"max_tokens": 5}, 5),
        (True, {"max_tokens": 5}, 5),
        (True, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        (True, {"max_tokens": None}, None),
    ],
)
def test_the_limit_is_what_the_engine_would_take(
    chat: bool, fields: dict[str, object], limit: int | None
) -> None:
    assert read(Api.CHAT if chat else Api.TEXT, **fields).decode_tokens_limit == limit


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({}, None),
        ({"max_tokens": 9, "ignore_eos": True}, 9),
        ({"nvext": {"agent_hints": {"osl": 40}}}, 40),
        ({"vllm_xargs": {"agentic_context": {"expected_output_length": 50}}}, 50),
        ({"nvext": {"agent_hints": {"osl": "many"}}}, None),
        ({"nvext": [1]}, None),
    ],
)
def test_a_forecast_in_the_body_is_a_hint(fields: dict[str, object], hint: int | None) -> None:
    assert read(**fields).decode_tokens_hint == hint


def test_branches_multiply_prompts() -> None:
    assert read(prompt=["a", "b"], n=3).sequences == 6
    assert read(prompt="a", n=2, best_of=5).sequences == 5


@pytest.mark.parametrize(
    "body", ['{"tools": %s}', '{"kv_transfer_params": %s}', '{"kv_transfer_params": 1, "a": %s}']
)
def test_nesting_beyond_reason_is_refused(body: str) -> None:
    with pytest.raises(BadRequestError):
        read_raw((body % ("[" * 1020 + "]" * 1020)).encode(), Api.CHAT)


def test_numbers_no_engine_can_mean_are_capped() -> None:
    huge = "1" + "0" * 400
    # Not a number is what makes the lenient parser read it, with integers of any size.
    body = '{"max_tokens": H, "n": H, "nvext": {"agent_hints": {"osl": H}}, "seed": NaN}'
    facts = read_raw(body.replace("H", huge).encode())
    assert facts.decode_tokens_limit == facts.decode_tokens_hint == facts.sequences == COUNT_MAX
    assert read_headers([(b"x-bidgate-decode-tokens", b"1e300")]).decode_tokens_hint == COUNT_MAX


@pytest.mark.parametrize(
    ("priority", "value"), [(None, 1.0), (0, 1.0), (-1, 2.0), (2, 0.25), (-99, 64.0), ("x", 1.0)]
)
def test_priority_is_vllms_lower_is_sooner(priority: object, value: float) -> None:
    assert read(priority=priority).value == value


def test_headers_carry_hints_bounds_and_tenant() -> None:
    facts = read_headers(
        [
            (b"x-bidgate-decode-tokens", b"120"),
            (b"x-bidgate-value", b"2.5"),
            (b"x-bidgate-tenant", b"team-a"),
            (b"x-bidgate-ttft-ms", b"250"),
            (b"x-bidgate-max-wait-ms", b"1500"),
        ]
    )
    assert facts.decode_tokens_hint == 120
    assert (facts.value, facts.tenant) == (2.5, "team-a")
    assert (facts.ttft_bound_s, facts.max_wait_s) == (0.25, 1.5)


def test_other_routers_headers_are_understood() -> None:
    facts = read_headers(
        [(b"x-llm-d-inference-fairness-id", b"t"), (b"x-llm-d-slo-ttft-ms", b"1000")]
    )
    assert (facts.tenant, facts.ttft_bound_s) == ("t", 1.0)


def test_without_headers_nothing_is_known() -> None:
    facts = read_headers([])
    assert (facts.decode_tokens_hint, facts.value, facts.tenant) == (None, None, "")


FIELDS = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "content",
        "text",
        "n",
        "best_of",
        "max_tokens",
        "max_completion_tokens",
        "priority",
        "stream",
        "tools",
        "nvext",
        "agent_hints",
        "osl",
        "kv_transfer_params",
        "ignore_eos",
        "min_tokens",
        "input",
        "instructions",
        "system",
        "type",
        "output",
        "token_ids",
        "sampling_params",
        "max_output_tokens",
        "prompt_embeds",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=20,
)


@given(payload=st.dictionaries(FIELDS, JSON, max_size=8), api=st.sampled_from(Api))
def test_any_json_object_is_read_or_refused_never_a_crash(
    payload: dict[str, object], api: Api
) -> None:
    body = json.dumps(payload).encode()
    try:
        facts = read_raw(body, api)
    except BadRequestError:
        return
    assert facts.prompt_tokens >= 1
    assert facts.sequences >= 1
    assert 0 < facts.value <= 64
    assert (facts.body == body) == ("kv_transfer_params" not in payload)


@given(body=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_never_a_crash(body: bytes) -> None:
    with contextlib.suppress(BadRequestError):
        read_raw(body, Api.CHAT)


def test_a_system_prompt_has_a_stable_fingerprint() -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    one = {"role": "user", "content": "What is a sheaf?"}
    other = {"role": "user", "content": "And a stalk?"}
    first = read(Api.CHAT, messages=[system, one]).fingerprint
    assert len(first) == 16
    assert read(Api.CHAT, messages=[system, other], temperature=0).fingerprint == first
    assert read(Api.CHAT, messages=[parts, other]).fingerprint == first
    longer = {"role": "system", "content": "Be brief. Be kind."}
    assert read(Api.CHAT, messages=[longer, one]).fingerprint != first
    # Only what leads the conversation is the system prompt.
    assert read(Api.CHAT, messages=[one, system]).fingerprint == ""
    assert read(prompt="Be brief.").fingerprint == ""


@pytest.mark.parametrize("content", [None, 7, [], [None, {"text": 3}], {"text": "x"}, "\ud800"])
def test_any_content_has_some_fingerprint(content: object) -> None:
    facts = read(Api.CHAT, messages=[{"role": "system", "content": content}])
    assert isinstance(facts.fingerprint, str)
