"""/metrics shows prices, queue, ledger, decisions, latency; /ready and /scarcity say it short."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from service.control.config import AffinityConfig, ControlConfig, PolicyName
from service.control.events import WorkerChanged, WorkerGone, WorkerState
from service.control.stats import WorkerStats
from service.control.view import Pair, View
from service.explain import Scarcity, explain
from tests.asgi import Exchange
from tests.clock import run_virtual
from tests.service.stage import DONE, HandlerTransport, Stage, answer, completion, event, stream

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(stage: Stage) -> Series:
    """The page, parsed by Prometheus's own parser."""
    exchange = await stage.send("GET", "/metrics")
    assert exchange.status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exchange.body.decode())
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"bidgate_{name}", tuple(sorted(labels.items()))]


async def slow_stream(_: httpx.Request) -> httpx.Response:
    return stream((1.0, event()), (1.0, event()), (0.0, DONE))


async def plain(_: httpx.Request) -> httpx.Response:
    return answer()


def test_a_request_in_flight_shows_in_queue_and_ledger_and_then_in_the_counts() -> None:
    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(slow_stream)}, batch_limit=1).open() as stage:
            both = [asyncio.create_task(stage.post(completion(stream=True))) for _ in range(2)]
            await asyncio.sleep(1.5)
            during = await scrape(stage)
            await asyncio.gather(*both)
            after = await scrape(stage)
        assert (value(during, "queue_running"), value(during, "queue_waiting")) == (1, 1)
        assert value(during, "queue_oldest_wait_seconds") == 1.5
        assert value(during, "worker_active", worker="a") == 1
        assert value(during, "worker_startable", worker="a") == 0
        assert value(during, "worker_kv_tokens", worker="a") > 0
        assert (value(after, "queue_running"), value(after, "queue_waiting")) == (0, 0)
        assert value(after, "requests_entered_total") == 2
        assert value(after, "requests_ended_total", outcome="completed") == 2
        assert value(after, "starts_total") == 2
        assert value(after, "accounting_imbalance") == 0
        assert value(after, "responses_total", code="200") == 2
        assert value(after, "ttft_seconds_count") == 2
        assert value(after, "ttft_seconds_sum") == 1.0 + 3.0
        assert value(after, "e2e_seconds_sum") == 2.0 + 4.0
        assert value(after, "queue_wait_seconds_sum") == 2.0
        assert value(after, "tick_seconds_count") == value(after, "ticks_total")

    run_virtual(scenario())


def test_prices_of_scarce_slots_are_on_the_page_per_worker_and_resource() -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(2.0)
        return answer()

    async def scenario() -> None:
        stage = Stage(
            {name: HandlerTransport(slow) for name in "ab"},
            batch_limit=2,
            control=ControlConfig(policy=PolicyName.ONLINE_LP),
        )
        async with stage.open():
            body = completion(max_tokens=100, ignore_eos=True)
            tasks = [asyncio.create_task(stage.post(body)) for _ in range(40)]
            await asyncio.sleep(10.0)
            series = await scrape(stage)
            await asyncio.gather(*tasks)
        prices = [value(series, "shadow_price", worker=name, resource="batch") for name in "ab"]
        assert max(prices) > 0
        assert value(series, "shadow_price", worker="a", resource="kv") >= 0
        assert value(series, "price_refreshes_total") > 0

    run_virtual(scenario())


def test_the_hit_rate_is_on_the_page_with_the_reward_for_caches_and_without() -> None:
    """A conversation goes on where its beginning is cached, though the other worker is emptier."""

    async def quick(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(100.0 if b"filler" in request.content else 0.5)
        return answer()

    async def rates(weight: float) -> tuple[Series, list[str | None]]:
        control = ControlConfig(
            policy=PolicyName.ONLINE_LP, affinity=AffinityConfig(weight=weight), slow_start_s=0.0
        )
        workers = {name: HandlerTransport(quick) for name in "ab"}
        async with Stage(dict(workers), control=control).open() as stage:
            at, fillers = [], []
            for turn in range(1, 5):
                talk = completion(
                    prompt="".join(f"What was said as {n}. " for n in range(90 * turn))
                )
                at.append((await stage.post(talk)).header("x-bidgate-worker"))
                filler = completion(prompt=f"filler {turn}", max_tokens=500)
                fillers.append(asyncio.create_task(stage.post(filler)))
                await asyncio.sleep(0.5)
            series = await scrape(stage)
            await asyncio.gather(*fillers)
            return series, at

    page, where = run_virtual(rates(1.0))
    assert len(set(where)) == 1
    prompts = value(page, "affinity_prompt_tokens_total")
    hits = {
        name: value(page, "affinity_hit_tokens_total", affinity=name)
        for name in ("with", "without")
    }
    for name, tokens in hits.items():
        assert value(page, "affinity_hit_rate", affinity=name) == tokens / prompts
    # Of turns of 1, 2, 3 and 4 parts the last three find all that was said before.
    assert hits["with"] / prompts == pytest.approx(6 / 10, abs=0.05)
    assert 0 < hits["without"] < hits["with"]
    page, where = run_virtual(rates(0.0))
    assert len(set(where)) == 2
    assert value(page, "affinity_prompt_tokens_total") == 0


def test_a_worker_that_left_leaves_no_series() -> None:
    async def scenario() -> None:
        stage = Stage({name: HandlerTransport(plain) for name in "ab"})
        async with stage.open():
            stage.queue.publish(WorkerGone("b"))
            series = await scrape(stage)
        named = {dict(labels).get("worker") for _, labels in series}
        assert named == {"a", None}

    run_virtual(scenario())


async def under_a_name(stage: Stage, name: str) -> None:
    """Ask for everything, by every word that a client is free to choose."""
    headers = {
        "x-request-id": name,
        "x-bidgate-tenant": name,
        "x-session-id": name,
        "x-dynamo-session-id": name,
        "x-bidgate-worker": name,
        "authorization": f"Bearer {name}",
        "user-agent": name,
        "content-type": "application/json",
    }
    body = completion(model=name, prompt=name, user=name)
    chat = {"model": name, "messages": [{"role": "system", "content": name}], "max_tokens": 4}
    await stage.post(body, headers=headers)
    await stage.post(chat, path="/v1/chat/completions", headers=headers)
    await stage.post({"model": name, "input": name}, path="/v1/embeddings", headers=headers)
    await stage.post(body | {"max_tokens": 0}, headers=headers)
    for path in (f"/nope/{name}", f"/v1/{name}", f"/v1/responses/{name}"):
        await stage.send("GET", path, headers=headers)
    await stage.send(name.upper(), "/v1/completions", headers=headers)


def test_no_label_is_the_clients_to_choose() -> None:
    async def scenario() -> tuple[Series, Series]:
        control = ControlConfig(policy=PolicyName.ONLINE_LP)
        stage = Stage({"a": HandlerTransport(plain)}, models=None, control=control)
        async with stage.open():
            await under_a_name(stage, "chosen-first")
            first = await scrape(stage)
            for number in range(120):
                await under_a_name(stage, f"chosen-{number}")
            return first, await scrape(stage)

    first, last = run_virtual(scenario())
    assert last.keys() == first.keys()
    assert value(last, "requests_entered_total") == 242
    assert not [key for key in last if "chosen" in str(key).lower()]


def test_ready_says_why_not() -> None:
    async def scenario() -> None:
        async def ready(stage: Stage) -> tuple[int, str | None]:
            exchange = await stage.send("GET", "/ready")
            return exchange.status, json.loads(exchange.body).get("why")

        stage = Stage({"a": HandlerTransport(plain)})
        async with stage.open():
            assert await ready(stage) == (200, None)
            stage.queue.publish(WorkerChanged("a", WorkerState.DOWN))
            assert await ready(stage) == (503, "no worker is up")
            stage.queue.publish(WorkerChanged("a", WorkerState.UP))
            assert await ready(stage) == (200, None)
            stage.queue.drain()
            assert await ready(stage) == (503, "draining")

    run_virtual(scenario())


def test_decisions_by_the_fallback_serve_and_are_told() -> None:
    async def scenario() -> None:
        stage = Stage(
            {"a": HandlerTransport(plain)}, control=ControlConfig(policy=PolicyName.ONLINE_LP)
        )

        def broken(_: View) -> list[Pair]:
            raise ArithmeticError("a bug")

        async with stage.open():
            stage.router._policy.decide = broken  # type: ignore[method-assign]
            assert (await stage.post()).status == 200
            ready = await stage.send("GET", "/ready")
            assert (ready.status, json.loads(ready.body)["status"]) == (200, "degraded")
            series = await scrape(stage)
            assert value(series, "falling_back") == 1
            assert value(series, "fallback_ticks_total") == 1

    run_virtual(scenario())


def test_prices_have_no_age_before_there_are_any() -> None:
    async def scenario() -> None:
        stage = Stage(
            {"a": HandlerTransport(plain)}, control=ControlConfig(policy=PolicyName.CENTRAL_FCFS)
        )
        async with stage.open():
            await stage.post()
            names = {name for name, _ in await scrape(stage)}
            assert "bidgate_price_age_seconds" not in names
            scarcity = json.loads((await stage.send("GET", "/scarcity")).body)
            assert scarcity["price_age_s"] is None

    run_virtual(scenario())


def test_each_request_is_one_line_with_what_became_of_it() -> None:
    async def scenario() -> None:
        async with Stage({"a": HandlerTransport(slow_stream)}).open() as stage:
            secret = {"authorization": "Bearer s3cret", "x-request-id": "one"}
            with capture_logs() as lines:
                await stage.post(completion(stream=True), headers=secret)
                gone = Exchange()
                asyncio.get_running_loop().call_later(0.5, gone.leave)
                await stage.post(completion(stream=True), exchange=gone)
                await stage.post(b"{")
        assert [line["event"] for line in lines] == ["request"] * 3
        served, left, broken = lines
        assert served["request_id"] == "one"
        assert (served["outcome"], served["status"], served["worker"]) == ("completed", 200, "a")
        assert (served["decode_tokens"], served["ttft_s"], served["e2e_s"]) == (2, 1.0, 2.0)
        assert (left["outcome"], left["status"]) == ("cancelled", 499)
        assert (broken["outcome"], broken["status"]) == ("failed", 400)
        assert "s3cret" not in repr(lines)

    run_virtual(scenario())


def worker(name: str, **fields: object) -> WorkerStats:
    values: dict[str, object] = {
        "worker_id": name,
        "state": WorkerState.UP,
        "batch_limit": 8,
        "active": 8,
        "foreign": 0,
        "kv_tokens": 500,
        "kv_capacity_tokens": 1000,
        "iteration_s": 0.02,
        "token_s": 0.02,
        "startable": False,
        "price_batch": 0.0,
        "price_kv": 0.0,
    }
    return WorkerStats(**values | fields)  # type: ignore[arg-type]


def scarcity(*workers: WorkerStats, waiting: int = 3) -> str:
    return explain(
        Scarcity(
            waiting=waiting,
            running=8,
            oldest_wait_s=1.5,
            arrivals_per_s=2.0,
            price_age_s=0.1,
            workers=workers,
        )
    )


def test_explain_names_the_scarcest_worker_and_resource() -> None:
    words = scarcity(worker("a", price_batch=0.5), worker("b", price_batch=2.0))
    assert "8 requests run, 3 wait, the oldest for 1.50 s" in words
    assert "Scarcest for the arrivals expected next: batch slots on b. One more slot there" in words
    assert words.index("  b ") < words.index("  a ")
    kv = scarcity(worker("a", price_batch=0.5, price_kv=0.1), worker("b", price_batch=2.0))
    assert "Scarcest for the arrivals expected next: KV memory on a. One more token of it" in kv


def test_explain_says_what_prices_are_of_where_there_are_any() -> None:
    """After a burst slots may be free, with nobody waiting, and their price above zero."""
    after_a_burst = scarcity(worker("a", active=0, price_batch=0.5), waiting=0)
    assert "not of who is here now" in after_a_burst
    assert "not of who is here now" not in scarcity(worker("a"))


def test_explain_says_when_nothing_is_scarce_or_nobody_is_there() -> None:
    assert "Nothing is scarce" in scarcity(worker("a"))
    assert "No worker is up" in scarcity(worker("a", state=WorkerState.DOWN))
    assert "No worker is known" in scarcity()


def test_explain_reads_what_the_service_answers() -> None:
    async def scenario() -> bytes:
        async with Stage({"a": HandlerTransport(plain)}).open() as stage:
            return (await stage.send("GET", "/scarcity")).body

    state = TypeAdapter(Scarcity).validate_json(run_virtual(scenario()))
    assert [one.worker_id for one in state.workers] == ["a"]
