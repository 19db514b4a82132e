"""Routes that generate wait in the queue, others go straight to a worker, stored ones to theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from service.errors import REFUSAL_ANSWERS
from service.light import LightConfig
from service.surface import LIGHT, OPERATORS, QUEUED, Way, find_route
from tests.clock import run_virtual
from tests.service.stage import HandlerTransport, Stage, answer

ROUTES = Path(__file__).with_name("vllm_routes_0.32.0.txt")
HTTP_PAGE = (ROUTES.parents[2] / "docs/http.md").read_text(encoding="utf-8")
RELAYED = ("queued", "light", "stored")

Scenario = Callable[[], Awaitable[None]]


async def plain(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"path": request.url.path, "method": request.method})


def stage_of(*names: str, **fields: object) -> Stage:
    return Stage({name: HandlerTransport(plain) for name in names}, **fields)  # type: ignore[arg-type]


def sent(stage: Stage) -> dict[str, list[str]]:
    """What each worker was asked."""
    return {
        name: [f"{one.method} {one.url.raw_path.decode()}" for one in worker.requests]
        for name, worker in stage.workers.items()
        if isinstance(worker, HandlerTransport)
    }


@pytest.mark.parametrize("path", sorted(QUEUED))
def test_a_route_that_generates_goes_through_the_queue(path: str) -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            exchange = await stage.post({"model": "m"}, path=path)
            assert exchange.status == 200
            assert stage.ends() == {"completed": 1}
            assert sent(stage) == {"a": [f"POST {path}"]}
            assert exchange.header("x-bidgate-queue-ms") == "0.0"

    run_virtual(scenario())


@pytest.mark.parametrize("path", sorted([*LIGHT, "/v1/of/a/newer/engine", "/v1/files"]))
def test_every_other_route_of_the_engines_skips_it(path: str) -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            body = json.dumps({"model": "m", "input": "x"}).encode()
            exchange = await stage.send(
                "POST", f"{path}?q=1%202", body, headers={"content-type": "application/json"}
            )
            assert exchange.status == 200
            assert stage.ends() == {}
            assert sent(stage) == {"a": [f"POST {path}?q=1%202"]}
            worker = stage.workers["a"]
            assert isinstance(worker, HandlerTransport)
            assert worker.requests[0].content == body

    run_virtual(scenario())


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS"])
def test_an_unknown_route_passes_with_any_method(method: str) -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            exchange = await stage.send(method, "/v1/things/7")
            assert json.loads(exchange.body) == {"path": "/v1/things/7", "method": method}

    run_virtual(scenario())


def of_the_engine() -> list[tuple[str, str, str]]:
    """Way, method and path of every route of vLLM's."""
    lines = ROUTES.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return [(way, method, path) for way, method, path in rows]


@pytest.mark.parametrize(("way", "method", "path"), of_the_engine())
def test_every_route_of_the_engines_is_served_or_refused_by_name(
    way: str, method: str, path: str
) -> None:
    async def scenario() -> None:
        if way == "none":
            assert f"`{path}`" in HTTP_PAGE
        if method == "WEBSOCKET":
            return
        async with stage_of("a").open() as stage:
            asked = path.replace("{response_id}", "resp_1")
            headers = {"content-type": "application/json"}
            exchange = await stage.send(method, asked, b'{"model": "m"}', headers=headers)
            expected = {"operators": 403, "none": 404}.get(way, 200)
            # Readiness is another test's; here it is enough that there is an answer.
            assert exchange.status in ({200, 503} if "/ready" in path else {expected})
            forwarded = sent(stage)["a"]
            assert forwarded == ([f"{method} {asked}"] if way in RELAYED else [])
            assert bool(stage.ends()) == (way == "queued")

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat/compeltions/", "/v1/chat/completions"),
        ("/v1/Chat/Completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/model", "/v1/models"),
        ("/v1/embedding", "/v1/embeddings"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/tokenise", "/tokenize"),
    ],
)
def test_a_misspelt_path_is_a_404_that_names_the_route(path: str, meant: str) -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            exchange = await stage.send("POST", path, b'{"model": "m"}')
            assert (exchange.status, exchange.error["type"]) == (404, "not_found_error")
            assert exchange.error["message"].endswith(f": Not Found; did you mean {meant}?")
            assert sent(stage) == {"a": []}

    run_virtual(scenario())


@pytest.mark.parametrize(
    "path", ["/v1/images/generations", "/v1/messages/batches", "/v1/classify", "/v1/" + "x" * 4000]
)
def test_a_route_that_is_new_passes(path: str) -> None:
    assert find_route(path).way is Way.LIGHT


@pytest.mark.parametrize("path", sorted(OPERATORS))
def test_what_would_change_one_engine_is_refused(path: str) -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            exchange = await stage.post({"lora_name": "x"}, path=path)
            assert (exchange.status, exchange.error["code"]) == (403, "operator_route")
            assert sent(stage) == {"a": []}

    run_virtual(scenario())


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../sleep",
        "/v1/./../abort_requests",
        "/v1//completions",
        "/v1/a/..",
        "/v1/..\\sleep",
        "/sleep",
        "/collective_rpc",
        "/v1",
        "/v1/",
    ],
)
def test_no_path_climbs_to_an_engines_own_routes(path: str) -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            exchange = await stage.send("POST", path)
            assert (exchange.status, exchange.error["type"]) == (404, "not_found_error")
            assert sent(stage) == {"a": []}

    run_virtual(scenario())


@pytest.mark.parametrize("path", sorted(QUEUED))
def test_a_slash_at_the_end_does_not_lead_past_the_queue(path: str) -> None:
    assert find_route(f"{path}/") == find_route(path)
    assert find_route(path).way is Way.QUEUED


def response(number: int) -> httpx.Response:
    return httpx.Response(200, json={"id": f"resp_{number}", "object": "response", "output": []})


class Storing:
    """A worker that keeps responses; ids tell which worker made them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[str] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        if request.url.path == "/v1/responses":
            if json.loads(request.content).get("stream"):
                made = json.dumps({"response": {"id": f"resp_{self.number}"}})
                text = f"event: response.created\ndata: {made}\n\n"
                text += 'event: response.completed\ndata: {"type":"response.completed"}\n\n'
                headers = {"content-type": "text/event-stream"}
                return httpx.Response(200, headers=headers, content=text.encode())
            return response(self.number)
        return response(self.number)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stored_response_is_asked_for_where_it_is(streams: bool) -> None:
    async def scenario() -> None:
        stores = {"a": Storing(1), "b": Storing(2)}
        workers = {name: HandlerTransport(store.answer) for name, store in stores.items()}
        async with Stage(workers).open() as stage:  # type: ignore[arg-type]
            owners = {}
            for _ in range(2):
                made = await stage.post(
                    {"model": "m", "input": "x", "stream": streams}, path="/v1/responses"
                )
                assert made.status == 200
                owners[made.header("x-bidgate-worker")] = True
            # Round after round the worker that made it is asked, whoever is idle.
            for name, store in stores.items():
                if name not in owners:
                    continue
                path = f"/v1/responses/resp_{store.number}"
                for method, target in (
                    ("GET", path),
                    ("POST", f"{path}/cancel"),
                    ("DELETE", path),
                ):
                    exchange = await stage.send(method, target)
                    assert (exchange.status, exchange.header("x-bidgate-worker")) == (200, name)
                assert store.asked[-3:] == [
                    f"GET {path}",
                    f"POST {path}/cancel",
                    f"DELETE {path}",
                ]
                gone = await stage.send("GET", path)
                assert (gone.status, gone.error["code"]) == (404, "response_not_found")

    run_virtual(scenario())


def test_a_response_that_continues_another_waits_for_its_worker() -> None:
    async def scenario() -> None:
        stores = {"a": Storing(1), "b": Storing(2)}
        workers = {name: HandlerTransport(store.answer) for name, store in stores.items()}
        async with Stage(workers).open() as stage:  # type: ignore[arg-type]
            made = await stage.post({"model": "m", "input": "x" * 4000}, path="/v1/responses")
            owner = made.header("x-bidgate-worker")
            number = stores[owner or ""].number
            for _ in range(6):
                again = await stage.post(
                    {"model": "m", "input": "y", "previous_response_id": f"resp_{number}"},
                    path="/v1/responses",
                )
                assert again.header("x-bidgate-worker") == owner

    run_virtual(scenario())


def test_an_unknown_response_is_a_404_unless_there_is_one_worker_to_ask() -> None:
    async def scenario() -> None:
        async with stage_of("a", "b").open() as stage:
            exchange = await stage.send("GET", "/v1/responses/resp_x")
            assert (exchange.status, exchange.error["code"]) == (404, "response_not_found")
            assert sent(stage) == {"a": [], "b": []}
        async with stage_of("a").open() as stage:
            assert (await stage.send("GET", "/v1/responses/resp%2Dx?stream=true")).status == 200
            assert sent(stage) == {"a": ["GET /v1/responses/resp%2Dx?stream=true"]}

    run_virtual(scenario())


def test_the_memory_of_responses_is_bounded_and_ends() -> None:
    async def scenario() -> None:
        counter = iter(range(100))

        async def storing(_: httpx.Request) -> httpx.Response:
            return response(next(counter))

        light = LightConfig(responses_max=2, responses_ttl_s=10.0)
        workers = {name: HandlerTransport(storing) for name in ("a", "b")}
        async with Stage(workers, light=light).open() as stage:  # type: ignore[arg-type]

            async def known(number: int) -> bool:
                exchange = await stage.send("GET", f"/v1/responses/resp_{number}")
                return exchange.status == 200

            async def make() -> None:
                await stage.post({"model": "m", "input": "x"}, path="/v1/responses")

            for _ in range(3):
                await make()
            assert not await known(0)
            assert await known(2)
            await asyncio.sleep(10.1)
            assert not await known(2)

    run_virtual(scenario())


def embed(stage: Stage, model: str = "m") -> asyncio.Task[object]:
    body = json.dumps({"model": model, "input": "x"}).encode()
    headers = {"content-type": "application/json"}
    return asyncio.ensure_future(stage.send("POST", "/v1/embeddings", body, headers=headers))


def test_light_requests_spread_over_the_workers_and_stop_at_their_bound() -> None:
    async def scenario() -> None:
        most: dict[str, int] = {"a": 0, "b": 0}
        now: dict[str, int] = {"a": 0, "b": 0}

        def slow(name: str) -> Callable[[httpx.Request], Awaitable[httpx.Response]]:
            async def serve(_: httpx.Request) -> httpx.Response:
                now[name] += 1
                most[name] = max(most[name], now[name])
                await asyncio.sleep(1.0)
                now[name] -= 1
                return answer()

            return serve

        workers = {name: HandlerTransport(slow(name)) for name in most}
        stage = Stage(workers, light=LightConfig(light_per_worker_max=3))  # type: ignore[arg-type]
        async with stage.open():
            ends = await asyncio.gather(*(embed(stage) for _ in range(9)))
            assert most == {"a": 3, "b": 3}
            statuses = sorted(one.status for one in ends)  # type: ignore[attr-defined]
            assert statuses == [200] * 6 + [429] * 3
            refused = next(one for one in ends if one.status == 429)  # type: ignore[attr-defined]
            assert refused.header("retry-after") == "1"  # type: ignore[attr-defined]
            assert stage.light_path.ended["completed"] == 6
            assert stage.light_path.ended["refused"] == 3

    run_virtual(scenario())


def test_light_requests_respect_models_health_and_draining() -> None:
    async def scenario() -> None:
        async with stage_of("a", light=LightConfig(light_hold_s=2.0)).open() as stage:
            unknown = await embed(stage, model="nope")
            assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")  # type: ignore[attr-defined]
            assert unknown.error["message"] == "no worker serves the model 'nope'; served: m"  # type: ignore[attr-defined]
            worker = stage.workers.pop("a")
            began_s = asyncio.get_running_loop().time()
            nobody = await embed(stage)
            assert (nobody.status, nobody.error["code"]) == (503, "no_worker")  # type: ignore[attr-defined]
            assert "within 2 s: check the workers' URLs" in nobody.error["message"]  # type: ignore[attr-defined]
            assert 2.0 <= asyncio.get_running_loop().time() - began_s < 2.2
            # One that comes up in time is found.
            waiting = embed(stage)
            await asyncio.sleep(1.0)
            stage.workers["a"] = worker
            assert (await waiting).status == 200  # type: ignore[attr-defined]
            stage.queue.drain()
            late = await embed(stage)
            assert (late.status, late.error["code"]) == (503, "draining")  # type: ignore[attr-defined]

    run_virtual(scenario())


def test_a_light_request_goes_to_another_worker_when_one_cannot_be_reached() -> None:
    async def scenario() -> None:
        async def dead(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused", request=request)

        workers = {"a": HandlerTransport(dead), "b": HandlerTransport(plain)}
        async with Stage(workers).open() as stage:  # type: ignore[arg-type]
            for path in ("/v1/embeddings", "/version/of/nothing", "/tokenize"):
                exchange = await stage.send(
                    "POST", path, b"{}", headers={"content-type": "application/json"}
                )
                assert exchange.status == (404 if path.startswith("/version") else 200)
            got = await stage.send("GET", "/v1/things")
            assert (got.status, got.header("x-bidgate-worker")) == (200, "b")
            assert stage.forwarder.retries["connect"] >= 1

    run_virtual(scenario())


def test_errors_for_anthropics_clients_have_their_shape() -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            exchange = await stage.post({"model": "nope", "messages": []}, path="/v1/messages")
            body = json.loads(exchange.body)
            assert (exchange.status, body["type"]) == (404, "error")
            assert body["error"]["type"] == "not_found_error"
            stage.queue.drain()
            exchange = await stage.post({"model": "m", "messages": []}, path="/v1/messages")
            assert exchange.status == 503
            assert json.loads(exchange.body)["error"]["type"] == "overloaded_error"

    run_virtual(scenario())


def test_every_refusal_says_why_in_a_header() -> None:
    async def scenario() -> None:
        async with stage_of("a").open() as stage:
            stage.queue.drain()
            exchange = await stage.post()
            assert exchange.header("x-bidgate-reason") == "draining"
            exchange = await stage.post(b"{")
            assert exchange.header("x-bidgate-reason") == "invalid_request_error"
        assert all(answer.code for answer in REFUSAL_ANSWERS.values())

    run_virtual(scenario())
