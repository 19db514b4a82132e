"""A hung engine behind a server that answers: counters that stand still while requests run."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from service.control.events import WorkerState
from service.engine_metrics import parse_engine_page
from service.engine_progress import EngineProgress
from service.fleet_types import WatchConfig
from tests.clock import run_virtual
from tests.service.scripted_server import ScriptedServer, page
from tests.service.watched import watching

PATIENT = WatchConfig(stalled_after_s=10.0)


def test_it_is_out_of_use_after_the_bound_and_back_when_it_moves() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(running=3, gaps=100))
        async with watching({"a": server, "b": ScriptedServer()}, PATIENT) as watched:
            await asyncio.sleep(9.0)
            assert watched.state("a") is WorkerState.UP
            with capture_logs() as logs:
                await asyncio.sleep(3.0)
                assert watched.state("a") is WorkerState.DOWN
                await asyncio.sleep(60.0)
            assert watched.states["a"].count(WorkerState.DOWN) == 2  # at the start, and now
            assert [line["event"] for line in logs] == ["worker_stalled"]
            assert watched.state("b") is WorkerState.UP
            server.metrics = page(running=3, gaps=101)
            await asyncio.sleep(1.0)
            assert watched.state("a") is WorkerState.UP
            stalls = {stats.worker_id: stats.stalls for stats in watched.fleet.stats()}
            assert stalls == {"a": 1, "b": 0}

    run_virtual(scenario())


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param(page(running=0, waiting=0, gaps=5), id="idle"),
        pytest.param(b"vllm:num_requests_running 3\n", id="no counters to go by"),
        pytest.param(b"vllm:generation_tokens_total 3\n", id="running unknown"),
    ],
)
def test_what_is_idle_or_unknown_is_not_stalled(metrics: bytes) -> None:
    async def scenario() -> None:
        async with watching({"a": ScriptedServer(metrics=metrics)}, PATIENT) as watched:
            await asyncio.sleep(100.0)
            assert watched.state("a") is WorkerState.UP

    run_virtual(scenario())


def test_a_busy_engine_that_moves_however_slowly_is_healthy() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}, PATIENT) as watched:
            for tokens in range(20):
                server.metrics = page(running=8, waiting=50, kv_use=1.0, gaps=tokens)
                await asyncio.sleep(8.0)
            assert watched.states["a"] == [WorkerState.DOWN, WorkerState.UP]

    run_virtual(scenario())


def test_one_hung_engine_of_several_is_enough_and_a_restart_clears_it() -> None:
    progress = EngineProgress()

    def note(hung_tokens: int, other_tokens: int, now_s: float) -> float:
        both = page(running=1, gaps=hung_tokens) + page(running=1, gaps=other_tokens, engine="1")
        return progress.note(parse_engine_page(both), now_s)

    assert note(5, 1, 0.0) == 0.0
    assert note(5, 2, 10.0) == 10.0
    assert note(5, 3, 20.0) == 20.0
    assert note(0, 0, 21.0) == 0.0
