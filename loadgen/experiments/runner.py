"""Runs cases in parallel processes. Results depend on the cases alone, not on who ran them when.

A case that fails is named and costs nothing but itself; the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case, run_case
from loadgen.experiments.rules import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from loadgen.experiments.measures import Measured
    from loadgen.experiments.store import ResultStore, Timed

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
KILLED = "its process, or that of a simulation beside it, was killed (out of memory?)"


@dataclass(slots=True)
class Outcome:
    """What became of the cases.

    Attributes:
        results: by case.
        failures: why the others have none.
        cpu_s: processor time they took, when they were simulated.
        reused: how many were known from an earlier run.
    """

    results: dict[Case, Measured] = field(default_factory=dict)
    failures: dict[Case, str] = field(default_factory=dict)
    cpu_s: dict[Case, float] = field(default_factory=dict)
    reused: int = 0


def run_cases(
    cases: Iterable[Case],
    jobs: int,
    ended: Callable[[Case], None] = lambda _: None,
    store: ResultStore | None = None,
) -> Outcome:
    """Simulate every distinct case once, those that the store knows excepted.

    Cases that differ in their rule's label alone are one simulation.

    Args:
        cases: repetitions allowed.
        jobs: processes; with 1 this process does everything itself.
        ended: called after each, failed ones too.
        store: where results are kept; None for nowhere.
    """
    alike: dict[Case, list[Case]] = {}
    for case in dict.fromkeys(cases):
        alike.setdefault(nameless(case), []).append(case)
    outcome = Outcome()
    for case in alike:
        known = None if store is None else store.load(case)
        if known is not None:
            outcome.results[case], outcome.cpu_s[case] = known
            outcome.reused += 1
            _end(alike[case], ended)
    todo = sorted((c for c in alike if c not in outcome.results), key=_cost, reverse=True)
    run = _run_here if jobs <= 1 or len(todo) <= 1 else _run_in_processes
    for case, result in run(todo, jobs):
        _take(outcome, case, result, store)
        _end(alike[case], ended)
    return _named(outcome, alike)


def nameless(case: Case) -> Case:
    """The case without its rule's label, which makes no difference to what happens."""
    return replace(case, rule=replace(case.rule, label=""))


def _end(cases: Sequence[Case], ended: Callable[[Case], None]) -> None:
    for case in cases:
        ended(case)


def _named(outcome: Outcome, alike: Mapping[Case, Sequence[Case]]) -> Outcome:
    """Give every case what its simulation gave; the first of those alike bears the cost."""
    found = Outcome(reused=outcome.reused)
    for case, named in alike.items():
        for one in named:
            if case in outcome.results:
                found.results[one] = outcome.results[case]
            if case in outcome.failures:
                found.failures[one] = outcome.failures[case]
        if case in outcome.cpu_s:
            found.cpu_s[named[0]] = outcome.cpu_s[case]
    return found


def timed_case(case: Case) -> Timed:
    """Simulate a case; its result and the processor time it took."""
    started_s = time.process_time()
    return run_case(case), time.process_time() - started_s


def _take(
    outcome: Outcome,
    case: Case,
    result: Timed | Exception,
    store: ResultStore | None,
) -> None:
    if isinstance(result, BrokenProcessPool):
        outcome.failures[case] = KILLED
    elif isinstance(result, Exception):
        outcome.failures[case] = f"{type(result).__name__}: {result}"
    else:
        outcome.results[case], outcome.cpu_s[case] = result
        if store is not None:
            store.save(case, result)


def _run_here(cases: Iterable[Case], _: int) -> Iterator[tuple[Case, Timed | Exception]]:
    for case in cases:
        try:
            yield case, timed_case(case)
        except Exception as error:
            yield case, error


def _run_in_processes(cases: Iterable[Case], jobs: int) -> Iterator[tuple[Case, Timed | Exception]]:
    with (
        _single_threaded(),
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        waiting: dict[Future[Timed], Case] = {}
        try:
            for case in cases:
                waiting[pool.submit(timed_case, case)] = case
            for future in as_completed(waiting):
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield waiting[future], future.result() if error is None else error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _cost(case: Case) -> float:
    """What to begin with: a long case begun last would keep one process busy alone."""
    kinds = {Kind.HINDSIGHT: 20.0, Kind.REWARD_BOUND: 20.0}
    kinds |= {Kind.TRUE_JSQ: 1.0, Kind.CACHE_AWARE: 1.0}
    kind = kinds.get(case.rule.kind, 3.0)
    return kind * case.load.requests * (1.0 if case.rule.blind else 3.0)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Keep the processes' linear algebra to one thread each: cores are shared out by process."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
