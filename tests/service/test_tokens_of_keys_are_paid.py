"""What a request costs its key's rate of tokens: prompts and answers, of every kind of route."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable

import httpx
import pytest
from structlog.testing import capture_logs

from tests.service.doors import a_key, bearer, run_stage
from tests.service.stage import DONE, HandlerTransport, Stage, completion, event, stream


def test_tokens_spent_by_long_answers_are_owed() -> None:
    limited = a_key("one", tenant="t", tokens_per_minute=60)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        body = completion(prompt=[1] * 20, max_tokens=100, stream=True)
        assert (await stage.post(body, headers=bearer("one"))).status == 200
        assert stage.door.counts.tokens == {"t": 120}
        refused = await stage.post(body, headers=bearer("one"))
        assert refused.status == 429
        # 60 tokens owed and one wanted, at one a second.
        assert int(refused.header("retry-after") or 0) in (61, 62)
        await asyncio.sleep(62)
        assert (await stage.post(body, headers=bearer("one"))).status == 200

    counted = event(usage={"completion_tokens": 100})
    run_stage((limited,), scenario, lambda: stream((0.0, counted), (0.0, DONE)))


async def _spent(
    stage: Stage, body: object, path: str = "/v1/completions", method: str = "POST"
) -> int:
    """What a request cost its key."""
    before = stage.door.counts.tokens["t"]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = bearer("one") | {"content-type": "application/json"}
    assert (await stage.send(method, path, raw, headers=headers)).status == 200
    return stage.door.counts.tokens["t"] - before


@pytest.mark.parametrize(
    ("path", "body", "prompt_tokens"),
    [
        ("/v1/completions", {"prompt": [1] * 30}, 30),
        ("/v1/completions", {"prompt": [1] * 30, "n": 3}, 30),
        ("/v1/completions", {"prompt": [[1] * 1000] * 100, "n": 1}, 100_000),
        ("/v1/completions", {"prompt": [[1] * 10, [2] * 30], "n": 2}, 40),
        ("/v1/completions", {"prompt": ["x" * 40] * 5}, 50),
        (
            "/v1/chat/completions/batch",
            {"messages": [[{"role": "user", "content": "x" * 40}]] * 5},
            70,
        ),
        ("/inference/v1/generate", {"token_ids": [1] * 25}, 25),
    ],
)
def test_every_prompt_of_a_request_is_paid_for(
    path: str, body: dict[str, object], prompt_tokens: int
) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert await _spent(stage, {"model": "m", **body}, path) == prompt_tokens + 7

    def silent() -> httpx.Response:
        return httpx.Response(200, json={"usage": {"completion_tokens": 7}})

    run_stage((a_key("one", tenant="t"),), scenario, silent, batch_limit=128)


USAGE = {"prompt_tokens": 900, "total_tokens": 900}


LONG = [{"index": i, "embedding": [0.25] * 100} for i in range(50)]


PAID = [
    ("/v1/embeddings", {"data": LONG, "usage": {**USAGE, "completion_tokens": 0}}, 900),
    ("/v1/rerank", {"id": "r", "model": "m", "usage": USAGE, "results": LONG}, 900),
    ("/v1/score", {"data": LONG, "usage": {**USAGE, "prompt_tokens_details": None}}, 900),
    ("/v2/embed", {"embeddings": LONG, "meta": {"billed_units": {"input_tokens": 900}}}, 900),
    ("/v1/things", {"usage": {**USAGE, "completion_tokens": 50}}, 950),
    ("/tokenize", {"count": 900, "max_model_len": 4096, "tokens": [1] * 900}, 0),
    ("/v1/messages/count_tokens", {"input_tokens": 900}, 0),
]


@pytest.mark.parametrize(("path", "told", "tokens"), PAID)
def test_what_does_not_generate_costs_what_its_answer_tells(
    path: str, told: dict[str, object], tokens: int
) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        with capture_logs() as logs:
            assert await _spent(stage, {"model": "m", "input": "x"}, path) == tokens
        (line,) = [line for line in logs if line["event"] == "request"]
        assert line.get("prompt_tokens", 0) + line.get("decode_tokens", 0) == tokens

    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, json=told))


SAYS_NOTHING = [
    ("/v1/embeddings", {"data": LONG}),
    ("/v1/things", {"data": [json.dumps({"prompt_tokens": 900})]}),
]


@pytest.mark.parametrize(("path", "told"), SAYS_NOTHING)
def test_an_answer_that_tells_nothing_costs_what_was_asked(
    path: str, told: dict[str, object]
) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        body = json.dumps({"model": "m", "input": "x" * 400}).encode()
        assert await _spent(stage, body, path) == math.ceil(len(body) / 4)

    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, json=told))


def test_what_runs_no_model_and_what_fails_costs_nothing() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        for path in ("/tokenize", "/v1/chat/completions/render", "/v1/messages/count_tokens"):
            assert await _spent(stage, {"model": "m", "input": "x" * 400}, path) == 0

    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, json={}))

    async def failing(stage: Stage, worker: HandlerTransport) -> None:
        await stage.post({"input": "x"}, path="/v1/embeddings", headers=bearer("one"))
        assert stage.door.counts.tokens["t"] == 0

    run_stage((a_key("one", tenant="t"),), failing, lambda: httpx.Response(400, json={}))


FORM_BODY = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    + b"\0" * 50_000
    + b"\r\n--b--\r\n"
)


def test_a_form_costs_the_text_that_it_gave_not_its_own_length() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        headers = bearer("one") | {"content-type": "multipart/form-data; boundary=b"}
        path = "/v1/audio/transcriptions"
        assert (await stage.send("POST", path, FORM_BODY, headers=headers)).status == 200
        assert stage.door.counts.tokens["t"] == 25

    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, text="x" * 100))


def test_a_stream_that_does_not_wait_and_tells_nothing_costs_its_events() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert await _spent(stage, {"model": "m"}, "/v1/audio/transcriptions") == 3

    whole = event("x") + event("y")
    parts = (0.0, whole[:9]), (0.0, whole[9:-1]), (0.0, whole[-1:]), (0.0, DONE)
    run_stage((a_key("one", tenant="t"),), scenario, lambda: stream(*parts))


def test_a_stream_that_does_not_wait_costs_what_it_tells_at_its_end() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert await _spent(stage, {"model": "m"}, "/v1/audio/transcriptions") == 950

    usage = event(usage={"prompt_tokens": 900, "completion_tokens": 50})
    parts = (0.0, event("x" * 5000)), (0.0, usage[:-40]), (0.0, usage[-40:]), (0.0, DONE)
    run_stage((a_key("one", tenant="t"),), scenario, lambda: stream(*parts))


def test_an_answer_knows_its_prompts_better_than_the_estimate() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        body = completion(prompt="x" * 40)
        assert await _spent(stage, body) == 31 + 4

    told = {"usage": {"prompt_tokens": 31, "completion_tokens": 4}}
    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, json=told))


PIECES = [{"1": {"logprob": -0.25, "decoded_token": "word"}}] * 4000


@pytest.mark.parametrize(
    "told",
    [
        {"id": "r", "usage": {"prompt_tokens": 31, "completion_tokens": 4}, "logprobs": PIECES},
        {"id": "r", "output": PIECES, "usage": {"prompt_tokens": 31, "completion_tokens": 4}},
        {"a": PIECES, "usage": {"prompt_tokens": 31, "completion_tokens": 4}, "z": PIECES},
    ],
    ids=["before a long part", "after one", "between two"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/things"])
def test_what_an_answer_costs_is_found_wherever_it_is_told(
    told: dict[str, object], path: str
) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert await _spent(stage, completion(prompt="x" * 40), path) == 35

    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, json=told))


@pytest.mark.parametrize(
    "answer",
    [
        lambda: httpx.Response(200, json={"choices": [{"text": "x"}]}),
        lambda: httpx.Response(200, content=b"\x1f", headers={"content-encoding": "gzip"}),
        lambda: httpx.Response(
            200,
            content=b"\x1f",
            headers={"content-encoding": "gzip", "content-type": "text/event-stream"},
        ),
    ],
    ids=["without usage", "compressed", "compressed stream"],
)
def test_an_answer_that_tells_nothing_costs_what_was_set_aside_for_it(
    answer: Callable[[], httpx.Response],
) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        body = completion(prompt="x" * 40, max_tokens=30, n=2, ignore_eos=True)
        assert await _spent(stage, body) == 10 + 2 * 30

    run_stage((a_key("one", tenant="t"),), scenario, answer, batch_limit=8)


def test_an_error_costs_its_prompt_alone() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        body = completion(prompt="x" * 40, max_tokens=30, ignore_eos=True)
        assert (await stage.post(body, headers=bearer("one"))).status == 400
        assert stage.door.counts.tokens["t"] == 10

    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(400, json={}))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/things"])
@pytest.mark.parametrize("metered", [True, False])
def test_answers_that_are_counted_are_not_asked_for_compressed(path: str, metered: bool) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        headers = bearer("one") | {"accept-encoding": "gzip"}
        assert (await stage.post(completion(), path=path, headers=headers)).status == 200
        (request,) = worker.requests
        assert request.headers["accept-encoding"] == ("identity" if metered else "gzip")

    rate = 1000 if metered else None
    told = {"usage": {"completion_tokens": 1}}
    run_stage(
        (a_key("one", tokens_per_minute=rate),), scenario, lambda: httpx.Response(200, json=told)
    )


def test_a_stored_response_that_is_read_again_costs_no_prompt() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert await _spent(stage, b"", "/v1/responses/resp_1", "GET") == 5

    told = {"id": "resp_1", "usage": {"input_tokens": 900, "output_tokens": 5}}
    run_stage((a_key("one", tenant="t"),), scenario, lambda: httpx.Response(200, json=told))


def test_embeddings_reach_their_keys_rate_of_tokens() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        headers = bearer("one")
        sent = [
            await stage.post({"input": "x"}, path="/v1/embeddings", headers=headers)
            for _ in range(3)
        ]
        assert [exchange.status for exchange in sent] == [200, 200, 429]

    told = {"data": [], "usage": USAGE}
    key = a_key("one", tokens_per_minute=1000)
    run_stage((key,), scenario, lambda: httpx.Response(200, json=told))
