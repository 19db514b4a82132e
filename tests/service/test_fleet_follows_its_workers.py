"""The fleet against scripted workers on a virtual clock: what it publishes, and when."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from structlog.testing import capture_logs

from service.control.events import (
    Event,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerState,
)
from service.fleet import Fleet
from service.fleet_types import WatchConfig
from service.worker_config import WorkerConfig
from tests.clock import run_virtual
from tests.service.scripted_server import ScriptedServer, client_of, page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

CONFIG = WatchConfig()
WHOLE_PAGES = WatchConfig(metrics_interval_s=0.25, histograms_interval_s=0.1)
"""Every scrape asks for everything."""


class Watched:
    """A running fleet over scripted servers, and every event it has published."""

    def __init__(
        self,
        servers: dict[str, ScriptedServer],
        config: WatchConfig,
        workers: Sequence[WorkerConfig],
    ) -> None:
        self.events: list[Event] = []
        self.states: dict[str, list[WorkerState]] = defaultdict(list)
        self.came_up = asyncio.Event()
        self.fleet = Fleet(workers, config, client_of(servers), self.take)

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerJoined):
            self.states[event.spec.worker_id].append(event.state)
        elif isinstance(event, WorkerChanged):
            self.states[event.worker_id].append(event.state)
            if event.state is WorkerState.UP:
                self.came_up.set()
            else:
                self.came_up.clear()

    def state(self, name: str = "a") -> WorkerState:
        return self.states[name][-1]

    def reports(self, name: str = "a") -> list[WorkerReport]:
        return [
            event.report
            for event in self.events
            if isinstance(event, WorkerReported) and event.worker_id == name
        ]


def configured(name: str, **overrides: object) -> WorkerConfig:
    return WorkerConfig(
        **{"worker_id": name, "url": f"http://{name}", "batch_limit": 8} | overrides
    )


@asynccontextmanager
async def watching(
    servers: dict[str, ScriptedServer], config: WatchConfig = CONFIG, **overrides: object
) -> AsyncIterator[Watched]:
    workers = [configured(name, **overrides) for name in servers]
    async with following(Watched(servers, config, workers)) as watched:
        yield watched


@asynccontextmanager
async def watching_ranks(
    server: ScriptedServer, ranks: Sequence[WorkerConfig]
) -> AsyncIterator[Watched]:
    """Watch a server at http://a by the workers that it is."""
    async with following(Watched({"a": server}, CONFIG, ranks)) as watched:
        yield watched


@asynccontextmanager
async def following(watched: Watched) -> AsyncIterator[Watched]:
    task = asyncio.create_task(watched.fleet.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


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


BAD_METRICS = {
    "hanging": {"metrics_delay_s": 3600.0},
    "failing": {"metrics_status": 500},
    "empty": {"metrics": b""},
    "garbage": {"metrics": b"\x00\xff vllm:num_requests_running\nvllm:num_requests_running{ x\n"},
    "not vLLM's": {"metrics": b"sglang:num_running_reqs 4\n"},
    "endless": {"metrics": b"x" * (5 * 1024 * 1024)},
    "torn": {"metrics_error": httpx.ReadError("connection reset")},
}


@pytest.mark.parametrize("fault", BAD_METRICS.values(), ids=BAD_METRICS.keys())
def test_bad_metrics_of_a_working_worker_leave_it_in_use_by_the_ledger_alone(
    fault: dict[str, object],
) -> None:
    async def scenario() -> None:
        server, healthy = ScriptedServer(), ScriptedServer()
        async with watching({"a": server, "b": healthy}) as watched:
            await asyncio.sleep(3)
            good = {name: getattr(server, name) for name in fault}
            for name, value in fault.items():
                setattr(server, name, value)
            await asyncio.sleep(1)
            silent_at = len(watched.reports())
            await asyncio.sleep(10)
            stats = watched.fleet.stats()[0]
            assert watched.state() is WorkerState.UP
            assert len(watched.reports()) == silent_at
            assert stats.metrics_stale
            assert stats.metrics_age_s is not None
            assert stats.metrics_age_s > 10
            assert not watched.fleet.stats()[1].metrics_stale
            assert server.open_scrapes_max == 1
            for name, value in good.items():
                setattr(server, name, value)
            await asyncio.sleep(2)
            assert not watched.fleet.stats()[0].metrics_stale
            assert len(watched.reports()) > silent_at

    with capture_logs() as lines:
        run_virtual(scenario())
    assert [line["event"] for line in lines if line["event"].startswith("metrics_")] == [
        "metrics_stale_ledger_only",
        "metrics_fresh_again",
    ]


def test_a_worker_without_readable_metrics_still_comes_up_with_its_models_known() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=b"")
        async with watching({"a": server}) as watched:
            await asyncio.sleep(0.1)
            assert watched.state() is WorkerState.UP
            assert watched.reports() == [WorkerReport(models=frozenset({"m"}))]
            assert watched.fleet.stats()[0].metrics_stale

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


def test_the_iteration_time_is_the_engines_own_between_two_scrapes() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(gaps=1000, gap_s=0.05))
        async with watching({"a": server}, WHOLE_PAGES) as watched:
            await asyncio.sleep(0.01)
            assert watched.reports()[-1].iteration_s is None
            server.metrics = page(gaps=1500, gap_s=0.04)
            await asyncio.sleep(0.3)
            assert watched.reports()[-1].iteration_s == pytest.approx(10 / 500)
            await asyncio.sleep(0.3)
            assert watched.reports()[-1].iteration_s is None

    run_virtual(scenario())


def test_the_old_names_of_vllms_series_are_understood() -> None:
    async def scenario() -> None:
        old = (
            b"vllm:num_requests_running{} 2\nvllm:num_requests_waiting{} 1\n"
            b"vllm:gpu_cache_usage_perc{} 0.5\n"
            b'vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1\n'
            b"vllm:time_per_output_token_seconds_sum{} %d\n"
            b"vllm:time_per_output_token_seconds_count{} 1000\n"
        )
        server = ScriptedServer(metrics=old % 9)
        async with watching({"a": server}, WHOLE_PAGES) as watched:
            await asyncio.sleep(0.01)
            server.metrics = (old % 10).replace(b" 1000\n", b" 1010\n")
            await asyncio.sleep(0.3)
            report = watched.reports()[-1]
            assert (report.running, report.waiting, report.kv_tokens_used) == (2, 1, 800)
            assert report.iteration_s == pytest.approx(0.1)

    run_virtual(scenario())


def test_what_the_page_lacks_is_reported_as_unknown() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=b"vllm:num_requests_running 2\n")
        async with watching({"a": server}, WHOLE_PAGES) as watched:
            await asyncio.sleep(0.3)
            assert watched.reports()[-1] == WorkerReport(running=2)

    run_virtual(scenario())


def test_engines_behind_one_url_are_added_up() -> None:
    async def scenario() -> None:
        engines = [
            page(running=rank, waiting=5 - rank, kv_use=0.1 * rank, engine=str(rank))
            for rank in range(4)
        ]
        async with watching({"a": ScriptedServer(metrics=b"".join(engines))}) as watched:
            await asyncio.sleep(0.01)
            report = watched.reports()[-1]
            assert (report.running, report.waiting) == (6, 14)
            assert report.kv_capacity_tokens == 4 * 16_000
            assert report.kv_tokens_used == 9_600

    run_virtual(scenario())


@pytest.mark.parametrize("hint", ["counters", "start time"])
def test_a_restart_is_told_once_and_makes_no_negative_rate(hint: str) -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(gaps=1000))
        async with watching({"a": server}) as watched:
            await asyncio.sleep(1)
            reborn = {"counters": page(gaps=10), "start time": page(gaps=2000, started_s=5000)}
            server.metrics = reborn[hint]
            before = len(watched.reports())
            await asyncio.sleep(1)
            reports = watched.reports()[before:]
            assert [report.restarted for report in reports].count(True) == 1
            assert reports[0].restarted
            assert all(report.iteration_s is None for report in reports)
            assert watched.fleet.stats()[0].restarts == 1

    run_virtual(scenario())


def test_an_engine_that_shows_its_series_late_is_no_restart() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(gaps=1000, engine="0"))
        async with watching({"a": server}, WHOLE_PAGES) as watched:
            await asyncio.sleep(1)
            server.metrics = page(gaps=1100, engine="0") + page(gaps=5, gap_s=9, engine="1")
            before = len(watched.reports())
            await asyncio.sleep(1)
            reports = watched.reports()[before:]
            assert not any(report.restarted for report in reports)
            assert reports[0].iteration_s == pytest.approx(0.01)

    run_virtual(scenario())


def test_a_restart_of_two_engines_is_told_once_though_one_shows_itself_later() -> None:
    async def scenario() -> None:
        both = page(gaps=1000, engine="0") + page(gaps=1000, engine="1")
        server = ScriptedServer(metrics=both)
        async with watching({"a": server}) as watched:
            await asyncio.sleep(1)
            server.metrics = page(gaps=10, engine="0")
            await asyncio.sleep(1)
            server.metrics = page(gaps=20, engine="0") + page(gaps=5, engine="1")
            await asyncio.sleep(1)
            assert [report.restarted for report in watched.reports()].count(True) == 1

    run_virtual(scenario())


def test_what_the_operator_configured_is_not_overwritten_by_what_is_learned() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(kv_use=0.5))
        settings = {"kv_capacity_tokens": 500, "models": frozenset({"alias"})}
        async with watching({"a": server}, **settings) as watched:
            await asyncio.sleep(0.01)
            joined = watched.events[0]
            assert isinstance(joined, WorkerJoined)
            assert joined.spec.kv_capacity_tokens == 500
            assert joined.spec.models == frozenset({"alias"})
            report = watched.reports()[-1]
            assert report.kv_capacity_tokens is None
            assert report.models is None
            assert report.kv_tokens_used == 8_000
            assert [card["id"] for card in watched.fleet.models()["data"]] == ["alias"]

    run_virtual(scenario())


def test_the_model_list_is_the_union_over_workers_that_are_up() -> None:
    async def scenario() -> None:
        base = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm"}
        adapter = {"id": "lora", "object": "model", "parent": "m"}
        servers = {
            "a": ScriptedServer(models_status=500),
            "b": ScriptedServer(models=({**base, "max_model_len": 4096},)),
            "c": ScriptedServer(models=({**base, "max_model_len": 2048}, adapter)),
            "d": ScriptedServer(models=({"id": "dead"},), listening=False),
        }
        async with watching(servers) as watched:
            await asyncio.sleep(0.1)
            assert watched.state("a") is WorkerState.UP
            listed = watched.fleet.models()
            assert listed == {
                "object": "list",
                "data": [{**base, "max_model_len": 2048}, adapter],
            }
            servers["c"].models_status = 500
            await asyncio.sleep(CONFIG.models_interval_s * 3)
            assert watched.fleet.models() == listed

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("adapter", "tokens"),
    [
        ({"parent": "m"}, 4096),
        ({"parent": "weights-by-another-name"}, 4096),
        ({"parent": None}, 4096),
        ({"parent": "m", "max_model_len": 512}, 512),
    ],
)
def test_an_adapter_has_the_context_of_its_base_model(
    adapter: dict[str, object], tokens: int
) -> None:
    async def scenario() -> None:
        cards = ({"id": "m", "max_model_len": 4096}, {"id": "lora", **adapter})
        async with watching({"a": ScriptedServer(models=cards)}) as watched:
            await asyncio.sleep(0.1)
            assert watched.fleet.context_tokens("lora") == tokens
            assert watched.fleet.context_tokens("other") is None

    run_virtual(scenario())


def test_an_adapter_of_nobody_among_models_of_different_lengths_has_none_known() -> None:
    async def scenario() -> None:
        cards = (
            {"id": "m", "max_model_len": 4096},
            {"id": "n", "max_model_len": 2048},
            {"id": "lora", "parent": "gone"},
        )
        async with watching({"a": ScriptedServer(models=cards)}) as watched:
            await asyncio.sleep(0.1)
            assert watched.fleet.context_tokens("lora") is None

    run_virtual(scenario())


def test_a_new_adapter_is_reported_when_it_appears() -> None:
    async def scenario() -> None:
        server = ScriptedServer()
        async with watching({"a": server}) as watched:
            await asyncio.sleep(1)
            server.models = ({"id": "m"}, {"id": "lora"}, {"no": "id"}, {"id": 7})
            await asyncio.sleep(CONFIG.models_interval_s * 1.2)
            told = [report.models for report in watched.reports() if report.models is not None]
            assert told == [frozenset({"m"}), frozenset({"m", "lora"})]

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


def test_scrapes_are_filtered_where_that_works_and_never_more_frequent_than_set() -> None:
    async def scenario() -> None:
        filtering, multiprocess = ScriptedServer(), ScriptedServer(filters=False)
        async with watching({"a": filtering, "b": multiprocess}) as watched:
            await asyncio.sleep(40)
            assert filtering.hits["/metrics"] == 0
            assert multiprocess.hits["/metrics/"] == 1
            assert [stats.filtered_scrapes for stats in watched.fleet.stats()] == [True, False]
        scrapes = 40 / CONFIG.metrics_interval_s
        for hits in (filtering.hits["/metrics/"], multiprocess.hits["/metrics"]):
            assert 0.9 * scrapes < hits < 1.1 * scrapes

    run_virtual(scenario())


def test_most_scrapes_leave_out_what_costs_an_engine_time() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(running=1, gaps=100))
        async with watching({"a": server}) as watched:
            for second in range(40):
                server.metrics = page(running=1, gaps=100 + 10 * second, gap_s=0.02)
                await asyncio.sleep(1)
            assert watched.fleet.stats()[0].restarts == 0
        whole = server.hits["/metrics/"] - server.cheap_scrapes
        assert (
            0.8 * 40 / CONFIG.histograms_interval_s < whole < 40 / CONFIG.histograms_interval_s + 2
        )
        reports = [event.report for event in watched.events if isinstance(event, WorkerReported)]
        seen = [report for report in reports if report.iteration_s is not None]
        assert 0 < len(seen) <= whole
        assert sum(report.generated_tokens or 0 for report in reports) == 10 * 39
        assert all(report.kv_capacity_tokens for report in reports)

    run_virtual(scenario())


def test_a_restart_is_told_once_whichever_page_shows_it_first() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=page(running=1, gaps=1000))
        async with watching({"a": server}) as watched:
            await asyncio.sleep(10)
            for start in range(1, 9):
                server.metrics = page(running=1, gaps=10 * start, started_s=1000.0 * (start + 1))
                await asyncio.sleep(3.3)
            assert watched.fleet.stats()[0].restarts == 8

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
