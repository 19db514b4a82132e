"""Routers compared: same requests for all, interleaved, judged by the engines' own counters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from loadgen.engine_watch import (
    PREEMPTIONS,
    QUEUE_COUNT,
    QUEUE_SUM,
    TOKENS,
    WAITING,
    EngineWatch,
    Look,
    read_page,
    watching,
)
from loadgen.outcomes import End
from loadgen.processes import ClusterError
from loadgen.replay import Replay, ReplaySettings
from loadgen.side_by_side import (
    CONTENDERS,
    DIRECT,
    OURS,
    SideBySideSpec,
    measure,
    measure_capacity,
    schedule,
)
from loadgen.side_by_side_report import fill, markdown, side_by_side_summary, verdict
from loadgen.trace_record import TraceRequest
from loadgen.traces import open_trace
from service.mock.profiles import UNIT
from service.mock.serving import running_mock_workers
from service.mock.worker_config import MockWorkerConfig
from tests.loadgen.fake_server import Received, fake_server, stream_answer

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

PAGE = """\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 3.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 1.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 2.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.5
# TYPE other gauge
other 1.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> SideBySideSpec:
    router = tmp_path / "vllm-router"
    router.touch()
    return SideBySideSpec(
        workers=("http://a:1", "http://b:1"),
        batch_limit=4,
        contenders=CONTENDERS,
        trace=open_trace("lmsys-like"),
        load=1.3,
        duration_s=20.0,
        repetitions=2,
        drain_s=30.0,
        decode_tokens_max=128,
        vocabulary_tokens=2048,
        seed=7,
        vllm_router=router,
        log_dir=tmp_path / "logs",
    )


def test_every_contender_runs_as_often_and_to_and_fro(spec: SideBySideSpec) -> None:
    runs = schedule(spec)
    assert len(runs) == len(set(runs)) == 2 * len(CONTENDERS)
    names = [name for _, name in runs]
    assert names == names[::-1]


def test_the_requests_offer_the_load_exactly_and_each_repetition_others(
    spec: SideBySideSpec,
) -> None:
    first, again, second = (spec.requests(500.0, repetition) for repetition in (0, 0, 1))
    assert first == again
    assert first != second
    for requests in (first, second):
        tokens = sum(request.decode_tokens for request in requests)
        assert tokens / requests[-1].arrival_s == pytest.approx(1.3 * 500.0)
        assert requests[-1].arrival_s == pytest.approx(spec.duration_s, rel=0.25)
        assert max(request.decode_tokens for request in requests) <= 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": ()}, "give --workers"),
        ({"contenders": ("nginx",)}, "contenders are"),
        ({"contenders": ()}, "contenders are"),
        ({"load": 0.0}, "must be positive"),
        ({"batch_limit": 0}, "at least 1"),
    ],
)
def test_measurements_that_cannot_be_made_are_refused(
    spec: SideBySideSpec, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        replace(spec, **changes)


def test_a_missing_router_names_the_script_that_installs_it(
    spec: SideBySideSpec, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="scripts/vllm-router-env"):
        replace(spec, vllm_router=tmp_path / "nowhere")
    replace(spec, vllm_router=tmp_path / "nowhere", contenders=(DIRECT, OURS))


async def test_the_client_itself_sends_to_one_engine_after_the_other() -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        await stream_answer(writer, request.body["max_tokens"])

    requests = [TraceRequest(index * 0.01, 6, 2) for index in range(4)]
    async with fake_server(answer) as first, fake_server(answer) as second:
        settings = ReplaySettings(
            url=first.url, spread=(first.url, second.url), vocabulary_tokens=1010
        )
        records = await Replay(requests, settings).run()
        salted = await Replay(requests, replace(settings, prompt_salt=100)).run()
    assert [record.outcome for record in records + salted] == [End.COMPLETED] * 8
    assert (len(first.received), len(second.received)) == (4, 4)
    prompts = [tuple(each.body["prompt"]) for each in first.received + second.received]
    assert all(1000 <= token < 1010 for prompt in prompts for token in prompt)
    assert len(set(prompts)) == len(prompts)


def test_a_page_is_summed_over_its_engines() -> None:
    assert read_page(PAGE) == {WAITING: 5.0, PREEMPTIONS: 4.0, QUEUE_COUNT: 2.0, QUEUE_SUM: 1.5}
    assert read_page("") == {}


def test_capacity_is_read_only_while_every_engine_has_requests_waiting() -> None:
    def look(at_s: float, tokens: float, *waiting: float) -> Look:
        halves = tuple({WAITING: each, TOKENS: tokens / len(waiting)} for each in waiting)
        return Look(at_s, halves)

    looks = [look(0, 0, 0, 0), look(1, 100, 5, 4), look(3, 500, 1, 1), look(4, 510, 0, 1)]
    assert EngineWatch(looks).saturated_tokens_per_s() == 200.0
    assert EngineWatch(looks[:2]).saturated_tokens_per_s() is None


def test_the_pace_while_requests_arrive_leaves_the_last_answers_out() -> None:
    halves = [(0.0, 0.0), (1.0, 100.0), (2.0, 300.0), (9.0, 310.0)]
    watch = EngineWatch([Look(at_s, ({TOKENS: n}, {TOKENS: n})) for at_s, n in halves])
    assert watch.rate_per_s(TOKENS, 2.5) == 300.0
    assert watch.rate_per_s(TOKENS, 0.5) is None


def contender(ttft_s: float, p99_s: float, tokens_per_s: float) -> dict[str, Any]:
    return {
        "ttft_s": {"mean": ttft_s, "p99": p99_s},
        "output_tokens_per_s": tokens_per_s,
        "engines": {"arriving_tokens_per_s": 2 * tokens_per_s + 10},
    }


def test_ours_is_held_against_the_best_of_the_others_in_each_measure() -> None:
    contenders: dict[str, Any] = {
        "direct round_robin": contender(4.0, 8.0, 100.0),
        "vllm-router cache_aware": contender(2.0, 10.0, 90.0),
        "bidgate least_outstanding": contender(0.1, 0.1, 900.0),
        OURS: contender(0.9, 8.4, 97.0),
    }
    luckier = contenders | {OURS: contender(0.4, 8.0, 100.0)}
    found: Any = verdict(contenders, [contenders, luckier])
    assert found["ratio_to_best_of_others"] == pytest.approx(
        {
            "ttft_mean": 0.45,
            "ttft_p99": 1.05,
            "output_tokens_per_s": 0.97,
            "arriving_tokens_per_s": 204 / 210,
        }
    )
    assert found["aim_met"] == {
        "ttft_mean": True,
        "ttft_p99": False,
        "output_tokens_per_s": False,
        "arriving_tokens_per_s": False,
    }
    assert found["in_each_repetition"]["ttft_mean"] == pytest.approx([0.45, 0.2])
    assert found["in_each_repetition"]["ttft_p99"] == pytest.approx([1.05, 1.0])
    assert verdict({OURS: contender(1.0, 1.0, 1.0)}, []) is None


def test_a_table_goes_into_its_own_place_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = "<!-- load 1.2: written by make bench-vllm -->", "<!-- end of load 1.2 -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    fill(page, "load 1.2", "new\n")
    assert page.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    with pytest.raises(ValueError, match=r"no place for load 1\.5"):
        fill(page, "load 1.5", "new\n")


async def test_a_whole_measurement_on_mock_engines_tells_everything(
    spec: SideBySideSpec,
) -> None:
    engine = MockWorkerConfig(profile=UNIT, batch_limit=4, time_scale=1.5, kv_capacity_tokens=4096)
    async with running_mock_workers([engine, engine]) as urls:
        small = replace(
            spec, workers=urls, contenders=(DIRECT, OURS), duration_s=1.5, repetitions=1
        )
        capacity = await measure_capacity(small)
        told: list[str] = []
        runs = await measure(small, capacity, told.append)
        async with watching(urls) as watch:
            pass
    # Two engines of four slots, 10 ms an iteration at time scale 1.5: 1200 tokens/s. A burst this
    # short is seen in few looks, whose edges may fall on either side of an iteration.
    assert 0 < capacity < 2 * 4 / 0.01 * 1.5 * 2
    assert [run.contender for run in runs] == [DIRECT, OURS]
    assert told == [f"run 1 of 2: {DIRECT}", f"run 2 of 2: {OURS}"]
    assert all(record.outcome is End.COMPLETED for run in runs for record in run.records)
    assert {record.worker for record in runs[0].records} == {""}
    assert {record.worker for record in runs[1].records} == {url[7:] for url in urls}
    tokens = sum(record.decode_tokens for record in runs[0].records)
    assert runs[0].engines.grown(TOKENS) == runs[1].engines.grown(TOKENS) == tokens
    assert watch.grown(TOKENS) == 0
    summary: Any = side_by_side_summary(small, capacity, runs, "the command")
    assert summary["contenders"][OURS]["completed"] == summary["contenders"][DIRECT]["sent"]
    table = markdown(summary)
    assert "`the command`" in table
    assert table.count(f"| {DIRECT} | {OURS} |") == 1
    ratios = summary["verdict"]["in_each_repetition"]["ttft_mean"]
    assert ratios == [summary["verdict"]["ratio_to_best_of_others"]["ttft_mean"]]
    assert f"- mean TTFT: {ratios[0]:.2f} ({ratios[0]:.2f}; aim at most 0.5" in table


async def test_engines_that_are_never_full_cannot_be_calibrated(spec: SideBySideSpec) -> None:
    roomy = MockWorkerConfig(profile=UNIT, batch_limit=64, time_scale=10.0)
    async with running_mock_workers([roomy]) as urls:
        with pytest.raises(ClusterError, match="is max_num_seqs theirs"):
            await measure_capacity(replace(spec, workers=urls, batch_limit=1))
