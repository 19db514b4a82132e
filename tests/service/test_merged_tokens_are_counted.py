"""Tokens that share an event are estimated from the engine's own counter, and only those."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.control.events import Request, WorkerReport, WorkerReported
from service.engine_metrics import parse_engine_page
from service.engine_reports import EngineReports
from service.merged_tokens import MergedTokens
from service.worker_config import WorkerConfig
from tests.clock import run_virtual
from tests.service.scripted_server import page
from tests.service.stage import DONE, HandlerTransport, Stage, completion, event, stream


def request(name: str = "a", **fields: object) -> Request:
    return Request(
        **{"request_id": name, "arrival_s": 0.0, "prompt_tokens": 10} | fields  # type: ignore[arg-type]
    )


def made(tokens: int | None, **fields: int) -> WorkerReport:
    return WorkerReport(generated_tokens=tokens, **fields)  # type: ignore[arg-type]


def following(*names: str) -> MergedTokens:
    merged = MergedTokens()
    for name in names:
        merged.start(request(name), "w")
    return merged


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=40))
def test_streams_of_one_event_a_token_are_believed_but_for_what_is_under_way(
    windows: list[tuple[int, int]],
) -> None:
    merged = following("a", "b")
    told = dict.fromkeys("ab", 0)
    total = 0
    for tokens, under_way in windows:
        total += tokens
        for name in told:
            told[name] = max(told[name], total - under_way)
            merged.note(name, told[name], exact=False)
        merged.reconcile("w", made(2 * tokens))
    for name, seen in told.items():
        estimate = merged.note(name, seen, exact=False)
        # Never more than the most that was under way, and never past the truth by more than that.
        assert seen <= estimate <= seen + 3


def test_tokens_in_shared_events_are_found_at_every_report() -> None:
    merged = following("a", "b")
    for window in range(1, 11):
        # Ten tokens each, in seven and five events.
        merged.note("a", 7 * window, exact=False)
        merged.note("b", 5 * window, exact=False)
        better = merged.reconcile("w", made(20))
        assert better == {"a": 7 * window + 4 * window, "b": 5 * window + 4 * window}
        assert sum(better.values()) == 20 * window
    assert merged.note("a", 71, exact=False) == 71 + 40
    assert merged.end(request("a")) == 40
    assert merged.end(request("a")) == 0


def test_a_usage_object_settles_a_stream_and_costs_the_others_nothing() -> None:
    merged = following("a", "b")
    for window in range(1, 5):
        for name in "ab":
            merged.note(name, 5 * window, exact=False)
        merged.reconcile("w", made(20))
    assert merged.note("a", 40, exact=True) == 40
    assert merged.end(request("a")) == 0
    merged.note("b", 25, exact=False)
    assert merged.reconcile("w", made(10)) == {"b": 25 + 20 + 5}


def test_sequences_of_a_request_share_what_is_missing() -> None:
    merged = MergedTokens()
    merged.start(request("a", sequences=3), "w")
    merged.note("a", 4, exact=False)
    assert merged.reconcile("w", made(3 * 6 + 2)) == {"a": 6}
    merged.note("a", 5, exact=False)
    # The two tokens that could not be shared evenly are not lost.
    assert merged.reconcile("w", made(3 + 1)) == {"a": 8}


@pytest.mark.parametrize(
    "report",
    [made(None), made(100, running=2), made(100, running=1, waiting=1)],
    ids=["unknown", "others in the batch", "others in the queue"],
)
def test_nothing_is_estimated_from_a_counter_that_counts_others(report: WorkerReport) -> None:
    merged = following("a")
    merged.note("a", 5, exact=False)
    assert merged.reconcile("w", report) == {}
    assert merged.note("a", 6, exact=False) == 6
    assert merged.reconcile("w", made(1)) == {}


def test_nothing_is_estimated_beside_requests_that_do_not_stream() -> None:
    merged = following("a")
    silent = request("s", streams=False)
    merged.start(silent, "w")
    merged.note("a", 5, exact=False)
    assert merged.reconcile("w", made(50)) == {}
    merged.end(silent)
    # It ran for a part of this window too.
    assert merged.reconcile("w", made(50)) == {}
    assert merged.reconcile("w", made(50)) == {"a": 55}


def test_a_stream_that_has_not_begun_gets_no_tokens_and_an_idle_worker_keeps_none() -> None:
    merged = following("a")
    assert merged.reconcile("w", made(30)) == {}
    merged.note("a", 1, exact=False)
    assert merged.reconcile("w", made(1)) == {}


def test_a_worker_that_left_is_forgotten() -> None:
    merged = following("a")
    merged.note("a", 5, exact=False)
    merged.drop_worker("w")
    assert merged.note("a", 9, exact=False) == 9
    assert merged.end(request("a")) == 0


def test_the_engines_counter_is_read_as_what_it_grew() -> None:
    worker = WorkerConfig(worker_id="w", url="http://w", batch_limit=8)
    reports = EngineReports(worker)

    def grown(body: bytes) -> int | None:
        return reports.report(parse_engine_page(body)).generated_tokens

    assert grown(page(gaps=100)) is None
    assert grown(page(gaps=130)) == 30
    # A second engine shows up: what it made before is not known.
    assert grown(page(gaps=140) + page(gaps=500, engine="1")) is None
    assert grown(page(gaps=150) + page(gaps=520, engine="1")) == 30
    assert grown(page(gaps=160)) is None
    assert grown(page(gaps=10)) is None


def test_the_ledger_and_what_is_learned_follow_the_estimate() -> None:
    async def scenario() -> None:
        answer = stream(
            (0.0, event()), *((1.0, event() * 5) for _ in range(4)), (10.0, event()), (0.0, DONE)
        )

        async def handler(_: httpx.Request) -> httpx.Response:
            return answer

        async with Stage({"a": HandlerTransport(handler)}).open() as stage:
            body = completion(prompt=[1] * 10, max_tokens=400, stream=True)
            task = asyncio.create_task(stage.post(body))
            report = WorkerReported("a", replace(made(None), running=1), 0.0)
            await asyncio.sleep(0.5)
            stage.queue.publish(report)
            for _ in range(4):
                await asyncio.sleep(1.0)
                counted = replace(report, report=made(10, running=1))
                stage.queue.publish(counted)
            await asyncio.sleep(0.1)
            (worker,) = stage.queue.stats().router.workers
            # One token at first, then 40 by the engine's count in 20 events.
            assert worker.kv_tokens == 10 + 41
            await task

    run_virtual(scenario())
