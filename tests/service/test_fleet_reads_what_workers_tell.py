"""What workers tell of themselves, pages and model lists: what the controller gets, and when."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from structlog.testing import capture_logs

from service.control.events import WorkerJoined, WorkerReport, WorkerReported, WorkerState
from tests.clock import run_virtual
from tests.service.scripted_server import ScriptedServer, page
from tests.service.watched import CONFIG, WHOLE_PAGES, watching

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
