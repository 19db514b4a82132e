"""Long runs break: a bad simulation costs itself alone, what is finished is not done again."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from loadgen.experiments import execution, runner, store
from loadgen.experiments.cases import Case, run_case
from loadgen.experiments.command import ExperimentOptions
from loadgen.experiments.costs import (
    COSTS_FILE,
    Cost,
    costs_of,
    read_costs,
    total,
    write_costs,
)
from loadgen.experiments.document import Document, read_document, write_document
from loadgen.experiments.execution import execute, run_experiments
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import a100_fleet, period_control, unit_fleet
from loadgen.experiments.lines import Results
from loadgen.experiments.loads import Load
from loadgen.experiments.registry import choose
from loadgen.experiments.rules import RuleBook
from loadgen.experiments.runner import nameless, run_cases
from loadgen.experiments.store import ResultStore, case_key, code_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

BOOK = RuleBook(period_control())
GOOD = Case(
    load=Load(load=1.0, requests=12, seed=1),
    workers=unit_fleet(2, 4, 2000),
    rule=BOOK.first_come(),
)
OTHER = replace(GOOD, load=replace(GOOD.load, seed=2))
# The hindsight bound refuses workers whose pace changes.
BAD = replace(GOOD, workers=a100_fleet(2, 4), rule=BOOK.hindsight())
SCALE = Scale(seeds=(1,), requests=12)


def report(name: str, results: Results) -> Document:
    case = next(iter(results))
    return Document(
        name=name,
        title=name,
        asked=f"{name}?",
        answers=(f"{results[case].values['ttft_mean_s']:.3f}",),
        setting={},
        command=name,
        seeds=(1,),
    )


def experiment(name: str, *cases: Case, missing: str = "") -> Experiment:
    return Experiment(
        name=name,
        summary=name,
        plan=lambda _: Plan(cases, partial(report, name), missing),
    )


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of three experiments: one good, one with a bad case, one without its data."""
    found = {
        "good": experiment("good", GOOD),
        "bad": experiment("bad", GOOD, BAD),
        "absent": experiment("absent", missing="no recording"),
    }
    monkeypatch.setattr(execution, "all_experiments", lambda: found)
    monkeypatch.setattr(execution, "choose", lambda names: [found[n] for n in names or found])


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_case_that_fails_is_named_and_the_others_have_their_results(jobs: int) -> None:
    ended: list[Case] = []
    outcome = run_cases([GOOD, BAD], jobs, ended.append)
    assert outcome.results == {GOOD: run_case(GOOD)}
    assert list(outcome.failures) == [BAD]
    assert "constant pace" in outcome.failures[BAD]
    assert set(ended) == {GOOD, BAD}


def test_rules_that_differ_in_their_name_alone_are_simulated_once() -> None:
    other = replace(GOOD, rule=replace(GOOD.rule, label="another name"))
    outcome = run_cases([GOOD, other], 1)
    assert outcome.results == {GOOD: run_case(GOOD), other: run_case(GOOD)}
    assert list(outcome.cpu_s) == [GOOD]


def die() -> None:
    os._exit(3)


def test_a_process_that_is_killed_is_told_and_loses_no_finished_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ResultStore(tmp_path)
    assert run_cases([GOOD], 1, store=kept).results
    killed = replace(GOOD, load=replace(GOOD.load, requests=13))
    monkeypatch.setattr(runner, "timed_case", _killed)
    outcome = run_cases([GOOD, killed, replace(killed, ttft_bound_s=1.0)], 2, store=kept)
    assert list(outcome.results) == [GOOD]
    assert set(outcome.failures.values()) == {runner.KILLED}


def _killed(_: Case) -> None:
    die()


@pytest.mark.usefixtures("known")
def test_one_bad_simulation_costs_its_own_page_and_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ExperimentOptions(jobs=1, docs=tmp_path / "docs")
    assert execute((), tmp_path / "out", options) == 1
    told = capsys.readouterr()
    assert "bad failed: 1 simulations failed: hindsight bound (LP) on lmsys-like" in told.out
    assert "absent not run: no recording" in told.out
    assert "s in all" in told.err
    written = {path.name for path in (tmp_path / "docs").iterdir()}
    assert written == {"good.json", "good.md", "README.md", "costs.json"}


@pytest.mark.usefixtures("known")
def test_pages_of_what_did_not_run_stay_in_the_index(tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    for folder, answer in ((docs, "of the pages"), (out, "stale")):
        folder.mkdir(exist_ok=True)
        older = Document(
            name="absent",
            title="absent",
            asked="absent?",
            answers=(answer,),
            setting={},
            command="absent",
            seeds=(1,),
        )
        write_document(older, folder / "absent.json")
    assert execute(("good", "absent"), out, ExperimentOptions(jobs=1, docs=docs)) == 0
    assert read_document(docs / "absent.json").answers == ("of the pages",)
    index = (docs / "README.md").read_text()
    assert "(good.md)" in index
    assert "of the pages" in index
    page = (out / "experiments.html").read_text()
    assert "good?" in page
    assert "of the pages" in page


@pytest.mark.usefixtures("known")
def test_a_second_run_uses_finished_simulations_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(("good",), tmp_path, ExperimentOptions(jobs=1))
    first = (tmp_path / "good.json").read_bytes()
    simulated: list[Case] = []

    def counted(case: Case) -> object:
        simulated.append(case)
        return run_case(case), 0.0

    monkeypatch.setattr(runner, "timed_case", counted)
    execute(("good",), tmp_path, ExperimentOptions(jobs=1))
    assert simulated == []
    assert "1 simulations of an earlier run used again" in capsys.readouterr().err
    assert (tmp_path / "good.json").read_bytes() == first
    execute(("good",), tmp_path, ExperimentOptions(jobs=1, recompute=True))
    assert simulated == [nameless(GOOD)]
    assert (tmp_path / "good.json").read_bytes() == first


def test_other_settings_other_code_or_another_trace_are_another_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ResultStore.open(tmp_path)
    kept.save(GOOD, (run_case(GOOD), 1.5))
    assert kept.load(GOOD) == (run_case(GOOD), 1.5)
    assert kept.load(replace(GOOD, ttft_bound_s=0.5)) is None
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,1,1\n")
    recorded = replace(GOOD, load=replace(GOOD.load, trace=str(trace)))
    before = case_key(recorded)
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,1,12\n")
    assert case_key(recorded) != before
    monkeypatch.setattr(store, "code_fingerprint", lambda: "other")
    assert ResultStore.open(tmp_path).load(GOOD) is None
    assert [path.name for path in (tmp_path / store.FOLDER).iterdir()] == ["other"]


def test_a_result_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    kept = ResultStore.open(tmp_path)
    kept.save(GOOD, (run_case(GOOD), 1.5))
    (path,) = kept.folder.iterdir()
    path.write_text(path.read_text()[:40])
    assert kept.load(GOOD) is None


def test_the_fingerprint_covers_the_code_that_simulates() -> None:
    assert code_fingerprint() == code_fingerprint()
    names = {package.__name__ for package in store.SOURCES}
    assert names == {"service.control", "service.mock", "loadgen"}


def test_a_shared_simulation_costs_the_first_that_needs_it_and_is_told_again_when_reused(
    tmp_path: Path,
) -> None:
    plans = {
        name: experiment(name, *cases).plan(SCALE)
        for name, cases in (("one", (GOOD, GOOD)), ("two", (GOOD, OTHER)))
    }
    kept = ResultStore.open(tmp_path)
    cases = [case for plan in plans.values() for case in plan.cases]
    first = costs_of(plans, run_cases(cases, 1, store=kept))
    assert [cost.simulations for cost in first.values()] == [1, 1]
    assert total(first).simulations == 2
    assert costs_of(plans, run_cases(cases, 1, store=kept)) == first


@pytest.mark.usefixtures("known")
def test_the_index_tells_what_each_experiment_cost_in_its_last_run(tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    write_costs({"good": Cost(7, 700.0), "absent": Cost(5, 500.0)}, docs)
    options = ExperimentOptions(jobs=1, docs=docs)
    execute(("good",), out, options)
    costs = read_costs(docs)
    assert costs["good"].simulations == 1
    assert costs["absent"] == Cost(5, 500.0)
    assert "| [good](good.md) | 1 | 0 |\n| all | 1 | 0 |" in (docs / "README.md").read_text()
    execute(("good",), out, replace(options, render_only=True))
    assert read_costs(docs) == costs


def test_another_file_is_no_costs(tmp_path: Path) -> None:
    (tmp_path / COSTS_FILE).write_text("[]")
    with pytest.raises(ValueError, match="no costs"):
        read_costs(tmp_path)


def test_recordings_that_are_not_there_leave_no_page() -> None:
    (made,) = run_experiments(choose(["recorded"]), SCALE, jobs=1)
    assert made.document is None
    assert not made.failed
    assert "azure2023_conv.csv.gz" in made.told


def test_a_reduced_page_says_what_of_the_whole_grid_it_has() -> None:
    (made,) = run_experiments(choose(["unequal"]), SCALE, jobs=1)
    assert made.document is not None
    assert "of the 50 simulations of --full" in made.document.scale
