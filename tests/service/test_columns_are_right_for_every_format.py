"""Whatever the request format, the column has the right prompt, length and number of sequences."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from service.control.events import Request
from service.edge_config import EdgeConfig
from service.errors import BadRequestError
from service.hints import read_headers
from service.intake import BodyFacts, Rules, read_body, read_light_body
from service.prompts import MESSAGE_TOKENS, OTHER_PART_TOKENS
from service.surface import Api
from tests.clock import run_virtual
from tests.service.stage import HandlerTransport, Stage, answer

PLAIN = Rules(aliases={}, forward_priority=True)


def read(api: Api, **fields: object) -> BodyFacts:
    return read_body(json.dumps(fields).encode(), api, PLAIN)


def words(value: object) -> int:
    return -(-len(json.dumps(value)) // 4)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("abcdefgh", MESSAGE_TOKENS + 2),
        ([{"role": "user", "content": "abcdefgh"}], MESSAGE_TOKENS + 2),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "abcd"}]}] * 2,
            2 * (MESSAGE_TOKENS + 1),
        ),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:..."}]}],
            MESSAGE_TOKENS + OTHER_PART_TOKENS,
        ),
        ([{"type": "function_call", "arguments": "abcdabcd"}], MESSAGE_TOKENS + 2),
        ([{"type": "function_call_output", "output": "abcd"}], MESSAGE_TOKENS + 1),
        (["odd"], MESSAGE_TOKENS),
        (None, 1),
    ],
)
def test_a_responses_prompt_is_its_items(given: object, tokens: int) -> None:
    assert read(Api.RESPONSES, input=given).prompt_tokens == tokens


def test_instructions_and_tools_count_and_the_bound_has_its_own_name() -> None:
    tools = [{"type": "function", "name": "f"}]
    facts = read(
        Api.RESPONSES, input="abcd", instructions="a" * 40, tools=tools, max_output_tokens=7
    )
    assert facts.prompt_tokens == MESSAGE_TOKENS + 1 + 10 + words(tools)
    assert (facts.decode_tokens_limit, facts.sequences) == (7, 1)
    assert read(Api.RESPONSES, input="x", max_tokens=7).decode_tokens_limit is None


def test_a_messages_prompt_is_its_system_prompt_its_blocks_and_its_tools() -> None:
    call = {"city": "Paris"}
    messages = [
        {"role": "user", "content": "abcd"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": call}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "content": [{"type": "text", "text": "abcdabcd"}]},
                {"type": "tool_result", "content": "abcd"},
                {"type": "image", "source": {}},
            ],
        },
    ]
    facts = read(Api.MESSAGES, messages=messages, system=[{"type": "text", "text": "a" * 80}])
    assert facts.prompt_tokens == 3 * MESSAGE_TOKENS + 1 + words(call) + 3 + OTHER_PART_TOKENS + 20
    assert read(Api.MESSAGES, messages=[], system="a" * 80, max_tokens=9).prompt_tokens == 20
    assert read(Api.MESSAGES, messages=[], max_tokens=9).decode_tokens_limit == 9


def test_a_batch_of_chats_has_a_sequence_for_each() -> None:
    chats = [[{"role": "user", "content": "a" * 400}], [{"role": "user", "content": "a" * 4}]]
    facts = read(Api.CHAT_BATCH, messages=chats, max_tokens=5)
    assert facts.sequences == 2
    assert facts.prompt_tokens == -(-(100 + 1 + 2 * MESSAGE_TOKENS) // 2)


def test_token_ids_in_count_exactly_and_limits_stand_in_their_own_object() -> None:
    sampling = {"max_tokens": 9, "n": 3, "min_tokens": 2}
    facts = read(Api.TOKENS, token_ids=[1] * 70, sampling_params=sampling)
    assert (facts.prompt_tokens, facts.sequences) == (70, 3)
    assert (facts.decode_tokens_limit, facts.decode_tokens_floor) == (9, 2)


def test_calls_of_tools_that_a_chat_repeats_count() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    facts = read(Api.CHAT, messages=[{"role": "assistant", "content": None, "tool_calls": calls}])
    assert facts.prompt_tokens == MESSAGE_TOKENS + words(calls)


def test_prompts_given_as_embeddings_have_a_documented_bound() -> None:
    facts = read(Api.TEXT, prompt_embeds=["AAAA", "BBBB"], max_tokens=3)
    assert (facts.prompt_tokens, facts.sequences) == (OTHER_PART_TOKENS, 2)


@pytest.mark.parametrize(
    ("fields", "hint", "floor"),
    [
        ({"min_tokens": 5, "max_tokens": 9}, None, 5),
        ({"min_tokens": 9, "max_tokens": 9}, 9, 9),
        ({"min_tokens": 0, "max_tokens": 9}, None, None),
        ({"ignore_eos": True, "max_tokens": 9}, 9, 9),
        ({"ignore_eos": True}, None, None),
    ],
)
def test_the_least_length_makes_a_forecast_certain_when_it_is_the_most(
    fields: dict[str, object], hint: int | None, floor: int | None
) -> None:
    facts = read(Api.CHAT, messages=[], **fields)
    assert (facts.decode_tokens_hint, facts.decode_tokens_floor) == (hint, floor)


def test_the_least_length_must_be_a_number() -> None:
    with pytest.raises(BadRequestError, match="min_tokens"):
        read(Api.TEXT, prompt="x", min_tokens=-1)


def booked(body: dict[str, object], *, path: str, context: int | None = None) -> Request:
    """The request as the controller got it, through the whole edge."""

    async def plain(_: httpx.Request) -> httpx.Response:
        return answer()

    async def scenario() -> Request:
        stage = Stage({"a": HandlerTransport(plain)}, context_tokens=context)
        seen = stage.placed()
        async with stage.open():
            exchange = await stage.post(body, path=path)
            assert exchange.status == 200
        return seen[0]

    return run_virtual(scenario())


@pytest.mark.parametrize(
    ("fields", "limit"), [({}, 900), ({"max_tokens": 5000}, 900), ({"max_tokens": 5}, 5)]
)
def test_a_chat_ends_at_the_models_context_at_the_latest(
    fields: dict[str, object], limit: int
) -> None:
    messages = [{"role": "user", "content": "a" * 4 * (100 - MESSAGE_TOKENS)}]
    request = booked(
        {"model": "m", "messages": messages, **fields}, path="/v1/chat/completions", context=1000
    )
    assert (request.prompt_tokens, request.decode_tokens_limit) == (100, limit)


@pytest.mark.parametrize(("cut", "read_of_it"), [(100, 100), (7000, 5000), (0, 1), (-1, 5000)])
def test_a_prompt_that_the_engine_cuts_counts_as_far_as_it_is_read(
    cut: int, read_of_it: int
) -> None:
    message = [{"role": "user", "content": "a" * 4 * (5000 - MESSAGE_TOKENS)}]
    for facts in (
        read(Api.TEXT, prompt=[1] * 5000, truncate_prompt_tokens=cut),
        read(Api.CHAT, messages=message, truncate_prompt_tokens=cut),
        read(Api.CHAT_BATCH, messages=[message] * 3, truncate_prompt_tokens=cut),
    ):
        assert (facts.prompt_tokens, facts.fits_context) == (read_of_it, cut == -1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1] * 30_000, "truncate_prompt_tokens": -1}),
        ("/v1/responses", {"input": "a" * 120_000, "truncation": "auto"}),
        (
            "/v1/chat/completions",
            {"messages": [{"content": "a" * 120_000}], "truncate_prompt_tokens": -1},
        ),
    ],
)
def test_a_prompt_cut_to_the_context_is_no_longer_than_the_context(
    path: str, fields: dict[str, object]
) -> None:
    request = booked({"model": "m", **fields}, path=path, context=1000)
    assert (request.prompt_tokens, request.decode_tokens_limit) == (999, 1)


def test_a_responses_prompt_is_cut_only_where_the_client_allows_it() -> None:
    fields = {"input": "a" * 20_000, "truncation": "disabled", "truncate_prompt_tokens": 5}
    facts = read(Api.RESPONSES, **fields)
    assert (facts.prompt_tokens, facts.fits_context) == (MESSAGE_TOKENS + 5000, False)


@pytest.mark.parametrize("bad", [-2, "many", 1.5, True])
def test_a_cut_that_no_engine_accepts_is_told_by_its_name(bad: object) -> None:
    with pytest.raises(BadRequestError, match="truncate_prompt_tokens"):
        read(Api.CHAT, messages=[], truncate_prompt_tokens=bad)


def test_without_a_known_context_a_chat_without_a_bound_has_none() -> None:
    request = booked({"model": "m", "messages": []}, path="/v1/chat/completions")
    assert request.decode_tokens_limit is None


def test_a_response_that_continues_another_has_its_context_on_top() -> None:
    async def scenario() -> None:
        async def stored(_: httpx.Request) -> httpx.Response:
            usage = {"input_tokens": 1, "output_tokens": 300}
            return httpx.Response(200, json={"id": "resp_1", "output": [], "usage": usage})

        async with Stage({"a": HandlerTransport(stored)}).open() as stage:
            seen = stage.placed()
            first = {"model": "m", "input": "a" * 400}
            await stage.post(first, path="/v1/responses")
            await stage.post(
                {"model": "m", "input": "abcd", "previous_response_id": "resp_1"},
                path="/v1/responses",
            )
            alone, more = MESSAGE_TOKENS + 100, 300 + MESSAGE_TOKENS + 1
            assert [request.prompt_tokens for request in seen] == [alone, alone + more]

    run_virtual(scenario())


def test_an_alias_becomes_the_served_model_and_every_other_byte_stays() -> None:
    rules = Rules(aliases={"gpt": "m"}, forward_priority=True)
    body = b'{ "prompt":"\\u00e9" , "model" :  "gpt", "seed": 1e400, "model":"gpt","n":1 }'
    facts = read_body(body, Api.TEXT, rules)
    assert facts.model == "m"
    assert (
        facts.body == b'{ "prompt":"\\u00e9" , "model" :  "m", "seed": 1e400, "model":"m","n":1 }'
    )
    assert read_light_body(b'{"model":"gpt"}', rules) == ("m", b'{"model":"m"}')
    assert read_light_body(b'{"model":"other", "a":1}', rules) == (
        "other",
        b'{"model":"other", "a":1}',
    )
    assert read_light_body(b"no json", rules) == ("", b"no json")


def test_a_priority_stays_here_where_engines_would_refuse_it() -> None:
    rules = Rules(aliases={}, forward_priority=False)
    facts = read_body(b'{"prompt":"x","priority":-2, "n":1}', Api.TEXT, rules)
    assert facts.value == 4.0
    assert facts.body == b'{"prompt":"x", "n":1}'


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_no_way_leads_a_clients_transfer_parameters_to_an_engine(name: str) -> None:
    dangerous = {"do_remote_prefill": True}
    for api in Api:
        facts = read(api, **{name: dangerous}, model="m")
        assert json.loads(facts.body) == {"model": "m"}
    _, body = read_light_body(json.dumps({name: dangerous}).encode(), PLAIN)
    assert json.loads(body) == {}
    for holder in (
        {"vllm_xargs": {name: "x"}},
        {"sampling_params": {"extra_args": {name: dangerous}}},
        {"extra_args": {name: dangerous}},
    ):
        with pytest.raises(BadRequestError):
            read(Api.TOKENS, **holder)
        with pytest.raises(BadRequestError):
            read_light_body(json.dumps(holder).encode(), PLAIN)


def test_an_alias_is_served_and_listed() -> None:
    async def scenario() -> None:
        async def plain(_: httpx.Request) -> httpx.Response:
            return answer()

        worker = HandlerTransport(plain)
        edge = EdgeConfig(model_aliases={"gpt-4": "m"})
        async with Stage({"a": worker}, edge=edge).open() as stage:
            assert (await stage.post({"model": "gpt-4", "prompt": "x"})).status == 200
            assert json.loads(worker.requests[0].content)["model"] == "m"
            assert worker.requests[0].headers["content-length"] == str(
                len(worker.requests[0].content)
            )
            await asyncio.sleep(0)

    run_virtual(scenario())


@pytest.mark.parametrize(("header", "value"), [("-1", 2.0), ("2", 0.25), ("-99", 64.0), ("0", 1.0)])
@pytest.mark.parametrize("name", [b"x-bidgate-priority", b"x-request-priority"])
def test_a_priority_in_a_header_is_lower_is_sooner_too(
    name: bytes, header: str, value: float
) -> None:
    assert read_headers([(name, header.encode())]).value == value


def test_a_priority_that_is_no_number_is_a_400() -> None:
    with pytest.raises(BadRequestError, match="x-request-priority"):
        read_headers([(b"x-request-priority", b"high")])


def test_bounds_in_headers_are_milliseconds() -> None:
    facts = read_headers([(b"x-bidgate-e2e-ms", b"2500"), (b"x-bidgate-deadline-ms", b"9000")])
    assert (facts.e2e_bound_s, facts.deadline_s, facts.max_wait_s) == (2.5, 9.0, 9.0)
    facts = read_headers([(b"x-bidgate-deadline-ms", b"9000"), (b"x-bidgate-max-wait-ms", b"50")])
    assert (facts.e2e_bound_s, facts.max_wait_s) == (9.0, 0.05)


@pytest.mark.parametrize("name", ["x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"])
def test_a_bound_on_the_time_per_token_is_the_engines_business_and_reaches_it(name: str) -> None:
    async def scenario() -> None:
        async def plain(_: httpx.Request) -> httpx.Response:
            return answer()

        worker = HandlerTransport(plain)
        async with Stage({"a": worker}).open() as stage:
            exchange = await stage.post({"model": "m", "prompt": "x"}, headers={name: "not-read"})
            assert exchange.status == 200
            assert worker.requests[0].headers[name] == "not-read"

    run_virtual(scenario())


@pytest.mark.parametrize(
    "header",
    [
        (b"x-bidgate-max-wait-ms", b"0"),
        (b"x-bidgate-no-queue", b"true"),
        (b"prefer", b"if-available"),
    ],
)
def test_three_headers_say_do_not_queue(header: tuple[bytes, bytes]) -> None:
    assert read_headers([header]).max_wait_s == 0


def test_a_tenant_is_named_or_made_from_the_key_and_never_the_key() -> None:
    key = (b"authorization", b"Bearer s3cret")
    assert read_headers([key, (b"x-bidgate-tenant", b"t")]).tenant == "t"
    made = read_headers([key]).tenant
    assert made.startswith("key-")
    assert "s3cret" not in made
    assert made == read_headers([key]).tenant
    assert made != read_headers([(b"authorization", b"Bearer other")]).tenant
