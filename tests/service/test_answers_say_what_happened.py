"""Deadlines, waits and bounds of a request's own, and what the answer tells about them."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

import httpx
import pytest
import structlog

from service.control.config import ControlConfig, PolicyName
from service.edge_config import EdgeConfig
from service.logs import LogFormat, LogLevel, configure_logging, printable
from tests.asgi import Exchange, http_scope
from tests.clock import run_virtual
from tests.service.stage import DONE, HandlerTransport, Stage, answer, completion, event, stream


async def slow(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(10.0)
    return answer()


def clock() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_after_its_deadline_a_request_is_given_up_at_its_worker(path: str) -> None:
    async def scenario() -> None:
        worker = HandlerTransport(slow)
        async with Stage({"a": worker}).open() as stage:
            headers = {"x-bidgate-deadline-ms": "1500", "content-type": "application/json"}
            exchange = await stage.post(path=path, headers=headers)
            assert (exchange.status, exchange.error["code"]) == (504, "deadline_exceeded")
            assert exchange.header("x-bidgate-reason") == "deadline_exceeded"
            assert (clock(), worker.cancelled) == (1.5, 1)

    run_virtual(scenario())


def test_a_stream_past_its_deadline_ends_with_an_error_event() -> None:
    async def endless(_: httpx.Request) -> httpx.Response:
        return stream(*[(1.0, event())] * 9, (0.0, DONE))

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(endless)}).open() as stage:
            headers = {"x-bidgate-deadline-ms": "2500"}
            exchange = await stage.post(completion(stream=True), headers=headers)
            assert exchange.status == 200
            last = exchange.body.split(b"\n\n")[-2]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
            assert clock() == 2.5
            # The worker is not to blame.
            assert stage.suspects == []
            assert stage.ends() == {"failed": 1}

    run_virtual(scenario())


def test_a_deadline_that_passes_in_the_queue_frees_it() -> None:
    async def scenario() -> None:
        worker = HandlerTransport(slow)
        async with Stage({"a": worker}, batch_limit=1).open() as stage:
            first = asyncio.create_task(stage.post())
            await asyncio.sleep(0.1)
            exchange = await stage.post(headers={"x-bidgate-deadline-ms": "700"})
            assert (exchange.status, exchange.error["code"]) == (429, "waited_too_long")
            assert clock() == pytest.approx(0.8, abs=0.05)
            await first
            assert len(worker.requests) == 1

    run_virtual(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        {"x-bidgate-no-queue": "1"},
        {"x-bidgate-max-wait-ms": "0"},
        {"prefer": "if-available"},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", [PolicyName.ONLINE_LP, PolicyName.CENTRAL_FCFS])
def test_do_not_queue_starts_at_once_or_is_refused_at_once(
    headers: dict[str, str], policy: PolicyName
) -> None:
    async def scenario() -> None:
        control = ControlConfig(policy=policy)
        worker = HandlerTransport(slow)
        async with Stage({"a": worker}, batch_limit=1, control=control).open() as stage:
            first = asyncio.create_task(stage.post(headers=headers))
            await asyncio.sleep(0.1)
            exchange = await stage.post(headers=headers)
            assert (exchange.status, exchange.error["code"]) == (429, "would_wait")
            assert clock() < 0.2
            assert int(exchange.header("retry-after") or 0) >= 1
            assert (await first).status == 200
            assert stage.ends() == {"completed": 1, "would_wait": 1}

    run_virtual(scenario())


def test_retry_after_is_how_long_the_queue_takes_to_drain() -> None:
    """Two seconds a start and five requests that wait: ten seconds."""

    async def two_seconds(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(2.0)
        return answer()

    async def scenario() -> None:
        control = ControlConfig(policy=PolicyName.CENTRAL_FCFS, queue_max=5)
        stage = Stage({"a": HandlerTransport(two_seconds)}, batch_limit=1, control=control)
        async with stage.open():
            inside = [asyncio.create_task(stage.post()) for _ in range(6)]
            await asyncio.sleep(0)
            for _ in range(4):
                await asyncio.sleep(1.999)
                inside.append(asyncio.create_task(stage.post()))
            await asyncio.sleep(0)
            refused = await stage.post()
            assert refused.status == 429
            told_s = int(refused.header("retry-after") or 0)
            waiting = stage.queue.stats().router.waiting
            assert abs(told_s - 2 * waiting) <= 2
            await asyncio.gather(*inside)

    run_virtual(scenario())


def test_retry_after_has_bounds_and_says_when_nothing_starts_any_more() -> None:
    async def forever(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1000.0)
        return answer()

    async def scenario() -> None:
        control = ControlConfig(policy=PolicyName.CENTRAL_FCFS, queue_max=1, max_wait_s=2000.0)
        stage = Stage({"a": HandlerTransport(forever)}, batch_limit=1, control=control)
        async with stage.open():
            inside = [asyncio.create_task(stage.post())]
            await asyncio.sleep(0.1)
            inside.append(asyncio.create_task(stage.post()))
            await asyncio.sleep(500.0)
            refused = await stage.post()
            assert refused.header("retry-after") == "60"
            for task in inside:
                task.cancel()
            await asyncio.wait(inside)

    run_virtual(scenario())


def test_answers_tell_worker_wait_own_time_and_price_unless_switched_off() -> None:
    names = [f"x-bidgate-{name}" for name in ("worker", "queue-ms", "overhead-ms", "price")]

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(slow)}, batch_limit=1).open() as stage:
            first = asyncio.create_task(stage.post())
            await asyncio.sleep(2.0)
            second = await stage.post()
            assert second.header("x-bidgate-worker") == "a"
            assert second.header("x-bidgate-queue-ms") == "8000.0"
            assert float(second.header("x-bidgate-overhead-ms") or -1) >= 0
            assert float(second.header("x-bidgate-price") or -1) >= 0
            await first
        quiet = EdgeConfig(response_headers=False)
        async with Stage({"a": HandlerTransport(slow)}, edge=quiet).open() as stage:
            exchange = await stage.post()
            assert exchange.status == 200
            assert [exchange.header(name) for name in names] == [None] * 4
            assert exchange.header("x-request-id")

    run_virtual(scenario())


def test_the_price_is_what_the_slots_and_the_prompt_cost_there() -> None:
    async def scenario() -> None:
        stage = Stage({"a": HandlerTransport(slow)}, batch_limit=1)
        async with stage.open():
            stage.queue._router.prices_of = lambda _: (2.0, 0.5)  # type: ignore[method-assign]
            exchange = await stage.post(completion(prompt=[1] * 10, n=3))
            assert exchange.header("x-bidgate-price") == "21"

    run_virtual(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("name", ["x-bidgate-worker", "x-gateway-destination-endpoint"])
@pytest.mark.parametrize("may", [True, False])
def test_a_client_may_name_its_worker_where_the_operator_lets_it(
    path: str, name: str, may: bool
) -> None:
    async def plain(_: httpx.Request) -> httpx.Response:
        return answer()

    async def scenario() -> None:
        workers = {worker: HandlerTransport(plain) for worker in ("a", "b", "c")}
        edge = EdgeConfig(clients_pin=may)
        async with Stage(workers, edge=edge).open() as stage:  # type: ignore[arg-type]
            headers = {name: "c", "content-type": "application/json"}
            got = [await stage.post(path=path, headers=headers) for _ in range(3)]
            assert {one.status for one in got} == {200}
            served = {one.header("x-bidgate-worker") for one in got}
            assert (served == {"c"}) == may

    run_virtual(scenario())


class SlowUpload:
    """A client whose body takes its time."""

    def __init__(self, body: bytes, takes_s: float) -> None:
        self._parts = [body[:5], body[5:]]
        self._takes_s = takes_s

    async def send(self, stage: Stage, headers: dict[str, str] | None = None) -> Exchange:
        exchange = Exchange()

        async def app(scope: Any, _: Any, send: Any) -> None:
            async def receive() -> dict[str, object]:
                if len(self._parts) == 1:
                    await asyncio.sleep(self._takes_s)
                if self._parts:
                    part = self._parts.pop(0)
                    return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
                await asyncio.Event().wait()
                raise AssertionError("unreachable")

            await stage.app(scope, receive, send)

        scope = http_scope("POST", "/v1/completions", headers)
        return await exchange.play(app, scope, [])


def test_a_slow_upload_gains_no_age_and_costs_no_patience() -> None:
    async def scenario() -> None:
        seen: list[float] = []

        async def noting(_: httpx.Request) -> httpx.Response:
            seen.append(clock())
            return answer()

        async with Stage({"a": HandlerTransport(noting)}).open() as stage:
            body = json.dumps(completion()).encode()
            # Its wait is over before its body is here: but it has not begun to wait.
            exchange = await SlowUpload(body, 30.0).send(stage, {"x-bidgate-max-wait-ms": "50"})
            assert (exchange.status, seen) == (200, [30.0])
            placed = stage.placed()
            await SlowUpload(body, 30.0).send(stage)
            assert [request.arrival_s for request in placed] == [60.0]

    run_virtual(scenario())


HOSTILE = ["a\nb", "\x1b[31mred", "tab\tname", "rtl\u202e", "\ud800", "line\u2028sep", "\x00"]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("form", list(LogFormat))
def test_no_name_of_a_client_breaks_a_log_line_or_the_answer(
    name: str, form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    configure_logging(form, LogLevel.INFO)

    async def plain(_: httpx.Request) -> httpx.Response:
        return answer()

    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(plain)}, models=None).open() as stage:
            body = json.dumps(completion(model=name)).encode()
            exchange = await stage.post(body, headers={"x-bidgate-tenant": "t\x1b[0m"})
            assert exchange.status == 200

    run_virtual(scenario())
    out.flush()
    written = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert written.count("\n") == 1
    assert "request" in written
    assert printable(written.rstrip("\n")) == written.rstrip("\n")


def test_a_traceback_keeps_its_lines_and_loses_what_is_not_printable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    configure_logging(LogFormat.TEXT, LogLevel.INFO)
    try:
        raise ValueError("\x1b[31mhostile")
    except ValueError:
        structlog.get_logger("bidgate").exception("broke")
    out.flush()
    written = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "Traceback" in written
    assert "\x1b" not in written
    assert "\\x1b[31mhostile" in written
