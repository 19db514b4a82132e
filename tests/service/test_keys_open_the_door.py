"""Clients' keys: who is let in, whom a key stands for, its limits; no key is ever shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from structlog.testing import capture_logs

from service.auth import Bucket, Door, Limit
from service.auth_settings import AuthConfig, ClientKey, client_keys
from service.control.events import Request
from service.errors import ClientError, RateLimitedError, UnauthorizedError
from service.placement import Placement
from service.settings import Settings
from service.settings_text import SettingsError
from service.trace import Trace
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import DONE, HandlerTransport, Stage, answer, completion, event, stream


def a_key(text: str, **limits: Any) -> ClientKey:
    return ClientKey(key=SecretStr(text), **limits)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def run_stage(
    keys: tuple[ClientKey, ...],
    scenario: Callable[[Stage, HandlerTransport], Awaitable[None]],
    reply: Callable[[], httpx.Response] = answer,
    **options: Any,
) -> None:
    """Play a scenario in front of one worker."""

    async def handle(_: httpx.Request) -> httpx.Response:
        return reply()

    async def play() -> None:
        worker = HandlerTransport(handle)
        async with Stage({"w": worker}, keys=keys, **options).open() as stage:
            await scenario(stage, worker)

    run_virtual(play())


def a_door(*keys: ClientKey, **config: Any) -> Door:
    door = Door()
    door.configure(AuthConfig(**config), keys)
    return door


def knock(door: Door, path: str, key: str | None, method: str = "POST") -> int:
    """The status that the door answers; 200 when it lets in."""
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    try:
        with door.admit(path, headers, 0.0, limited=method == "POST"):
            return 200
    except ClientError as error:
        return error.status


def test_without_keys_everything_but_admin_is_open() -> None:
    door = a_door()
    assert knock(door, "/v1/completions", None) == 200
    assert knock(door, "/scarcity", None) == 200
    assert knock(door, "/admin/v1/workers", None) == 404
    assert knock(door, "/admin/v1/workers", "any") == 404


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/models", "/scarcity", "/version", "/docs", "/openapi.json", "/"],
)
def test_with_keys_every_route_but_health_needs_one(path: str) -> None:
    door = a_door(a_key("one"))
    assert [knock(door, path, key, "GET") for key in (None, "", "on", "onee", "one")] == [
        *[401] * 4,
        200,
    ]


def test_health_is_open_and_metrics_as_configured() -> None:
    key = a_key("one")
    door = a_door(key)
    assert knock(door, "/metrics", None, "GET") == 200
    closed = a_door(key, metrics_open=False)
    assert knock(closed, "/metrics", None, "GET") == 401
    assert knock(closed, "/metrics", "one", "GET") == 200


PROBED = ("/health", "/healthz", "/live", "/livez", "/liveness", "/ping")
READINESS = ("/ready", "/readyz", "/readiness")


@pytest.mark.parametrize("path", [*PROBED, *READINESS])
def test_whatever_answers_probes_needs_no_key(path: str) -> None:
    methods = ("GET", "HEAD", "POST") if path == "/ping" else ("GET", "HEAD")

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        for method in methods:
            assert (await stage.send(method, path)).status == 200
            assert (await stage.send(method, path, headers=bearer("wrong"))).status == 200
        assert not worker.requests

    run_stage((a_key("one"),), scenario)


def test_no_path_is_open_but_those_of_probes() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        documented = set(stage.inner.openapi()["paths"])
        assert {"/metrics", "/v1/models", "/scarcity", "/load", "/version"} < documented
        own = documented | {*PROBED, *READINESS, "/docs", "/redoc", "/openapi.json", "/nowhere"}
        opened = {path for path in own if (await stage.send("GET", path)).status != 401}
        assert opened == {*PROBED, *READINESS, "/metrics"}

    run_stage((a_key("one"),), scenario)


def test_the_admin_key_opens_admin_and_nothing_else() -> None:
    door = a_door(a_key("client"), admin_key=SecretStr("boss"))
    assert knock(door, "/admin/v1/workers", "client") == 401
    assert knock(door, "/admin/v1/workers", None) == 401
    assert knock(door, "/admin/v1/workers", "boss") == 200
    assert knock(door, "/v1/completions", "boss") == 401


def test_a_key_may_be_known_by_its_digest_only() -> None:
    digest = hashlib.sha256(b"one").hexdigest()
    door = a_door(ClientKey(key_sha256=digest))
    assert knock(door, "/v1/completions", "one") == 200
    assert knock(door, "/v1/completions", digest) == 401


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer one")],
        [(b"authorization", b"bearer  one ")],
        [(b"x-api-key", b"one")],
    ],
)
def test_a_key_may_come_in_any_clients_way(headers: list[tuple[bytes, bytes]]) -> None:
    door = a_door(a_key("one", tenant="t"))
    assert door.admit("/v1/completions", headers, 0.0, limited=True).tenant == "t"


@pytest.mark.parametrize("value", [b"one", b"Basic one", b"Bearer", b"Bearer \xff\xfe", b""])
def test_a_garbled_credential_is_a_401(value: bytes) -> None:
    door = a_door(a_key("one"))
    with pytest.raises(UnauthorizedError):
        door.admit("/v1/completions", [(b"authorization", value)], 0.0, limited=True)


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    import service.auth

    def count(digest: bytes, sent: bytes) -> bool:
        compared.append(digest)
        return digest == sent

    monkeypatch.setattr(service.auth.hmac, "compare_digest", count)
    door = a_door(*(a_key(f"key-{i}") for i in range(5)))
    for key in ("key-0", "key-4", "none"):
        compared.clear()
        knock(door, "/v1/completions", key)
        assert len(compared) == 5


def test_a_refusal_has_openais_shape_and_the_key_goes_no_further() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        refused = await stage.post(completion(), headers=bearer("wrong"))
        assert (refused.status, refused.error["type"]) == (401, "authentication_error")
        assert refused.header("x-request-id")
        served = await stage.post(completion(), headers=bearer("one") | {"x-api-key": "one"})
        assert served.status == 200
        (request,) = worker.requests
        assert "authorization" not in request.headers
        assert "x-api-key" not in request.headers

    run_stage((a_key("one"),), scenario)


def test_whom_a_key_stands_for_is_not_for_its_holder_to_say() -> None:
    seen: list[str] = []

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        place = stage.queue.place

        def note(request: Request, trace: Trace) -> AbstractAsyncContextManager[Placement]:
            seen.append(request.tenant)
            return place(request, trace)

        stage.queue.place = note  # type: ignore[method-assign]
        header = {"x-bidgate-tenant": "someone-else"}
        await stage.post(completion(), headers=bearer("one") | header)
        await stage.post(completion(), headers=bearer("two") | header)

    keys = (a_key("one", tenant="team"), a_key("two"))
    run_stage(keys, scenario)
    assert seen == ["team", "someone-else"]


def test_a_key_has_at_most_its_requests_inside_and_gets_each_place_back() -> None:
    limited = a_key("one", tenant="t", requests_max=2)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        async with asyncio.TaskGroup() as group:
            long = [
                group.create_task(stage.post(completion(stream=True), headers=bearer("one")))
                for _ in range(2)
            ]
            await asyncio.sleep(1.0)
            third = await stage.post(completion(), headers=bearer("one"))
            assert (third.status, third.error["code"]) == (429, "rate_limit_exceeded")
            assert int(third.header("retry-after") or 0) >= 1
            assert stage.door.running() == {"t": 2, "": 0}
            other = await stage.post(completion(stream=True), headers=bearer("two"))
            assert other.status == 200
        assert [task.result().status for task in long] == [200, 200]
        assert stage.door.running() == {"t": 0, "": 0}
        assert (await stage.post(completion(stream=True), headers=bearer("one"))).status == 200

    run_stage(
        (limited, a_key("two")),
        scenario,
        lambda: stream((3.0, event()), (0.1, DONE)),
    )


def test_requests_that_fail_or_are_left_give_their_places_back() -> None:
    limited = a_key("one", requests_max=1)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        assert (await stage.post(b"{", headers=bearer("one"))).status == 400
        exchange = Exchange()
        task = asyncio.get_running_loop().create_task(
            stage.post(completion(stream=True), headers=bearer("one"), exchange=exchange)
        )
        await asyncio.sleep(1.0)
        exchange.leave()
        await task
        assert stage.door.running() == {"": 0}
        assert (await stage.post(completion(stream=True), headers=bearer("one"))).status == 200

    run_stage((limited,), scenario, lambda: stream((3.0, event()), (0.1, DONE)))


def test_a_rate_of_requests_is_kept_and_retry_after_is_true() -> None:
    limited = a_key("one", tenant="t", requests_per_minute=6)

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        async def status() -> int:
            return (await stage.post(completion(), headers=bearer("one"))).status

        assert [await status() for _ in range(7)] == [*[200] * 6, 429]
        refused = await stage.post(completion(), headers=bearer("one"))
        wait_s = int(refused.header("retry-after") or 0)
        assert 1 <= wait_s <= 10
        await asyncio.sleep(wait_s)
        assert [await status(), await status()] == [200, 429]
        assert stage.door.counts.limited[("t", Limit.REQUESTS_PER_MINUTE)] == 3
        models = await stage.send("GET", "/v1/models", headers=bearer("one"))
        assert models.status == 200

    run_stage((limited,), scenario)


WORK = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    *((method, "/v1/things/7") for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")),
]


@pytest.mark.parametrize(("method", "path"), WORK)
def test_limits_hold_for_whatever_goes_to_a_worker(method: str, path: str) -> None:
    body = json.dumps(completion()).encode() if method == "POST" else b""

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        sent = [await stage.send(method, path, body, headers=bearer("one")) for _ in range(5)]
        assert [exchange.status for exchange in sent] == [200, 200, 200, 429, 429]
        assert len(worker.requests) == 3
        assert stage.door.counts.limited == {("t", Limit.REQUESTS_PER_MINUTE): 2}

    run_stage((a_key("one", tenant="t", requests_per_minute=3),), scenario)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_requests_inside_count_whatever_their_method(method: str) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        sends = [stage.send(method, "/v1/things/7", headers=bearer("one")) for _ in range(3)]
        done = await asyncio.gather(*sends)
        assert sorted(exchange.status for exchange in done) == [200, 429, 429]
        assert stage.door.running() == {"": 0}

    run_stage((a_key("one", requests_max=1),), scenario, lambda: stream((1.0, b"x")))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/load_lora_adapter", 403),
        ("GET", "/no/such/route", 404),
    ],
)
def test_what_no_worker_sees_counts_against_no_limit(method: str, path: str, status: int) -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        sent = [await stage.send(method, path, headers=bearer("one")) for _ in range(4)]
        assert {exchange.status for exchange in sent} == {status}
        assert (await stage.post(completion(), headers=bearer("one"))).status == 200

    run_stage((a_key("one", requests_per_minute=1),), scenario)


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
    ("/v1/things", {"data": [json.dumps({"prompt_tokens": 900})]}, 0),
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


@given(
    st.floats(1.0, 1e4),
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1e4)), max_size=30),
)
def test_a_bucket_never_lets_more_through_than_its_rate(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    bucket = Bucket(per_minute, 0.0)
    now_s = spent = 0.0
    for pause_s, amount in steps:
        now_s += pause_s
        if bucket.wait_s(1.0, now_s) == 0.0:
            # What was let in before this one is within the rate, a minute's worth ahead.
            assert spent <= per_minute * (1.0 + now_s / 60.0) * (1.0 + 1e-9) + 1e-6
            bucket.spend(amount, now_s)
            spent += amount


@given(st.floats(1.0, 1e4), st.floats(0.0, 1e5), st.floats(0.0, 1e3))
def test_the_wait_a_bucket_names_is_long_enough(
    per_minute: float, spent: float, at_s: float
) -> None:
    bucket = Bucket(per_minute, 0.0)
    bucket.spend(spent, at_s)
    wait_s = bucket.wait_s(1.0, at_s)
    assert bucket.wait_s(1.0, at_s + wait_s + 1e-3) == 0.0


def test_new_limits_do_not_forgive_what_was_used() -> None:
    key = a_key("one", requests_per_minute=2)
    door = a_door(key)
    assert [knock(door, "/v1/completions", "one") for _ in range(3)] == [200, 200, 429]
    more = a_key("one", requests_per_minute=100)
    door.configure(AuthConfig(), (more,), 0.0)
    assert knock(door, "/v1/completions", "one") == 429
    door.configure(AuthConfig(), (a_key("two"),), 0.0)
    assert knock(door, "/v1/completions", "one") == 401


def test_keys_may_come_from_a_file_the_environment_or_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    monkeypatch.setenv("SOME_KEY", "from-env")
    listed = tmp_path / "keys.yaml"
    listed.write_text(
        f"- {{key: written, tenant: a, requests_max: 3}}\n"
        f"- {{key: {{file: {tmp_path / 'secret'}}}}}\n"
        f"- {{key: {{env: SOME_KEY}}}}\n"
    )
    monkeypatch.setenv("BIDGATE_AUTH__KEYS", '[{"key": "in-a-variable"}]')
    settings = Settings(auth={"keys_file": listed}, edge={"api_key": "plain"})  # type: ignore[arg-type]
    door = a_door(*settings.client_keys())
    keys = ("in-a-variable", "written", "from-file", "from-env", "plain")
    assert {knock(door, "/v1/completions", key) for key in keys} == {200}
    shown = f"{settings!r} {settings} {settings.client_keys()!r} {settings.model_dump()}"
    assert not [key for key in keys if key in shown.replace("'plain", "")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {key: s3cret, tenannt: a}", ("keys.yaml:1:", "tenannt", "tenant")),
        ("- {tenant: a}", ("keys.yaml:1", "either key or key_sha256")),
        ("- {key: s3cret}\n- {key: s3cret, requests_max: -1}", ("keys.yaml:2", "requests_max")),
        ("- {key_sha256: s3cret}", ("keys.yaml:1", "64 hexadecimal")),
        ("- {key: {env: NO_SUCH_VARIABLE}}", ("keys.yaml:1", "NO_SUCH_VARIABLE")),
        ("- {key: {file: /nope}}", ("keys.yaml:1", "/nope")),
        ("- {key: ''}", ("keys.yaml:1", "empty")),
        ("- {key: [s3cret]}", ("keys.yaml:1",)),
        ("- {key: s3cret, key: two}", ("keys.yaml:1", "twice")),
        ("s3cret", ("keys.yaml",)),
    ],
)
def test_a_bad_file_of_keys_is_one_line_that_shows_no_key(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as refused:
        client_keys(AuthConfig(keys_file=path))
    line = str(refused.value)
    assert "\n" not in line
    assert all(word in line for word in words)
    assert "s3cret" not in line


def test_limits_are_refusals_not_errors() -> None:
    assert RateLimitedError("x").status == 429
    assert RateLimitedError("x").reply.retry
