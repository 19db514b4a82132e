"""Who is refused at a full queue, over HTTP: the least valuable, told as any other refusal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
from structlog.testing import capture_logs

from service.control import ControlConfig
from service.edge import EdgeConfig
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.live import mock, serving_mocks, until
from tests.service.stage import DONE, HandlerTransport, Stage, answer, completion, event, stream

SHORT = ControlConfig(queue_max=2)


def worth(value: float) -> dict[str, str]:
    return {"x-bidgate-value": f"{value:g}"}


def play(
    scenario: Callable[[Stage], Awaitable[None]],
    control: ControlConfig = SHORT,
    edge: EdgeConfig | None = None,
) -> None:
    """Play in front of one worker of one slot, where each request takes 10 s."""

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(10.0)
        if b'"stream":true' in request.content.replace(b" ", b""):
            return stream((0.0, event("x")), (0.0, DONE))
        return answer()

    async def staged() -> None:
        stage = Stage(
            {"a": HandlerTransport(slow)}, batch_limit=1, control=control, edge=edge or EdgeConfig()
        )
        async with stage.open():
            await scenario(stage)
            assert stage.inside.bytes.held == 0

    run_virtual(staged())


async def post(stage: Stage, value: float | None, **body: object) -> asyncio.Task[Exchange]:
    """Send a request that is inside when this returns."""
    raw = json.dumps(completion(**body)).encode()
    headers = {"content-length": str(len(raw))} | ({} if value is None else worth(value))
    task = asyncio.create_task(stage.send("POST", "/v1/completions", raw, headers=headers))
    await asyncio.sleep(0.1)
    return task


def test_the_least_valuable_is_refused_with_a_reason_of_its_own_and_when_to_come_back() -> None:
    async def scenario(stage: Stage) -> None:
        with capture_logs() as logs:
            running, older, newer = [await post(stage, 1.0) for _ in range(3)]
            high = await post(stage, 2.0)
            gone = await newer
            assert (gone.status, gone.header("x-bidgate-reason")) == (429, "displaced")
            assert gone.error["code"] == "displaced"
            assert gone.error["type"] == "rate_limit_error"
            assert "more value" in gone.error["message"]
            assert 1 <= int(gone.header("retry-after") or 0) <= 60
            equal = await (await post(stage, 1.0))
            assert (equal.status, equal.error["code"]) == (429, "queue_full")
            done = await asyncio.gather(running, high, older)
            assert [exchange.status for exchange in done] == [200, 200, 200]
        (line,) = [line for line in logs if line.get("reason") == "displaced"]
        assert (line["event"], line["outcome"], line["status"]) == ("request", "refused", 429)
        assert stage.ends() == {"completed": 3, "displaced": 1, "queue_full": 1}

    play(scenario)


def test_a_priority_in_the_body_counts_as_one_in_a_header() -> None:
    async def scenario(stage: Stage) -> None:
        inside = [await post(stage, None, priority=3) for _ in range(3)]
        same = await (await post(stage, None, priority=3))
        assert (same.status, same.error["code"]) == (429, "queue_full")
        ordinary = await post(stage, None)
        done = await asyncio.gather(*inside, ordinary)
        assert [exchange.status for exchange in done] == [200, 200, 429, 200]

    play(scenario)


def test_who_was_told_to_wait_by_comments_reads_of_it_as_an_event() -> None:
    async def scenario(stage: Stage) -> None:
        await post(stage, 1.0)
        waiting = [await post(stage, 0.5, stream=True) for _ in range(2)]
        await asyncio.sleep(2.0)
        high = await post(stage, 4.0)
        gone = await waiting[1]
        assert gone.status == 200
        assert b'"code":"displaced"' in gone.body.split(b"\n\n")[-2]
        assert (await high).status == 200
        assert (await waiting[0]).status == 200

    play(scenario, edge=EdgeConfig(queue_comment_s=0.5))


def test_it_can_be_switched_off() -> None:
    async def scenario(stage: Stage) -> None:
        inside = [await post(stage, 1.0) for _ in range(3)]
        refused = await (await post(stage, 64.0))
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert {exchange.status for exchange in await asyncio.gather(*inside)} == {200}

    play(scenario, ControlConfig(queue_max=2, displace=False))


TEXT = "x" * 800
TIGHT = EdgeConfig(body_bytes_max=2000, held_bytes_max=2700)


def test_bytes_are_given_up_by_what_waits_and_is_worth_less() -> None:
    async def scenario(stage: Stage) -> None:
        running, low, lower = [await post(stage, value, prompt=TEXT) for value in (1.0, 0.5, 0.25)]
        held = stage.inside.bytes.held
        equal = await (await post(stage, 0.25, prompt=TEXT))
        assert (equal.status, equal.error["code"]) == (429, "queue_full")
        high = await post(stage, 1.0, prompt=TEXT)
        assert stage.inside.bytes.held == held
        gone = await lower
        assert (gone.status, gone.error["code"]) == (429, "displaced")
        assert int(gone.header("retry-after") or 0) >= 1
        done = await asyncio.gather(running, low, high)
        assert [exchange.status for exchange in done] == [200, 200, 200]
        assert stage.ends() == {"completed": 3, "displaced": 1}

    play(scenario, edge=TIGHT)


def test_nobody_goes_for_bytes_that_would_not_be_enough_or_are_not_told() -> None:
    async def scenario(stage: Stage) -> None:
        inside = [await post(stage, value, prompt=TEXT) for value in (1.0, 1.0, 0.25)]
        large = await (await post(stage, 1.0, prompt=TEXT * 2))
        assert (large.status, large.error["code"]) == (429, "queue_full")
        unsaid = await (await post(stage, None, prompt=TEXT))
        assert (unsaid.status, unsaid.error["code"]) == (429, "queue_full")
        body = json.dumps(completion(prompt=TEXT)).encode()
        chunked = await stage.send(
            "POST", "/v1/completions", [body[:400], body[400:]], headers=worth(64.0)
        )
        assert (chunked.status, chunked.error["code"]) == (429, "queue_full")
        assert {exchange.status for exchange in await asyncio.gather(*inside)} == {200}

    play(scenario, edge=TIGHT)


async def test_over_real_sockets_the_reason_is_in_the_header_the_body_and_the_metrics() -> None:
    control = ControlConfig(queue_max=1)
    async with serving_mocks([mock(batch_limit=1)], batch_limit=1, control=control) as live:
        url = f"{live.url}/v1/completions"

        def stands(waiting: int, running: int) -> bool:
            router = live.service.queue.stats().router
            return (router.waiting, router.running) == (waiting, running)

        async def ask(value: float) -> httpx.Response:
            body = completion(model="mock", max_tokens=200, ignore_eos=True)
            return await live.client.post(url, json=body, headers=worth(value))

        first = asyncio.create_task(ask(1.0))
        await until(lambda: stands(0, 1), within_s=20.0)
        low = asyncio.create_task(ask(0.5))
        await until(lambda: stands(1, 1), within_s=20.0)
        high = asyncio.create_task(ask(8.0))
        gone = await low
        assert (gone.status_code, gone.headers["x-bidgate-reason"]) == (429, "displaced")
        assert gone.json()["error"]["code"] == "displaced"
        assert int(gone.headers["retry-after"]) >= 1
        page = (await live.client.get(f"{live.url}/metrics")).text
        assert 'bidgate_refusals_total{reason="displaced"} 1.0' in page
        assert [(await one).status_code for one in (first, high)] == [200, 200]
