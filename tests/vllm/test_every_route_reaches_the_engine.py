"""Routes beyond completions, on the engine itself: the same answers as without bidgate.

Ids and times differ between two equal answers and are masked.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.vllm.router import Router, running_router, until_all_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.conftest import Fleet

TEXT = "Which colour? Grüße, 漢字."
MESSAGES = [{"role": "user", "content": TEXT}]
FIXED = {"temperature": 0, "ignore_eos": True}
ALIAS = "another-name"
LOGGED_MAX_S = 10.0

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 12, **FIXED},
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 12, **FIXED},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12, "temperature": 0},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 12, **FIXED},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [72, 101, 108]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    # The tiny model does none of these: what the engine says about that passes too.
    "/v1/embeddings": {"input": TEXT},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/not/a/route": {"a": 1},
}
STREAMS = {path: REQUESTS[path] for path in ("/v1/messages", "/v1/responses")}


@pytest.fixture
def router(fleet: Fleet) -> Iterator[Router]:
    flags = ("--failures-to-suspect", "1000", f"--model-aliases.{ALIAS}", fleet.model)
    with running_router(fleet.urls, batch_limit=fleet.batch_limit, flags=flags) as running:
        yield running


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False)


def masked(body: bytes) -> bytes:
    """Without what differs between two equal answers."""
    body = re.sub(rb'"(id|item_id|request_id)":\s*"[^"]*"', rb'"\1":""', body)
    return re.sub(rb'"(created|created_at|completed_at)":\s*[\d.]+', rb'"\1":0', body)


@pytest.mark.parametrize("path", REQUESTS)
async def test_an_answer_is_the_engines_own(path: str, fleet: Fleet, router: Router) -> None:
    body = {"model": fleet.model, **REQUESTS[path]}
    async with client(router.url) as routed, client(fleet.urls[0]) as direct:
        told, through = [await one.post(path, json=body) for one in (direct, routed)]
        assert through.status_code == told.status_code
        assert masked(through.content) == masked(told.content)
        assert through.headers["content-type"] == told.headers["content-type"]
        assert through.headers["x-bidgate-worker"]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_of_named_events_is_complete_and_counted(
    path: str, fleet: Fleet, router: Router
) -> None:
    async with client(router.url) as routed:
        body = {"model": fleet.model, "stream": True, **STREAMS[path]}
        response = await routed.post(path, json=body)
        assert response.status_code == 200
        events = re.findall(r"^event: ?(\S+)", response.text, re.MULTILINE)
        assert events[-1] in ("message_stop", "response.completed", "response.incomplete")
        usages = re.findall(r'"output_tokens":\s*(\d+)', response.text)
        line = await logged(router, response.headers["x-request-id"])
        assert line["outcome"] == "completed"
        assert line["decode_tokens"] == int(usages[-1])


async def logged(router: Router, request_id: str) -> dict[str, object]:
    """The log line of a request."""
    async with asyncio.timeout(LOGGED_MAX_S):
        while True:
            lines = router.log_events("request")
            found = [line for line in lines if line["request_id"] == request_id]
            if found:
                return found[0]
            await asyncio.sleep(0.1)


async def test_a_stored_response_is_found_at_its_worker(fleet: Fleet, router: Router) -> None:
    async with client(router.url) as routed:
        await until_all_up(router, routed, fleet.urls)
        body = {"model": fleet.model, **REQUESTS["/v1/responses"]}
        made = await asyncio.gather(*(routed.post("/v1/responses", json=body) for _ in range(8)))
        assert len({one.headers["x-bidgate-worker"] for one in made}) == len(fleet.urls)
        for one in made:
            response_id = one.json()["id"]
            got = await routed.get(f"/v1/responses/{response_id}")
            if got.status_code == 404 and not fleet.owned:
                pytest.skip("the workers do not store responses")
            assert (got.status_code, got.json()["id"]) == (200, response_id)
            assert got.headers["x-bidgate-worker"] == one.headers["x-bidgate-worker"]
            follow = {**body, "input": "And?", "previous_response_id": response_id}
            second = await routed.post("/v1/responses", json=follow)
            assert second.status_code == 200, second.text
            assert second.headers["x-bidgate-worker"] == one.headers["x-bidgate-worker"]
        unknown = await routed.get("/v1/responses/resp_unknown")
        if len(fleet.urls) > 1:
            assert unknown.json()["error"]["code"] == "response_not_found"


async def test_models_aliases_and_single_models_are_listed(fleet: Fleet, router: Router) -> None:
    async with client(router.url) as routed:
        names = [card["id"] for card in (await routed.get("/v1/models")).json()["data"]]
        assert names == [fleet.model, ALIAS]
        assert (await routed.get(f"/v1/models/{fleet.model}")).json()["max_model_len"] > 0
        body = {"model": ALIAS, **REQUESTS["/v1/completions"]}
        answer = (await routed.post("/v1/completions", json=body)).json()
        assert answer["model"] == fleet.model
        assert answer["usage"]["completion_tokens"] == 12
        counted = await routed.post("/tokenize", json={"model": ALIAS, "prompt": TEXT})
        assert counted.json()["count"] > 0


async def test_a_deadline_stops_the_engine(fleet: Fleet, router: Router) -> None:
    async with client(router.url) as routed:
        body = {"model": fleet.model, "prompt": TEXT, "max_tokens": 1500, **FIXED}
        late = await routed.post(
            "/v1/completions", json=body, headers={"x-bidgate-deadline-ms": "300"}
        )
        assert (late.status_code, late.json()["error"]["code"]) in (
            (504, "deadline_exceeded"),
            (429, "waited_too_long"),
        )
        for _ in range(100):
            if not await running(fleet):
                return
            await asyncio.sleep(0.1)
        pytest.fail("the engine goes on generating")


async def running(fleet: Fleet) -> float:
    """Requests in the batches of all engines."""
    total = 0.0
    for url in fleet.urls:
        async with client(url) as direct:
            page = (await direct.get("/metrics")).text
        found = re.findall(r"^vllm:num_requests_running\{[^}]*\} ([\d.e+]+)", page, re.MULTILINE)
        total += sum(map(float, found))
    return total


async def test_an_error_of_a_message_has_anthropics_shape(fleet: Fleet, router: Router) -> None:
    async with client(router.url) as routed:
        body = {"model": "nope", "messages": MESSAGES, "max_tokens": 4}
        refused = await routed.post("/v1/messages", content=json.dumps(body).encode())
        assert refused.status_code == 404
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "not_found_error"
