"""Data parallel: several ranks behind one URL, each a worker with its own ledger and prices."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import httpx
import pytest
from structlog.testing import capture_logs

from service.control.events import WorkerGone, WorkerReport, WorkerState
from service.engine_metrics import parse_engine_page
from service.engine_ranks import ADVICE_FEW, ADVICE_MANY, ADVICE_UNSEEN, discrepancy, part_of
from service.fleet_types import WatchConfig
from service.settings import Settings, SettingsError
from service.worker_config import WorkerConfig
from service.worker_settings import FleetConfig, WorkerSettings
from tests.clock import run_virtual
from tests.service.live import mock, serving_mocks, until
from tests.service.scripted_server import ScriptedServer, page
from tests.service.stage import HandlerTransport, Stage, answer, completion, ends
from tests.service.watched import Watched, watching_ranks

if TYPE_CHECKING:
    from service.mock.worker import MockServer

UP, DOWN = WorkerState.UP, WorkerState.DOWN


def ranks(size: int, **fields: object) -> tuple[WorkerConfig, ...]:
    config = {"worker_id": "a", "url": "http://a", "batch_limit": 8, "data_parallel_size": size}
    return WorkerConfig(**config | fields).ranks()


def pages(**engines: int) -> bytes:
    """A page on which engine e<label> runs so many requests."""
    return b"".join(
        page(running=running, engine=label.removeprefix("e")) for label, running in engines.items()
    )


# What is configured


def test_a_url_with_ranks_is_as_many_workers_named_after_it() -> None:
    settings = Settings(
        workers=("http://a:1", WorkerSettings(url="http://b:2", id="big", data_parallel_size=1)),
        fleet=FleetConfig(data_parallel_size=2, max_num_seqs=16),
    )
    workers = settings.worker_configs()
    assert [worker.worker_id for worker in workers] == ["a:1@0", "a:1@1", "big"]
    assert [worker.data_parallel_rank for worker in workers] == [0, 1, None]
    assert {worker.url for worker in workers[:2]} == {"http://a:1"}
    assert all(worker.batch_limit == 16 for worker in workers)


@pytest.mark.parametrize("size", [0, -1, 5000])
def test_sizes_that_make_no_sense_are_one_clear_line(size: int) -> None:
    with pytest.raises(ValueError, match="data_parallel_size must be in 1"):
        FleetConfig(data_parallel_size=size)
    odd = Settings(workers=(WorkerSettings(url="http://a:1", data_parallel_size=size),))
    with pytest.raises(SettingsError, match="workers: data_parallel_size must be in 1"):
        odd.worker_configs()


# Which part of a page is whose


@pytest.mark.parametrize(
    ("labels", "running"),
    [
        (["0", "1", "2", "3"], [10, 11, 12, 13]),
        (["4", "5", "6", "7"], [14, 15, 16, 17]),
        # Several API servers show an engine only once it has worked.
        (["2"], [None, None, 12, None]),
        (["6"], [None, None, 16, None]),
        ([], [None, None, None, None]),
    ],
    ids=["one server", "hybrid, second server", "seen late", "hybrid, seen late", "nothing"],
)
def test_each_rank_reads_its_own_engine(labels: list[str], running: list[int | None]) -> None:
    read = parse_engine_page(pages(**{f"e{label}": 10 + int(label) for label in labels}))
    parts = [part_of(read, worker) for worker in ranks(4)]
    assert [None if part is None else part.total.running for part in parts] == running


def test_a_whole_server_reads_all_its_engines_whatever_their_labels() -> None:
    (worker,) = ranks(1)
    for labels in ({"e0": 3}, {"e3": 3}, {"e2": 1, "e3": 2}):
        part = part_of(parse_engine_page(pages(**labels)), worker)
        assert part is not None
        assert part.total.running == 3


@pytest.mark.parametrize("label", ["", "x", "²", "9" * 5000, "-1"])
def test_labels_that_are_no_numbers_break_nothing(label: str) -> None:
    read = parse_engine_page(page(engine=label))
    assert [part_of(read, worker) for worker in ranks(2)] == [None, None]
    assert discrepancy(read, 1, complete=True) == ""


@pytest.mark.parametrize(
    ("shown", "size", "complete", "advice"),
    [
        (2, 2, True, ""),
        (1, 1, True, ""),
        (2, 1, True, ADVICE_MANY),
        (4, 2, True, ADVICE_MANY),
        (2, 4, True, ADVICE_FEW),
        (2, 4, False, ADVICE_UNSEEN),
        (0, 1, False, ""),
    ],
)
def test_other_engines_than_configured_are_told_apart(
    shown: int, size: int, complete: bool, advice: str
) -> None:
    read = parse_engine_page(pages(**{f"e{label}": 0 for label in range(shown)}))
    assert discrepancy(read, size, complete=complete) == advice


def test_a_rank_holds_its_own_kv_though_the_page_tells_the_blocks_of_all() -> None:
    """As vLLM 0.32 writes it: blocks summed over two ranks, tokens of one."""
    config = 'block_size="32",kv_cache_size_tokens="3200",num_gpu_blocks="200"'
    body = "".join(f'vllm:cache_config_info{{engine="{rank}",{config}}} 1\n' for rank in range(2))
    for sample in parse_engine_page(body.encode()).engines.values():
        assert sample.kv_capacity_tokens == 3200 - 32


# How they are watched


def test_one_scrape_and_one_health_check_serve_all_ranks() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=pages(e0=3, e1=5))
        async with watching_ranks(server, ranks(2)) as watched:
            await asyncio.sleep(20)
            assert [watched.state(name) for name in ("a@0", "a@1")] == [UP, UP]
            assert {report.running for report in watched.reports("a@0")} == {3}
            assert {report.running for report in watched.reports("a@1")} == {5}
            assert server.hits["/metrics/"] <= 1.1 * 20 / WatchConfig().metrics_interval_s
            assert server.hits["/health"] <= 1.1 * 20 / WatchConfig().health_interval_s + 1
            stats = {one.worker_id: one for one in watched.fleet.stats()}
            assert [stats[name].report.running for name in ("a@0", "a@1")] == [3, 5]

    run_virtual(scenario())


def test_a_server_that_dies_takes_all_its_ranks_and_brings_them_back() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=pages(e0=0, e1=0))
        async with watching_ranks(server, ranks(2)) as watched:
            await asyncio.sleep(10)
            watched.fleet.saw_failure("a@1")
            assert [watched.state(name) for name in ("a@0", "a@1")] == [DOWN, DOWN]
            await asyncio.sleep(1)
            assert [watched.state(name) for name in ("a@0", "a@1")] == [UP, UP]

    run_virtual(scenario())


def test_a_restart_is_told_for_every_rank() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=pages(e0=0, e1=0))
        async with watching_ranks(server, ranks(2)) as watched:
            await asyncio.sleep(2)
            server.metrics = server.metrics.replace(b"seconds 1000.0", b"seconds 5000.0")
            await asyncio.sleep(2)
            assert [one.restarts for one in watched.fleet.stats()] == [1, 1]

    run_virtual(scenario())


def test_a_rank_that_does_not_exist_gets_no_request_and_one_warning() -> None:
    async def scenario() -> Watched:
        server = ScriptedServer(metrics=pages(e0=0, e1=0))
        async with watching_ranks(server, ranks(3)) as watched:
            await asyncio.sleep(20)
            assert [watched.state(f"a@{rank}") for rank in range(3)] == [UP, UP, DOWN]
            assert not watched.fleet.stats()[2].metrics_stale
            # A server that grows, as elastic ones do.
            server.metrics = pages(e0=0, e1=0, e2=0)
            await asyncio.sleep(1)
            assert watched.state("a@2") is UP
            return watched

    with capture_logs() as lines:
        run_virtual(scenario())
    (warning,) = [line for line in lines if line["event"] == "engines_differ"]
    assert warning["advice"] == ADVICE_FEW
    assert (warning["data_parallel_size"], warning["engines_shown"]) == (3, ["0", "1"])


def test_a_rank_that_has_not_worked_yet_is_used_where_pages_may_be_incomplete() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=pages(e0=2), filters=False)
        async with watching_ranks(server, ranks(2)) as watched:
            await asyncio.sleep(20)
            assert [watched.state(name) for name in ("a@0", "a@1")] == [UP, UP]
            assert all(report == WorkerReport(models=report.models) for report in unseen(watched))
            server.metrics = pages(e0=2, e1=4)
            await asyncio.sleep(1)
            assert watched.reports("a@1")[-1].running == 4

    def unseen(watched: Watched) -> list[WorkerReport]:
        return watched.reports("a@1")

    with capture_logs() as lines:
        run_virtual(scenario())
    advice = [line["advice"] for line in lines if line["event"] == "engines_differ"]
    assert advice == [ADVICE_UNSEEN]


def test_engines_nobody_configured_are_one_warning_and_count_together() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=pages(e0=2, e1=4))
        async with watching_ranks(server, ranks(1)) as watched:
            await asyncio.sleep(20)
            assert watched.reports("a")[-1].running == 6

    with capture_logs() as lines:
        run_virtual(scenario())
    advice = [line["advice"] for line in lines if line["event"] == "engines_differ"]
    assert advice == [ADVICE_MANY]


def test_ranks_may_leave_and_join_one_by_one() -> None:
    async def scenario() -> None:
        server = ScriptedServer(metrics=pages(e0=0, e1=0))
        first, second = ranks(2)
        async with watching_ranks(server, (first, second)) as watched:
            await asyncio.sleep(1)
            watched.fleet.remove("a@0")
            assert watched.events[-1] == WorkerGone("a@0")
            await asyncio.sleep(1)
            assert watched.state("a@1") is UP
            watched.fleet.add(first)
            await asyncio.sleep(1)
            assert watched.state("a@0") is UP
            watched.fleet.remove("a@0")
            watched.fleet.remove("a@1")
            asked = server.hits.total()
            await asyncio.sleep(10)
            assert server.hits.total() == asked

    run_virtual(scenario())


# What is sent


def test_the_rank_is_named_to_the_worker_and_clients_cannot_choose_it() -> None:
    async def plain(_: httpx.Request) -> httpx.Response:
        return answer()

    async def scenario(rank: int | None) -> list[str]:
        worker = HandlerTransport(plain)
        async with Stage({"a": worker}, ranks={"a": rank}).open() as stage:
            await stage.post(headers={"X-Data-Parallel-Rank": "7"})
        return worker.requests[0].headers.get_list("x-data-parallel-rank")

    assert run_virtual(scenario(rank=1)) == ["1"]
    assert run_virtual(scenario(rank=0)) == ["0"]
    assert run_virtual(scenario(rank=None)) == []


def test_a_request_that_a_rank_turns_away_goes_to_another_by_name() -> None:
    async def full(_: httpx.Request) -> httpx.Response:
        return httpx.Response(503)

    async def plain(_: httpx.Request) -> httpx.Response:
        return answer()

    async def scenario() -> None:
        first, second = HandlerTransport(full), HandlerTransport(plain)
        stage = Stage({"a": first, "b": second}, ranks={"a": 0, "b": 1})
        async with stage.open() as stage:
            exchange = await stage.post()
        assert exchange.status == 200
        sent = [each.requests[-1].headers.get_list("x-data-parallel-rank") for each in (second,)]
        assert sent == [["1"]]

    run_virtual(scenario())


# All of it, over real sockets


def served(server: MockServer) -> list[int]:
    return [engine.series.stats.finished_total for engine in server.engines]


async def test_ranks_of_a_server_share_the_load_and_none_queues() -> None:
    server = mock(data_parallel_size=4, batch_limit=2, time_scale=5.0)
    async with serving_mocks([server], batch_limit=2, data_parallel_size=4) as live:
        names = [worker.worker_id for worker in live.service.queue.stats().router.workers]
        assert [name.rpartition("@")[2] for name in names] == ["0", "1", "2", "3"]
        body = completion(model="mock", max_tokens=20, ignore_eos=True)
        waiting_max = 0

        async def watch() -> None:
            nonlocal waiting_max
            while True:
                waiting = [engine.series.stats.waiting for engine in server.engines]
                waiting_max = max(waiting_max, *waiting)
                await asyncio.sleep(0.002)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(
            *(live.client.post(f"{live.url}/v1/completions", json=body) for _ in range(32))
        )
        watching.cancel()
        assert {one.status_code for one in answers} == {200}
        workers = Counter(one.headers["x-bidgate-worker"] for one in answers)
        assert set(workers) == set(names)
        assert served(server) == [workers[name] for name in names]
        # What came while an iteration ran waits for the next one; all at once it would be six.
        assert waiting_max <= 2
        assert ends(live.service.queue.stats()) == {"completed": 32}


async def test_both_servers_of_a_hybrid_deployment_are_used_without_an_error() -> None:
    first = mock(data_parallel_size=2, time_scale=5.0)
    second = mock(data_parallel_size=2, data_parallel_start_rank=2, time_scale=5.0)
    async with serving_mocks([first, second], data_parallel_size=2, batch_limit=1) as live:
        body = completion(model="mock", max_tokens=50, ignore_eos=True)
        answers = await asyncio.gather(
            *(live.client.post(f"{live.url}/v1/completions", json=body) for _ in range(12))
        )
        assert {one.status_code for one in answers} == {200}
        assert min(*served(first), *served(second)) > 0
        gauges = (await live.client.get(f"{live.url}/metrics")).text.splitlines()
        known = [line for line in gauges if line.startswith("bidgate_worker_kv_capacity_tokens{")]
        assert len(known) == 4


async def test_one_url_a_rank_needs_no_setting() -> None:
    """External load balancing: a server shows one engine, whose label is its rank."""
    servers = [mock(data_parallel_start_rank=rank, time_scale=5.0) for rank in range(2)]
    async with serving_mocks(servers, batch_limit=1) as live:
        body = completion(model="mock", max_tokens=50, ignore_eos=True)
        answers = await asyncio.gather(
            *(live.client.post(f"{live.url}/v1/completions", json=body) for _ in range(8))
        )
        assert {one.status_code for one in answers} == {200}
        assert min(served(servers[0])[0], served(servers[1])[0]) > 0


async def test_a_client_that_leaves_frees_its_rank() -> None:
    server = mock(data_parallel_size=2)
    async with serving_mocks([server], data_parallel_size=2) as live:
        body = completion(model="mock", max_tokens=5000, ignore_eos=True, stream=True)
        async with live.client.stream("POST", f"{live.url}/v1/completions", json=body) as reply:
            await anext(reply.aiter_raw())
            assert sum(engine.load for engine in server.engines) == 1
        await until(lambda: not any(engine.load for engine in server.engines), within_s=10)
