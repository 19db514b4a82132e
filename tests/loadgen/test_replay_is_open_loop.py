"""The replay sends on its own beat, and every request it sent ends exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from loadgen.outcomes import End, OutcomeRecord, read_outcomes, write_outcomes
from loadgen.prompts import PromptForm
from loadgen.replay import Replay, ReplaySettings
from loadgen.trace_record import TraceRequest
from tests.loadgen.fake_server import (
    STREAM_HEAD,
    FakeServer,
    Received,
    event,
    fake_server,
    plain_answer,
    stream_answer,
    token_event,
)

if TYPE_CHECKING:
    from pathlib import Path


def workload(requests: int, gap_s: float = 0.002, **changes: object) -> list[TraceRequest]:
    return [
        TraceRequest(index * gap_s, 5, 3, **changes)  # type: ignore[arg-type]
        for index in range(requests)
    ]


async def run(
    fake: FakeServer, requests: list[TraceRequest], **settings: object
) -> list[OutcomeRecord]:
    return await Replay(requests, ReplaySettings(url=fake.url, **settings)).run()  # type: ignore[arg-type]


async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
    await stream_answer(writer, request.body["mock_decode_tokens"])


async def test_a_completion_is_one_record_with_its_times_and_tokens() -> None:
    async with fake_server(answer) as fake:
        (record,) = await run(fake, workload(1), policy="p")
    assert record.outcome is End.COMPLETED
    assert (record.policy, record.status, record.output_tokens) == ("p", 200, 3)
    assert (record.worker, record.queue_s) == ("w0", 0.0125)
    assert record.ttft_s is not None
    assert 0 < record.ttft_s <= record.e2e_s < 5


async def test_a_request_carries_length_forecast_and_an_exact_prompt() -> None:
    async with fake_server(answer) as fake:
        await run(
            fake,
            workload(1, decode_tokens_hint=4, tenant="acme", value=2.5, ttft_bound_s=0.3),
            api_key="k",
        )
        (sent,) = fake.received
    assert len(sent.body["prompt"]) == 5
    assert sent.body["max_tokens"] == sent.body["mock_decode_tokens"] == 3
    assert sent.body["ignore_eos"] is True
    assert sent.body["model"] == "tiny"
    assert sent.headers["x-bidgate-decode-tokens"] == "4"
    assert sent.headers["x-bidgate-tenant"] == "acme"
    assert sent.headers["x-bidgate-value"] == "2.5"
    assert sent.headers["x-bidgate-ttft-ms"] == "300"
    assert sent.headers["authorization"] == "Bearer k"


async def test_a_cap_keeps_the_length_out_of_max_tokens_and_text_prompts_are_words() -> None:
    async with fake_server(answer) as fake:
        await run(fake, workload(1), max_tokens_cap=100, prompt_form=PromptForm.TEXT)
        (sent,) = fake.received
    assert (sent.body["max_tokens"], sent.body["mock_decode_tokens"]) == (100, 3)
    assert len(sent.body["prompt"].split()) == 5
    assert "x-bidgate-decode-tokens" not in sent.headers


async def test_a_server_that_answers_nothing_does_not_slow_the_sends() -> None:
    """More requests than any default connection limit (100) are in flight together."""
    everything_sent = asyncio.Event()

    async def hold(request: Received, writer: asyncio.StreamWriter) -> None:
        if len(fake.received) == 150:
            everything_sent.set()
        await everything_sent.wait()
        await answer(request, writer)

    async with fake_server(hold) as fake:
        records = await run(fake, workload(150), drain_s=30.0)
    assert Counter(record.outcome for record in records) == {End.COMPLETED: 150}
    assert [record.index for record in records] == list(range(150))


async def test_the_deadline_ends_what_never_ends() -> None:
    async def stall(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.body["mock_decode_tokens"] == 3:
            writer.write(STREAM_HEAD + token_event())
            await writer.drain()
        await asyncio.sleep(60)

    requests = [TraceRequest(0.0, 1, 3), TraceRequest(0.0, 1, 4)]
    async with fake_server(stall) as fake:
        async with asyncio.timeout(20):
            started, silent = await run(fake, requests, drain_s=0.3)
    assert started.outcome is silent.outcome is End.CANCELLED
    assert started.output_tokens == 1
    assert started.ttft_s is not None
    assert silent.ttft_s is None


async def test_an_interrupted_run_still_accounts_for_what_it_sent() -> None:
    third_came = asyncio.Event()

    async def stall(request: Received, writer: asyncio.StreamWriter) -> None:
        if len(fake.received) == 3:
            third_came.set()
        await asyncio.sleep(60)

    async with fake_server(stall) as fake:
        replay = Replay(workload(20), ReplaySettings(url=fake.url, drain_s=60.0))
        task = asyncio.create_task(replay.run())
        await third_came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(replay.records) == replay.sent
    assert {record.outcome for record in replay.records} == {End.CANCELLED}


BUSY = {"error": {"message": "full", "type": "rate_limit_error", "code": "queue_full"}}


@pytest.mark.parametrize(
    ("written", "end", "detail"),
    [
        (plain_answer(429, BUSY), End.REFUSED, "queue_full: full"),
        (plain_answer(503, BUSY), End.REFUSED, "queue_full"),
        (plain_answer(400, {"error": {"message": "too long", "code": None}}), End.REFUSED, "too"),
        (plain_answer(504, BUSY), End.FAILED, "queue_full"),
        (plain_answer(500, {"detail": "boom"}), End.FAILED, "500"),
        (b"", End.FAILED, ""),
        (STREAM_HEAD, End.FAILED, "ended early"),
        (STREAM_HEAD + token_event(), End.FAILED, "ended early"),
        (STREAM_HEAD + token_event("length"), End.FAILED, "ended early"),
        (STREAM_HEAD + b"data: {no\n\ndata: [DONE]\n\n", End.FAILED, "not JSON"),
        (
            STREAM_HEAD
            + token_event()
            + event({"error": {"message": "died", "code": 500}})
            + b"data: [DONE]\n\n",
            End.FAILED,
            "died",
        ),
        (
            STREAM_HEAD + event({"error": {"message": "busy", "code": 503}}) + b"data: [DONE]\n\n",
            End.REFUSED,
            "busy",
        ),
    ],
)
async def test_every_bad_end_is_named(written: bytes, end: End, detail: str) -> None:
    async def misbehave(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(written)

    async with fake_server(misbehave) as fake:
        (record,) = await run(fake, workload(1))
    assert record.outcome is end
    assert detail in record.detail


async def test_a_server_that_goes_away_fails_the_rest_and_the_run_ends() -> None:
    async with fake_server(answer) as fake:
        url = fake.url
    records = await Replay(workload(3), ReplaySettings(url=url, model="tiny")).run()
    assert [record.outcome for record in records] == [End.FAILED] * 3
    assert all(record.status is None and record.detail for record in records)


async def test_outcomes_survive_the_file(tmp_path: Path) -> None:
    async with fake_server(answer) as fake:
        records = await run(fake, workload(3))
    path = tmp_path / "outcomes.jsonl"
    assert write_outcomes(records, path) == 3
    assert list(read_outcomes(path)) == records
    path.write_text('{"policy": "p"}\n')
    with pytest.raises(ValueError, match=r"outcomes.jsonl:1: "):
        list(read_outcomes(path))
