"""What an experiment is: a plan of cases, and a report made from what they gave."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.experiments.cases import Case
    from loadgen.experiments.document import Claim, Document
    from loadgen.experiments.lines import Results

FEWER = 0.65


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to run.

    Attributes:
        seeds: one simulation of every setting for each.
        requests: in one simulation, where an experiment does not say otherwise.
        full: whole grids instead of reduced ones.
        data: folder of recorded traces, or None.
    """

    seeds: tuple[int, ...] = (1, 2)
    requests: int = 1000
    full: bool = False
    data: Path | None = None

    @property
    def fewer(self) -> int:
        """Requests of the experiments that need less, in reduced grids."""
        return self.requests if self.full else max(4, round(FEWER * self.requests))

    def times(self, factor: float) -> int:
        """Requests of an experiment that looks at tails, so many times as many in reduced grids."""
        return self.requests if self.full else round(factor * self.requests)

    @property
    def fewer_seeds(self) -> tuple[int, ...]:
        """Seeds of what repeats another picture under slightly other conditions: one if reduced."""
        return self.seeds if self.full else self.seeds[:1]

    def command(self, name: str) -> str:
        """Write the command line that makes an experiment again; the data folder as DIR."""
        words = ["bidgate-load", "experiments", name, "--seeds", str(len(self.seeds))]
        words += ["--requests", str(self.requests)]
        if self.full:
            words.append("--full")
        if self.data is not None:
            words += ["--data", "DIR"]
        return shlex.join(words)


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases to simulate, and what to make of them.

    Attributes:
        cases: any order, repetitions allowed.
        report: makes the document once all are there, but for its name, command and faults.
        missing: why there is nothing to run, as recorded data that are not there; "" if there is.
    """

    cases: tuple[Case, ...]
    report: Callable[[Results], Document]
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One entry of the registry.

    Attributes:
        name: as on the command line, and of its files.
        summary: one line for help.
        plan: chooses the cases at a scale.
        clocked: whether it reads the machine's clock; such a one runs alone and its numbers differ
            from run to run.
    """

    name: str
    summary: str
    plan: Callable[[Scale], Plan]
    clocked: bool = False


def evidence(claims: Iterable[Claim]) -> tuple[str, ...]:
    """Answer with the numbers behind every claim."""
    return tuple(f"{claim.source}: {claim.evidence}" for claim in claims)


def finished(name: str, plan: Plan, scale: Scale, results: Results) -> Document:
    """Make an experiment's document: its report, and what is alike in all of them."""
    return replace(
        plan.report(results),
        name=name,
        command=scale.command(name),
        faults=faults(plan.cases, results),
    )


def faults(cases: Iterable[Case], results: Results) -> int:
    """Ticks in which a policy failed and the fallback decided."""
    return int(sum(results[case].values.get("faults", 0.0) for case in set(cases)))
