"""From names to files: plan, simulate in parallel, write JSON, then pictures and pages."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.experiments.costs import Cost, costs_of, costs_table, read_costs, write_costs
from loadgen.experiments.document import write_document
from loadgen.experiments.experiment import Scale, finished
from loadgen.experiments.registry import all_experiments, choose
from loadgen.experiments.render import (
    INDEX_FILE,
    PAGE_FILE,
    read_documents,
    write_html,
    write_pages,
)
from loadgen.experiments.runner import Outcome, run_cases
from loadgen.experiments.store import FOLDER, ResultStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from loadgen.experiments.cases import Case
    from loadgen.experiments.command import ExperimentOptions
    from loadgen.experiments.document import Document
    from loadgen.experiments.experiment import Experiment, Plan

REDUCED_SEEDS, REDUCED_REQUESTS = 2, 400
FULL_SEEDS, FULL_REQUESTS = 5, 3400
FAILURES_TOLD = 3
"""Failed simulations named of each experiment; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Made:
    """One experiment that was asked for.

    Attributes:
        name: of the experiment.
        document: None when there is none.
        told: why not.
        failed: whether that is an error; else its data are not there.
        cost: of its simulations; None where none were run.
    """

    name: str
    document: Document | None = None
    cost: Cost | None = None
    told: str = ""
    failed: bool = False


def execute(names: Sequence[str], out: Path, options: ExperimentOptions) -> int:
    """Run experiments and write JSON, pictures and pages; a line for every claim on the terminal.

    Pages of experiments that did not run are made again from the JSON in docs, else in out.

    Returns:
        1 when an experiment failed, else 0.

    Raises:
        ValueError: for an unknown name or counts below 1.
    """
    chosen = choose(names)
    scale = make_scale(options)
    console = Console(stderr=True)
    started_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    made: list[Made] = []
    if not options.render_only:
        store = None if options.recompute else ResultStore.open(out)
        made = run_experiments(chosen, scale, options.jobs, store)
        _write(made, out)
    documents = _gather(out, options, {each.name for each in made if each.document is not None})
    if documents:
        costs = {each.name: each.cost for each in made if each.cost is not None}
        _publish(documents, costs, out, options)
    _tell(made, chosen, documents)
    if not documents:
        raise ValueError(f"{out} holds no results to render")
    console.print(f"{time.monotonic() - started_s:.0f} s in all")
    console.print(f"In {out}: {PAGE_FILE}, {INDEX_FILE}, and a .json and .md of each")
    return int(any(each.failed for each in made))


def make_scale(options: ExperimentOptions) -> Scale:
    """Turn flags into a scale.

    Raises:
        ValueError: for counts below 1.
    """
    full = options.full
    seeds = options.seeds
    if seeds is None:
        seeds = FULL_SEEDS if full else REDUCED_SEEDS
    requests = options.requests
    if requests is None:
        requests = FULL_REQUESTS if full else REDUCED_REQUESTS
    if seeds < 1 or requests < 1 or options.jobs < 1:
        raise ValueError("seeds, requests and jobs must be at least 1")
    return Scale(seeds=tuple(range(1, seeds + 1)), requests=requests, full=full, data=options.data)


def run_experiments(
    chosen: Sequence[Experiment], scale: Scale, jobs: int, store: ResultStore | None = None
) -> list[Made]:
    """Simulate the cases of all experiments, each distinct one once, and make their documents.

    Experiments that read the machine's clock run after the others, one case at a time, and are
    never taken from the store.
    """
    made = []
    for clocked in (False, True):
        plans = {e.name: e.plan(scale) for e in chosen if e.clocked is clocked}
        made += [Made(name, told=plan.missing) for name, plan in plans.items() if plan.missing]
        plans = {name: plan for name, plan in plans.items() if not plan.missing}
        if plans:
            outcome = _simulate(plans, 1 if clocked else jobs, None if clocked else store)
            costs = costs_of(plans, outcome)
            _tell_cost(costs, outcome.reused)
            made += [
                replace(_make(name, plan, scale, outcome), cost=costs[name])
                for name, plan in plans.items()
            ]
    return made


def _simulate(plans: Mapping[str, Plan], jobs: int, store: ResultStore | None) -> Outcome:
    cases = dict.fromkeys(case for plan in plans.values() for case in plan.cases)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("simulations"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        title = next(iter(plans)) if len(plans) == 1 else f"{len(plans)} experiments"
        bar = progress.add_task(title, total=len(cases))
        return run_cases(cases, jobs, lambda _: progress.advance(bar), store)


def _make(name: str, plan: Plan, scale: Scale, outcome: Outcome) -> Made:
    """Make a document of what is there; a failure costs this one alone."""
    failed = [case for case in dict.fromkeys(plan.cases) if case in outcome.failures]
    if failed:
        named = [f"{_named(case)}: {outcome.failures[case]}" for case in failed[:FAILURES_TOLD]]
        more = len(failed) - len(named)
        told = "; ".join([*named, *([f"and {more} more"] if more else [])])
        return Made(name, told=f"{len(failed)} simulations failed: {told}", failed=True)
    try:
        document = finished(name, plan, scale, outcome.results)
    except Exception as error:
        told = f"its report failed: {type(error).__name__}: {error}"
        return Made(name, told=told, failed=True)
    return Made(name, replace(document, scale=_scale_told(name, plan, scale)))


def _named(case: Case) -> str:
    load = case.load
    asked = load.load if load.load is not None else load.kv_load
    at = "" if asked is None else f", load {asked:g}"
    return f"{case.rule.label} on {load.trace.rpartition('/')[2]}{at}, seed {load.seed}"


def _scale_told(name: str, plan: Plan, scale: Scale) -> str:
    """Say what of the whole grid was run; "" for all of it."""
    if scale.full or not plan.cases:
        return ""
    whole = replace(scale, full=True, seeds=tuple(range(1, FULL_SEEDS + 1)), requests=FULL_REQUESTS)
    everything = all_experiments()[name].plan(whole).cases
    counts = [len(set(cases)) for cases in (plan.cases, everything)]
    requests = [max(case.load.requests for case in cases) for cases in (plan.cases, everything)]
    return (
        f"reduced grid: {counts[0]} of the {counts[1]} simulations of --full, at most "
        f"{requests[0]} requests in one instead of {requests[1]}"
    )


def _write(made: Sequence[Made], out: Path) -> None:
    for each in made:
        if each.document is not None:
            write_document(each.document, out / f"{each.name}.json")


def _gather(out: Path, options: ExperimentOptions, fresh: set[str]) -> list[Document]:
    """Read what just ran from out, everything else from docs if it is there, else from out."""
    names = list(all_experiments())
    found = {document.name: document for document in read_documents(out, names)}
    if options.docs is not None and options.docs.is_dir():
        kept = {document.name: document for document in read_documents(options.docs, names)}
        ours = found if options.render_only else {n: d for n, d in found.items() if n in fresh}
        found = found | kept | ours
    return [found[name] for name in names if name in found]


def _publish(
    documents: Sequence[Document], costs: Mapping[str, Cost], out: Path, options: ExperimentOptions
) -> None:
    for document in documents:
        write_document(document, out / f"{document.name}.json")
    earlier = {} if options.docs is None else read_costs(options.docs)
    known = {**read_costs(out), **earlier, **costs}
    written = write_pages(documents, out, options.jobs, known)
    if known:
        written.append(write_costs(known, out))
    write_html(documents, out)
    if options.docs is not None:
        options.docs.mkdir(parents=True, exist_ok=True)
        for path in [*written, *(out / f"{document.name}.json" for document in documents)]:
            shutil.copy(path, options.docs / path.name)


def _tell(
    made: Sequence[Made], chosen: Sequence[Experiment], documents: Sequence[Document]
) -> None:
    shown = {experiment.name for experiment in chosen}
    console = Console()
    table = Table(show_edge=False, header_style="bold")
    for title in ("experiment", "where", "verdict"):
        table.add_column(title)
    for document in documents:
        for claim in document.claims if document.name in shown else ():
            table.add_row(document.name, claim.source, claim.verdict.value)
    console.print(table)
    for each in made:
        if each.document is None:
            word = "failed" if each.failed else "not run"
            console.print(f"{each.name} {word}: {each.told}", markup=False)


def _tell_cost(costs: Mapping[str, Cost], reused: int) -> None:
    console = Console(stderr=True)
    console.print(costs_table(costs))
    if reused:
        console.print(f"{reused} simulations of an earlier run used again ({FOLDER}/)")
