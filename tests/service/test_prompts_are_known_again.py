"""By their text: equal beginnings have equal hashes, and what keeps caches apart has not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.events import Prefix
from service.engine_metrics import parse_engine_page
from service.engine_reports import EngineReports
from service.intake import Rules, read_body
from service.prefixes import CUTS, HASHED_BYTES_MAX, prompt_prefix
from service.surface import Api
from service.worker_config import WorkerConfig

LONG = "The quick brown fox jumps over the lazy dog. " * 100
SYSTEM = {"role": "system", "content": LONG}


def chat(*messages: dict[str, object], **fields: object) -> Prefix | None:
    """The prefix of a chat."""
    return prompt_prefix({"messages": list(messages), **fields}, Api.CHAT, "m")


def user(content: object) -> dict[str, object]:
    """What a user says."""
    return {"role": "user", "content": content}


def common(one: Prefix | None, other: Prefix | None) -> int:
    """Chunks that two prompts have in common."""
    assert one is not None
    assert other is not None
    pairs = zip(one.hashes, other.hashes, strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.hashes, other.hashes)))
    )


def test_the_next_turn_of_a_chat_begins_as_the_last_one() -> None:
    """All chunks of a turn are the first ones of the next."""
    turn = chat(SYSTEM, user("hello"))
    answered = chat(SYSTEM, user("hello"), {"role": "assistant", "content": "hi"}, user(LONG))
    assert turn is not None
    assert common(turn, answered) == len(turn.hashes) > 10
    assert turn.ends[-1] <= len(LONG) // 4 + 8


def test_different_questions_share_the_system_prompt_alone() -> None:
    """And nothing behind the first difference."""
    one, other = chat(SYSTEM, user("a" * 5000)), chat(SYSTEM, user("b" * 5000))
    shared = common(one, other)
    assert 0 < shared * 256 <= len(LONG) + 20


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "other"},
        {"tools": [{"type": "function"}]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_special_tokens": False},
    ],
)
def test_what_keeps_caches_apart_changes_every_hash(change: dict[str, object]) -> None:
    """A salt, tools, a template."""
    assert common(chat(SYSTEM), chat(SYSTEM, **change)) == 0


def test_models_and_adapters_and_formats_never_share() -> None:
    """Two adapters of one model have different caches."""
    payload = {"prompt": LONG, "messages": [user(LONG)]}
    prefixes = [
        prompt_prefix(payload, api, model)
        for api, model in ((Api.TEXT, "m"), (Api.TEXT, "adapter"), (Api.CHAT, "m"))
    ]
    assert len({prefix.hashes[0] for prefix in prefixes if prefix}) == 3


def test_an_alias_shares_with_the_model_it_stands_for() -> None:
    """They are one model."""
    rules = Rules(aliases={"nick": "m"}, forward_priority=True)
    one, other = (
        read_body(json.dumps({"model": name, "prompt": LONG}).encode(), Api.TEXT, rules).prefix
        for name in ("nick", "m")
    )
    assert one is not None
    assert one == other


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "http://x/1"}}, 7, {}])
def test_what_is_no_text_ends_the_chain(part: object) -> None:
    """The picture behind a URL may be another one tomorrow: no false hit."""
    one = chat(SYSTEM, user([part, {"type": "text", "text": LONG}]))
    assert one is not None
    assert one == chat(SYSTEM, user([part, {"type": "text", "text": "b" * 9000}]))
    assert one.ends[-1] * 4 <= len(LONG) + 20


def test_a_session_tells_what_text_cannot() -> None:
    """Only then; a text is believed more than a name."""
    picture = {"messages": [user([{"type": "image_url"}])]}
    named = [prompt_prefix(picture, Api.CHAT, "m", name) for name in (b"a", b"a", b"b")]
    assert named[0] == named[1] != named[2]
    assert named[0] is not None
    assert named[0].session
    assert prompt_prefix({"prompt": LONG}, Api.TEXT, "m", b"a") == prompt_prefix(
        {"prompt": LONG}, Api.TEXT, "m"
    )
    assert prompt_prefix(picture, Api.CHAT, "m") is None


@pytest.mark.parametrize(
    "payload",
    [
        {"prompt": "short"},
        {"prompt": [LONG, LONG]},
        {"prompt": [[1] * 500]},
        {"prompt": [-1] * 500},
        {"prompt": [2**70] * 500},
        {"prompt": LONG, "prompt_logprobs": 0},
        {"prompt": LONG, "truncate_prompt_tokens": 5},
        {},
    ],
)
def test_what_engines_do_not_share_has_no_prefix(payload: dict[str, object]) -> None:
    """Short, several, senseless, or computed anew in any case."""
    assert prompt_prefix(payload, Api.TEXT, "m") is None


def test_token_ids_are_known_again() -> None:
    """Four bytes an id: the same places as for text."""
    one = prompt_prefix({"prompt": list(range(900))}, Api.TEXT, "m")
    other = prompt_prefix({"prompt": [*range(800), *[7] * 100]}, Api.TEXT, "m")
    assert common(one, other) == 800 * 4 // 256


def test_the_work_is_bounded_however_long_the_prompt() -> None:
    """What is longer than all places is known by its beginning."""
    prefix = prompt_prefix({"prompt": "x" * 3 * HASHED_BYTES_MAX}, Api.TEXT, "m")
    assert prefix is not None
    assert len(prefix.hashes) == len(CUTS) == 256


@given(st.recursive(st.none() | st.text() | st.integers() | st.floats(), st.lists, max_leaves=8))
def test_no_message_breaks_the_hash(content: object) -> None:
    """Whatever JSON can hold."""
    message = {"role": content, "content": content, "more": content}
    for api in Api:
        prompt_prefix(
            {"messages": [message], "input": [message], "prompt": content}, api, "m", b"s"
        )


def test_an_engines_counters_become_what_came_since_the_last_page() -> None:
    """Queries and hits, in vLLM's names; absent is not zero; a fall is a restart."""
    reports = EngineReports(WorkerConfig(worker_id="w", url="http://w", batch_limit=8))
    page = (
        'vllm:prefix_cache_queries_total{{engine="0"}} {}\n'
        'vllm:prefix_cache_hits_total{{engine="0"}} {}\n'
    )
    told = [
        reports.report(parse_engine_page(page.format(*counts).encode()))
        for counts in ((100, 10), (300, 110), (50, 0))
    ]
    assert [(one.prefix_queries, one.prefix_hits) for one in told] == [
        (None, None),
        (200, 100),
        (None, None),
    ]
    assert told[2].restarted
    assert (
        EngineReports(WorkerConfig(worker_id="w", url="http://w", batch_limit=8))
        .report(parse_engine_page(b"vllm:num_requests_running 1\n"))
        .prefix_hits
        is None
    )
