"""Runs cases in parallel processes. Results depend on the cases alone, not on who ran them when."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case, run_case
from loadgen.experiments.rules import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.experiments.measures import Measured

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run_cases(
    cases: Iterable[Case], jobs: int, ended: Callable[[Case], None] = lambda _: None
) -> dict[Case, Measured]:
    """Simulate every distinct case once.

    Args:
        cases: repetitions allowed.
        jobs: processes; with 1 this process does everything itself.
        ended: called after each.
    """
    distinct = sorted(dict.fromkeys(cases), key=_cost, reverse=True)
    found: dict[Case, Measured] = {}
    if jobs <= 1 or len(distinct) <= 1:
        for case in distinct:
            found[case] = run_case(case)
            ended(case)
        return found
    with (
        _single_threaded(),
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        waiting = {pool.submit(run_case, case): case for case in distinct}
        try:
            for future in as_completed(waiting):
                found[waiting[future]] = future.result()
                ended(waiting[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def _cost(case: Case) -> float:
    """What to begin with: a long case begun last would keep one process busy alone."""
    kind = {Kind.HINDSIGHT: 20.0, Kind.TRUE_JSQ: 1.0}.get(case.rule.kind, 3.0)
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
