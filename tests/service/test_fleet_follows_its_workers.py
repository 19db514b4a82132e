"""The fleet against scripted workers on a virtual clock: what it publishes, and when."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from service.control.events import (
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerState,
)
from service.fleet_types import WatchConfig
from tests.clock import run_virtual
from tests.service.scripted_server import ScriptedServer, page
from tests.service.watched import CONFIG, configured, watching, watching_ranks


def test_a_worker_is_introduced_measured_and_then_put_to_use() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(running=3, waiting=1, kv_use=0.25))
        async with watching({"a": server}) as watched:
            await asyncio.sleep(0.01)
            joined, reported, changed = watched.events
            assert isinstance(joined, WorkerJoined)
            assert joined.state is WorkerState.DOWN
            assert joined.spec.batch_limit == 8
            assert isinstance(reported, WorkerReported)
            assert reported.report == WorkerReport(
                running=3,
                waiting=1,
                kv_tokens_used=4_000,
                kv_capacity_tokens=16_000,
                block_tokens=16,
                preemptions_total=0,
                models=frozenset({"m"}),
            )
            assert changed == WorkerChanged("a", WorkerState.UP)

    run_virtual(scenario())


def test_a_worker_that_is_down_at_start_holds_up_nobody_and_joins_later() -> None:
    async def scenario() -> None:
        servers = {"a": ScriptedServer(listening=False), "b": ScriptedServer()}
        async with watching(servers) as watched:
            await asyncio.sleep(0.05)
            assert watched.state("b") is WorkerState.UP
            await asyncio.sleep(60)
            assert watched.states["a"] == [WorkerState.DOWN]
            assert servers["a"].hits["/metrics/"] == 0
            # Backed off: not more than one probe per reprobe_max_s, after the first few.
            assert servers["a"].hits["/health"] < 10 + 60 / CONFIG.reprobe_max_s
            servers["a"].listening = True
            await asyncio.sleep(CONFIG.reprobe_max_s * (1 + CONFIG.jitter) + 0.1)
            assert watched.states["a"] == [WorkerState.DOWN, WorkerState.UP]

    run_virtual(scenario())


def test_a_worker_that_never_answered_is_told_once_with_the_reason() -> None:
    async def scenario() -> None:
        servers = {"a": ScriptedServer(listening=False), "b": ScriptedServer()}
        with capture_logs() as logs:
            async with watching(servers):
                await asyncio.sleep(60)
                servers["a"].listening = True
                await asyncio.sleep(60)
                servers["a"].listening = False
                await asyncio.sleep(60)
        silent = [line for line in logs if line["event"] == "worker_does_not_answer"]
        assert [line["worker"] for line in silent] == ["a"]
        assert "connection refused" in silent[0]["reason"]

    run_virtual(scenario())


def test_a_worker_that_dies_leaves_at_the_next_look_and_comes_back_by_itself() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            await asyncio.sleep(10)
            server.listening = False
            await asyncio.sleep(CONFIG.metrics_interval_s * 1.2)
            assert watched.state() is WorkerState.DOWN
            silent_at = len(watched.reports())
            await asyncio.sleep(5)
            assert len(watched.reports()) == silent_at
            server.listening = True
            await asyncio.sleep(6)
            assert watched.states["a"] == [
                WorkerState.DOWN,
                WorkerState.UP,
                WorkerState.DOWN,
                WorkerState.UP,
            ]
            assert watched.fleet.stats()[0].times_lost == 1

    run_virtual(scenario())


def test_a_failed_connection_takes_the_worker_out_before_the_call_returns() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            await asyncio.sleep(10)
            watched.fleet.saw_failure("a")
            assert watched.events[-1] == WorkerChanged("a", WorkerState.DOWN)
            watched.fleet.saw_failure("a")
            watched.fleet.saw_failure("nobody")
            assert watched.states["a"].count(WorkerState.DOWN) == 2
            await asyncio.sleep(CONFIG.reprobe_min_s * 1.2)
            assert watched.state() is WorkerState.UP

    run_virtual(scenario())


def test_a_worker_that_keeps_failing_is_tried_ever_less_often_until_it_holds() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            loop = asyncio.get_running_loop()
            pauses_s = []
            for _ in range(8):
                await watched.came_up.wait()
                lost_s = loop.time()
                watched.fleet.saw_failure("a")
                await watched.came_up.wait()
                pauses_s.append(loop.time() - lost_s)
            assert pauses_s[1] > 1.5 * pauses_s[0]
            assert pauses_s[-1] > 0.85 * CONFIG.reprobe_max_s
            assert max(pauses_s) < 1.2 * CONFIG.reprobe_max_s
            await asyncio.sleep(2 * CONFIG.reprobe_max_s)
            watched.fleet.saw_failure("a")
            await asyncio.sleep(CONFIG.reprobe_min_s * 1.2)
            assert watched.state() is WorkerState.UP

    run_virtual(scenario())


def test_one_bad_health_check_is_forgiven_and_a_row_of_them_is_not() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            await asyncio.sleep(10)
            server.health_status = 503
            await asyncio.sleep(CONFIG.health_interval_s * 1.1 + 0.01)
            server.health_status = 200
            await asyncio.sleep(10)
            assert watched.state() is WorkerState.UP
            assert watched.fleet.stats()[0].health_failures >= 1
            server.health_status = 503
            suspect_s = (CONFIG.failures_to_down - 1) * CONFIG.suspect_interval_s
            await asyncio.sleep((CONFIG.health_interval_s + suspect_s) * 1.1 + 0.01)
            assert watched.state() is WorkerState.DOWN

    run_virtual(scenario())


def test_a_refused_health_check_is_enough_while_no_scrape_is_due() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        config = WatchConfig(metrics_interval_s=1000.0)
        async with watching({"a": server}, config) as watched:
            await asyncio.sleep(10)
            server.listening = False
            await asyncio.sleep(config.health_interval_s * (1 + config.jitter))
            assert watched.state() is WorkerState.DOWN

    run_virtual(scenario())


def test_slow_metrics_do_not_hide_that_the_engine_died() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            await asyncio.sleep(10)
            server.metrics_delay_s = 0.9
            server.health_status = 500
            await asyncio.sleep(2)
            assert watched.state() is WorkerState.DOWN

    run_virtual(scenario())


def test_every_question_carries_the_workers_own_key_and_only_that() -> None:
    async def scenario() -> None:
        locked, free = ScriptedServer(api_key="sesame"), ScriptedServer()
        async with watching({"a": locked}, api_key="sesame") as watched:
            await asyncio.sleep(30)
            assert watched.state() is WorkerState.UP
            assert watched.reports()[0].models == frozenset({"m"})
        assert locked.unauthorized == 0
        async with watching({"a": free}):
            await asyncio.sleep(30)
        assert free.authorizations == {None}

    run_virtual(scenario())


def test_workers_come_and_go_while_the_fleet_runs() -> None:
    async def scenario() -> None:
        servers = {"a": ScriptedServer(), "b": ScriptedServer()}
        async with watching(servers) as watched:
            await asyncio.sleep(1)
            watched.fleet.remove("a")
            assert watched.events[-1] == WorkerGone("a")
            gone_hits = servers["a"].hits.total()
            await asyncio.sleep(30)
            assert servers["a"].hits.total() == gone_hits
            watched.fleet.add(configured("a"))
            await asyncio.sleep(1)
            assert watched.state("a") is WorkerState.UP
            with pytest.raises(ValueError, match="already in the fleet"):
                watched.fleet.add(configured("b"))

    run_virtual(scenario())


def test_an_error_nobody_foresaw_costs_one_worker_a_pause_and_the_others_nothing() -> None:
    async def scenario() -> None:
        servers = {"a": ScriptedServer(), "b": ScriptedServer()}
        async with watching(servers) as watched:
            await asyncio.sleep(10)
            servers["a"].metrics_error = RuntimeError("a bug")
            await asyncio.sleep(1)
            assert watched.state("a") is WorkerState.DOWN
            assert watched.state("b") is WorkerState.UP
            servers["a"].metrics_error = None
            await asyncio.sleep(3 * CONFIG.reprobe_max_s)
            assert watched.state("a") is WorkerState.UP

    with capture_logs() as lines:
        run_virtual(scenario())
    assert "worker_watch_broke" in [line["event"] for line in lines]


def test_a_drained_worker_stays_watched_and_comes_back_when_it_is_resumed() -> None:
    async def scenario() -> None:
        async with watching({"a": ScriptedServer()}) as watched:
            await asyncio.sleep(1)
            watched.fleet.drain("a", on=True)
            assert watched.state() is WorkerState.DRAINING
            assert watched.fleet.candidates("m") == ()
            before = len(watched.reports())
            await asyncio.sleep(5)
            assert len(watched.reports()) > before
            assert watched.state() is WorkerState.DRAINING
            watched.fleet.saw_failure("a")
            assert watched.state() is WorkerState.DOWN
            await asyncio.sleep(5)
            assert watched.state() is WorkerState.DRAINING
            assert watched.fleet.is_up("a")
            watched.fleet.drain("a", on=False)
            assert watched.state() is WorkerState.UP

    run_virtual(scenario())


def test_a_worker_with_new_limits_is_learned_again_before_it_is_used() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            await asyncio.sleep(1)
            watched.fleet.drain("a", on=True)
            seen = len(watched.events)
            watched.fleet.replace(configured("a", batch_limit=3, api_key="new"))
            await asyncio.sleep(1)
            joined, reported, changed = watched.events[seen : seen + 3]
            assert isinstance(joined, WorkerJoined)
            assert (joined.spec.batch_limit, joined.state) == (3, WorkerState.DOWN)
            assert isinstance(reported, WorkerReported)
            assert changed == WorkerChanged("a", WorkerState.DRAINING)
            assert not [one for one in watched.events if isinstance(one, WorkerGone)]

    run_virtual(scenario())


def test_ranks_with_new_limits_share_one_watch_again() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        old, new = (
            configured("a", batch_limit=limit, data_parallel_size=2).ranks() for limit in (8, 3)
        )
        async with watching_ranks(server, old) as watched:
            await asyncio.sleep(1)
            for rank in new:
                watched.fleet.replace(rank)
            await asyncio.sleep(1)
            asked = server.hits.total()
            await asyncio.sleep(10)
            both = server.hits.total() - asked
            watched.fleet.remove("a@0")
            asked = server.hits.total()
            await asyncio.sleep(10)
            assert server.hits.total() - asked == pytest.approx(both, rel=0.2)

    run_virtual(scenario())


def test_a_worker_that_leaves_before_it_was_introduced_was_never_there() -> None:
    async def scenario() -> None:
        async with watching({"a": ScriptedServer()}) as watched:
            await asyncio.sleep(1)
            seen = len(watched.events)
            watched.fleet.add(configured("b", url="http://a"))
            watched.fleet.drain("b", on=True)
            watched.fleet.remove("b")
            await asyncio.sleep(0.01)
            names = {getattr(event, "worker_id", "a") for event in watched.events[seen:]}
            assert names <= {"a"}

    run_virtual(scenario())


def test_new_pauses_hold_from_the_next_question_on() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}, WatchConfig(metrics_interval_s=1.0)) as watched:
            await asyncio.sleep(5)
            watched.fleet.reconfigure(WatchConfig(metrics_interval_s=0.1))
            before = len(watched.reports())
            await asyncio.sleep(5)
            assert len(watched.reports()) - before > 30

    run_virtual(scenario())
