"""Tiny grids, really simulated: the same seed gives the same bytes, in one process or in two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest

from loadgen.cli import run
from loadgen.experiments.cases import Case, Probe, make_case, run_case
from loadgen.experiments.command import ExperimentOptions
from loadgen.experiments.document import write_document
from loadgen.experiments.execution import make_scale, run_experiments
from loadgen.experiments.experiment import Scale
from loadgen.experiments.fleets import PER_PERIOD, period_control, unit_fleet
from loadgen.experiments.lines import line
from loadgen.experiments.loads import (
    Load,
    Tier,
    build_requests,
    gap_variation,
    offered_kv_load,
    offered_load,
)
from loadgen.experiments.recorded import RECORDINGS
from loadgen.experiments.registry import choose
from loadgen.experiments.rules import RuleBook
from loadgen.experiments.runner import run_cases
from loadgen.experiments.store import FOLDER
from loadgen.trace_errors import TraceError
from loadgen.workload import Prediction
from service.control.config import PolicyName

if TYPE_CHECKING:
    from pathlib import Path

TINY = Scale(seeds=(1,), requests=6)
FLEET = unit_fleet(2, 4, 2000)
BOOK = RuleBook(period_control())


def case(policy: PolicyName = PolicyName.CENTRAL_FCFS, load: Load | None = None) -> Case:
    return Case(
        load=load or Load(load=1.0, requests=30, seed=3), workers=FLEET, rule=BOOK.plain(policy)
    )


def test_one_seed_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (made,) = run_experiments(choose(["table-1"]), TINY, jobs=1)
        assert made.document is not None
        write_document(made.document, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_another_seed_gives_other_numbers() -> None:
    first, again, other = (
        run_case(replace(case(), load=Load(load=1.0, requests=20, seed=seed))) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_two_processes_give_what_one_gives() -> None:
    cases = [
        replace(case(policy), load=Load(load=1.0, requests=20, seed=1))
        for policy in (PolicyName.RANDOM, PolicyName.ONLINE_LP)
    ]
    ended: list[Case] = []
    assert run_cases(cases, 2, ended.append).results == run_cases(cases, 1).results
    assert set(ended) == set(cases)


def test_equal_cases_are_simulated_once() -> None:
    ended: list[Case] = []
    found = run_cases([case(), case(), replace(case(), probe=Probe.WINDOWS)], 1, ended.append)
    assert len(ended) == len(found.results) == len(found.cpu_s) == 2


def test_policies_that_ignore_predictions_are_not_run_again_for_another_prediction() -> None:
    noisy = Load(load=1.0, requests=30, prediction=Prediction.NOISY)
    blind = make_case(case(PolicyName.ROUND_ROBIN, noisy))
    sighted = make_case(case(PolicyName.CENTRAL_FCFS, noisy))
    assert blind.load.prediction is Prediction.EXACT
    assert sighted.load.prediction is Prediction.NOISY


def test_a_line_differs_in_its_seeds_alone() -> None:
    found = line(case(), (1, 2, 3))
    assert [each.load.seed for each in found.cases] == [1, 2, 3]
    assert len({replace(each, load=replace(each.load, seed=0)) for each in found.cases}) == 1


@pytest.mark.parametrize("load", [0.5, 1.3])
def test_a_sample_offers_exactly_the_load_that_was_asked(load: float) -> None:
    requests = build_requests(Load(load=load, requests=50, seed=4), FLEET)
    assert offered_load(requests, FLEET) == pytest.approx(load)
    requests = build_requests(Load(kv_load=load, requests=50, seed=4), FLEET)
    assert offered_kv_load(requests, FLEET) == pytest.approx(load)


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("gamma:3", 3.0)])
def test_burstiness_is_that_of_the_arrivals(arrivals: str, variation: float) -> None:
    load = Load(trace="fixed:16x16", arrivals=arrivals, load=1.0, requests=4000, seed=1)
    assert gap_variation(build_requests(load, FLEET)) == pytest.approx(variation, rel=0.15)
    assert gap_variation(build_requests(replace(load, requests=1), FLEET)) == 0.0


def test_tiers_offer_their_own_loads_side_by_side() -> None:
    tiers = (
        Tier(name="interactive", trace="fixed:10x20", load=0.3, value=5.0, ttft_bound_s=0.4),
        Tier(name="batch", trace="long-answers", load=0.6),
    )
    requests = build_requests(Load(tiers=tiers, duration_s=40.0), FLEET)
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    for tier in tiers:
        own = [request for request in requests if request.tenant == tier.name]
        assert offered_load(own, FLEET) == pytest.approx(tier.load)
        assert {request.value for request in own} == {tier.value}
        assert {request.ttft_bound_s for request in own} == {tier.ttft_bound_s}


@pytest.mark.parametrize(("ratio", "share"), [("1:4", 0.8), ("4:1", 0.2)])
def test_synthetic_lengths_keep_their_ratio(ratio: str, share: float) -> None:
    requests = build_requests(Load(trace=f"ratio:{ratio}", rate_per_s=1.0, requests=400), FLEET)
    total = sum(r.prompt_tokens + r.decode_tokens for r in requests)
    assert sum(r.decode_tokens for r in requests) / total == pytest.approx(share, abs=0.01)
    assert total / len(requests) == pytest.approx(256, rel=0.05)


def recorded(path: Path, rows: int) -> Path:
    lines = [f"{number * 0.5},{10 + number},{5}" for number in range(rows)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    return path


def test_every_seed_sees_another_part_of_a_recorded_trace(tmp_path: Path) -> None:
    trace = str(recorded(tmp_path / "trace.csv", 40))
    load = Load(trace=trace, arrivals="recorded", load=1.0, requests=10)
    prompts = [
        {r.prompt_tokens for r in build_requests(replace(load, seed=seed), FLEET)}
        for seed in (1, 2, 3)
    ]
    assert prompts == [set(range(10, 20)), set(range(20, 30)), set(range(30, 40))]


def test_requests_that_all_arrive_at_once_have_no_load(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,2,3\n")
    load = Load(trace=str(path), arrivals="recorded", load=1.0, requests=2)
    with pytest.raises(TraceError, match="arrive at once"):
        build_requests(load, FLEET)


def test_a_recorded_trace_is_replayed_and_its_folder_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_code.csv"
    lines = [f"2023-11-16 18:00:{second:02}.0000000,{40 + second},8" for second in range(30)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    scale = Scale(seeds=(1,), requests=10, data=tmp_path)
    (made,) = run_experiments(choose(["recorded"]), scale, jobs=1)
    document = made.document
    assert document is not None
    assert len(document.tables) == 1
    assert len(document.skipped) == len(RECORDINGS) - 1
    assert str(tmp_path).encode() not in orjson.dumps(document)


def test_throughput_is_counted_until_the_last_arrival_and_waits_until_refusal() -> None:
    load = Load(trace="fixed:16x100", rate_per_s=0.2 * PER_PERIOD, requests=60, seed=1)
    impatient = replace(BOOK.base, max_wait_s=0.5)
    rule = RuleBook(impatient).plain(PolicyName.CENTRAL_FCFS)
    values = run_case(Case(load=load, workers=FLEET, rule=rule)).values
    assert values["offered_load"] > 2
    assert values["share_refused"] > 0.2
    assert values["ttft_max_s"] == pytest.approx(0.5, abs=0.05)
    assert values["tokens_per_s"] == pytest.approx(8 * PER_PERIOD, rel=0.1)


def status_of(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        run(arguments)
    return stopped.value.code


def test_the_command_writes_everything_and_renders_again_without_simulating(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    flags = ["--out", str(out), "--docs", str(docs)]
    ran = ("unequal", "--requests", "8", "--seeds", "1", "--jobs", "1")
    assert status_of(["experiments", *flags, *ran]) == 0
    assert "In " in capsys.readouterr().err
    names = {"unequal.json", "unequal.md", "unequal.png", "README.md", "costs.json"}
    assert {path.name for path in docs.iterdir()} == names
    assert {path.name for path in out.iterdir()} == names | {"experiments.html", FOLDER}
    before = {path.name: path.read_bytes() for path in docs.iterdir()}
    (out / "unequal.md").unlink()
    assert status_of(["experiments", *flags, "--render-only"]) == 0
    assert {path.name: path.read_bytes() for path in docs.iterdir()} == before


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["experiments", "yardstick"], "did you mean 'yardsticks'"),
        (["experiments", "tiers", "--seeds", "0"], "at least 1"),
        (["experiments", "--render-only"], "no results to render"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert status_of([*flags, "--out", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_full_runs_are_longer_and_have_more_seeds() -> None:
    reduced, full = (make_scale(ExperimentOptions(full=full)) for full in (False, True))
    assert len(full.seeds) > len(reduced.seeds) >= 2
    assert full.requests > reduced.requests
    assert make_scale(ExperimentOptions(full=True, seeds=1, requests=5)).requests == 5
