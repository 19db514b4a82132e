"""Broken requests are answered at the edge in OpenAI's shape, and reach no worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from service.control.config import ControlConfig, PolicyName
from service.edge_config import EdgeConfig
from tests.asgi import Exchange, http_scope
from tests.clock import run_virtual
from tests.service.stage import HandlerTransport, Stage, answer, completion


async def plain(_: httpx.Request) -> httpx.Response:
    return answer()


def send(
    body: object,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    headers: dict[str, str] | None = None,
    edge: EdgeConfig | None = None,
    batch_limit: int = 8,
) -> tuple[Exchange, HandlerTransport, dict[str, int]]:
    """One request to a fresh stage; its answer, the worker, and how requests ended."""

    async def scenario() -> tuple[Exchange, HandlerTransport, dict[str, int]]:
        worker = HandlerTransport(plain)
        stage = Stage({"a": worker}, edge=edge or EdgeConfig(), batch_limit=batch_limit)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with stage.open():
            exchange = await stage.send(method, path, raw, headers=headers)
        return exchange, worker, stage.ends()

    return run_virtual(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        {"model": 5},
        completion(max_tokens=0),
        completion(max_tokens=-1),
        completion(max_tokens="9"),
        completion(max_tokens=1.5),
        completion(max_tokens=True),
        completion(max_completion_tokens=0),
        completion(n=0),
        completion(n="2"),
    ],
    ids=lambda body: str(body)[:40],
)
def test_a_body_no_engine_could_serve_is_a_400(body: object) -> None:
    exchange, worker, _ = send(body)
    assert exchange.status == 400
    assert exchange.error["type"] == "invalid_request_error"
    assert set(exchange.error) == {"message", "type", "param", "code"}
    assert exchange.header("content-type") == "application/json"
    assert exchange.header("x-request-id")
    assert worker.requests == []


def test_messages_that_are_no_list_are_a_400() -> None:
    exchange, worker, _ = send({"model": "m", "messages": "hi"}, path="/v1/chat/completions")
    assert (exchange.status, exchange.error["param"]) == (400, "messages")
    assert worker.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"x-bidgate-decode-tokens": "many"},
        {"x-bidgate-decode-tokens": "-3"},
        {"x-bidgate-value": "nan"},
        {"x-bidgate-value": "0"},
        {"x-bidgate-value": "64.5"},
        {"x-bidgate-value": "100"},
        {"x-bidgate-max-wait-ms": "inf"},
    ],
    ids=str,
)
def test_a_hint_that_is_no_number_in_its_range_is_a_400(headers: dict[str, str]) -> None:
    exchange, worker, _ = send(completion(), headers=headers)
    assert exchange.status == 400
    assert next(iter(headers)) in exchange.error["message"]
    assert worker.requests == []


def test_an_empty_body_is_told_so() -> None:
    exchange, _, _ = send(b"")
    assert exchange.error["message"] == "the request body is empty; it must be a JSON object"


def test_an_unknown_model_is_a_404() -> None:
    exchange, worker, ends = send(completion(model="nope"))
    assert (exchange.status, exchange.error["code"]) == (404, "model_not_found")
    assert exchange.error["message"] == "no worker serves the model 'nope'; served: m"
    assert worker.requests == []
    assert ends == {"unknown_model": 1}


def test_a_prompt_that_fits_no_worker_is_a_400_at_once() -> None:
    exchange, worker, ends = send(completion(prompt="x" * 800_000))
    assert (exchange.status, exchange.error["code"]) == (400, "context_length_exceeded")
    assert worker.requests == []
    assert ends == {"too_large": 1}


def test_an_announced_length_of_thousands_of_digits_is_a_413_too() -> None:
    exchange, worker, _ = send(completion(), headers={"content-length": "9" * 5000})
    assert (exchange.status, exchange.error["code"]) == (413, "body_too_large")
    assert worker.requests == []


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_a_413(announced: bool) -> None:
    body = json.dumps(completion(prompt="x" * 2000)).encode()
    headers = {"content-length": str(len(body))} if announced else {}
    edge = EdgeConfig(body_bytes_max=1000)
    exchange, worker, _ = send(body, headers=headers, edge=edge)
    assert (exchange.status, exchange.error["code"]) == (413, "body_too_large")
    assert worker.requests == []


def test_a_body_that_does_not_come_is_a_408() -> None:
    async def scenario() -> None:
        stage = Stage({"a": HandlerTransport(plain)}, edge=EdgeConfig(body_timeout_s=5.0))
        async with stage.open():
            exchange = Exchange()

            async def app(scope: Any, receive: Any, send_: Any) -> None:
                async def never() -> dict[str, object]:
                    await asyncio.Event().wait()
                    raise AssertionError("unreachable")

                await stage.app(scope, never, send_)

            await exchange.play(app, http_scope("POST", "/v1/completions"), [])
            assert (exchange.status, exchange.error["code"]) == (408, "body_too_slow")
            assert asyncio.get_running_loop().time() == 5.0

    run_virtual(scenario())


def test_a_client_that_leaves_while_sending_its_body_is_forgotten() -> None:
    async def scenario() -> None:
        stage = Stage({"a": HandlerTransport(plain)})
        async with stage.open():
            exchange = Exchange()
            exchange.leave()
            await exchange.play(stage.app, http_scope("POST", "/v1/completions"), [])
            assert exchange.status == 0

    run_virtual(scenario())


def test_no_worker_at_all_is_a_503_after_the_hold() -> None:
    async def scenario() -> None:
        stage = Stage(
            {}, control=ControlConfig(policy=PolicyName.CENTRAL_FCFS, no_worker_hold_s=3.0)
        )
        async with stage.open():
            exchange = await stage.post()
            assert (exchange.status, exchange.error["code"]) == (503, "no_worker")
            assert int(exchange.header("retry-after") or 0) >= 1
            assert 3.0 <= asyncio.get_running_loop().time() < 3.2
            assert stage.ends() == {"no_worker": 1}

    run_virtual(scenario())


def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1.0)
        return answer()

    async def scenario() -> None:
        control = ControlConfig(policy=PolicyName.CENTRAL_FCFS, queue_max=1)
        stage = Stage({"a": HandlerTransport(slow)}, batch_limit=1, control=control)
        async with stage.open():
            inside = [asyncio.create_task(stage.post())]
            await asyncio.sleep(0.1)
            inside.append(asyncio.create_task(stage.post()))
            await asyncio.sleep(0.1)
            exchange = await stage.post(headers={"x-request-id": "mine"})
            assert (exchange.status, exchange.error["code"]) == (429, "queue_full")
            assert exchange.error["type"] == "rate_limit_error"
            assert int(exchange.header("retry-after") or 0) >= 1
            assert exchange.header("x-request-id") == "mine"
            await asyncio.gather(*inside)

    run_virtual(scenario())


def test_a_wait_over_the_clients_own_bound_is_a_429() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(10.0)
        return answer()

    async def scenario() -> None:
        stage = Stage({"a": HandlerTransport(slow)}, batch_limit=1)
        async with stage.open():
            first = asyncio.create_task(stage.post())
            await asyncio.sleep(0.1)
            exchange = await stage.post(headers={"x-bidgate-max-wait-ms": "500"})
            assert (exchange.status, exchange.error["code"]) == (429, "waited_too_long")
            assert asyncio.get_running_loop().time() < 0.7
            await first

    run_virtual(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_method_is_a_405(path: str) -> None:
    exchange, _, _ = send(b"", path=path, method="GET")
    assert (exchange.status, exchange.error["code"]) == (405, "method_not_allowed")


def test_an_unknown_path_is_a_404_in_the_same_shape() -> None:
    exchange, _, _ = send(b"", path="/nope", method="GET")
    assert (exchange.status, exchange.error["type"]) == (404, "not_found_error")
    assert exchange.header("x-request-id")


@pytest.mark.parametrize("sent", [None, "Bearer wrong", "own"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_without_the_key_every_v1_route_is_a_401(sent: str | None, path: str) -> None:
    edge = EdgeConfig(api_key=SecretStr("own"))
    method = "GET" if path.endswith("models") else "POST"
    headers = {"authorization": sent} if sent else {}
    exchange, worker, _ = send(completion(), path=path, method=method, headers=headers, edge=edge)
    assert (exchange.status, exchange.error["code"]) == (401, "invalid_api_key")
    assert worker.requests == []


def test_health_needs_no_key() -> None:
    edge = EdgeConfig(api_key=SecretStr("own"))
    exchange, _, _ = send(b"", path="/health", method="GET", edge=edge)
    assert exchange.status == 200


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ("abc-123", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("tab\there", False),
        ("caf\xe9", False),
    ],
)
def test_a_request_id_is_taken_if_short_and_printable_echoed_and_sent_on(
    sent: str, taken: bool
) -> None:
    exchange, worker, _ = send(completion(), headers={"x-request-id": sent})
    echoed = exchange.header("x-request-id")
    assert (echoed == sent) == taken
    assert worker.requests[0].headers.get_list("x-request-id") == [echoed]


def test_two_clients_with_one_request_id_are_two_requests() -> None:
    async def scenario() -> None:
        async def slow(_: httpx.Request) -> httpx.Response:
            await asyncio.sleep(1.0)
            return answer()

        async with Stage({"a": HandlerTransport(slow)}).open() as stage:
            both = await asyncio.gather(
                *(stage.post(headers={"x-request-id": "same"}) for _ in range(2))
            )
        assert [exchange.status for exchange in both] == [200, 200]
        assert stage.ends() == {"completed": 2}

    run_virtual(scenario())


def test_a_bug_of_ours_is_a_500_and_holds_nothing() -> None:
    async def broken(_: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(broken)}).open() as stage:
            exchange = await stage.post()
        assert (exchange.status, exchange.error["type"]) == (500, "server_error")
        assert stage.ends() == {"failed": 1}

    run_virtual(scenario())
