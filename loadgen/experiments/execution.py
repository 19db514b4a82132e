"""From names to files: plan, simulate in parallel, write JSON, then pictures and pages."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.experiments.document import write_document
from loadgen.experiments.experiment import Scale
from loadgen.experiments.registry import all_experiments, choose
from loadgen.experiments.render import read_documents, write_html, write_pages
from loadgen.experiments.runner import run_cases

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadgen.experiments.command import ExperimentOptions
    from loadgen.experiments.document import Document
    from loadgen.experiments.experiment import Experiment, Plan

REDUCED_SEEDS, REDUCED_REQUESTS = 2, 600
FULL_SEEDS, FULL_REQUESTS = 5, 3400


def execute(names: Sequence[str], out: Path, options: ExperimentOptions) -> None:
    """Run experiments and write JSON, pictures and pages; a line for every claim on the terminal.

    Raises:
        ValueError: for an unknown name or counts below 1.
    """
    chosen = choose(names)
    scale = make_scale(options)
    out.mkdir(parents=True, exist_ok=True)
    if not options.render_only:
        for document in run_experiments(chosen, scale, options.jobs):
            write_document(document, out / f"{document.name}.json")
    documents = read_documents(out, list(all_experiments()))
    if not documents:
        raise ValueError(f"{out} holds no results to render")
    written = write_pages(documents, out)
    page = write_html(documents, out)
    if options.docs is not None:
        options.docs.mkdir(parents=True, exist_ok=True)
        for path in [*written, *(out / f"{document.name}.json" for document in documents)]:
            shutil.copy(path, options.docs / path.name)
    shown = {experiment.name for experiment in chosen}
    console = Console()
    console.print(_claims([document for document in documents if document.name in shown]))
    console.print(f"\nIn {out}: {page.name} README.md and a .json and .md of each")


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


def run_experiments(chosen: Sequence[Experiment], scale: Scale, jobs: int) -> list[Document]:
    """Simulate the cases of all experiments, each distinct one once, and make their documents.

    Experiments that read the machine's clock run after the others, one case at a time.
    """
    documents = []
    for clocked in (False, True):
        plans = {e.name: e.plan(scale) for e in chosen if e.clocked is clocked}
        if plans:
            documents += _run(plans, 1 if clocked else jobs)
    return documents


def _run(plans: dict[str, Plan], jobs: int) -> list[Document]:
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
        results = run_cases(cases, jobs, lambda _: progress.advance(bar))
    return [plan.report(results) for plan in plans.values()]


def _claims(documents: Sequence[Document]) -> Table:
    table = Table(show_edge=False, header_style="bold")
    for title in ("experiment", "where", "verdict"):
        table.add_column(title)
    for document in documents:
        for claim in document.claims:
            table.add_row(document.name, claim.source, claim.verdict.value)
    return table
