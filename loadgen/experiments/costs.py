"""What experiments cost in processor time: told on the terminal and in the index of the pages.

Kept beside the documents, not in them: these numbers differ from run to run, documents do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from loadgen.experiments.cases import Case
    from loadgen.experiments.experiment import Plan
    from loadgen.experiments.runner import Outcome

COSTS_FILE = "costs.json"


@dataclass(frozen=True, slots=True)
class Cost:
    """One experiment's part of a run.

    Attributes:
        simulations: distinct ones; what several experiments share counts for the first alone.
        cpu_s: processor time they took, in this run or in the earlier one that made them.
    """

    simulations: int
    cpu_s: float


def costs_of(plans: Mapping[str, Plan], outcome: Outcome) -> dict[str, Cost]:
    """Share the cost of a run out to the experiments that were in it."""
    owner: dict[Case, str] = {}
    for name, plan in plans.items():
        for case in plan.cases:
            owner.setdefault(case, name)
    simulations: Counter[str] = Counter()
    spent_s = dict.fromkeys(plans, 0.0)
    for case, cpu_s in outcome.cpu_s.items():
        simulations[owner[case]] += 1
        spent_s[owner[case]] += cpu_s
    return {name: Cost(simulations[name], round(spent_s[name], 1)) for name in plans}


def total(costs: Mapping[str, Cost]) -> Cost:
    """Sum up."""
    return Cost(
        sum(cost.simulations for cost in costs.values()),
        round(sum(cost.cpu_s for cost in costs.values()), 1),
    )


def costs_table(costs: Mapping[str, Cost]) -> Table:
    """Tabulate for the terminal."""
    table = Table(show_edge=False, header_style="bold")
    for title in ("experiment", "simulations", "processor s"):
        table.add_column(title, justify="left" if title == "experiment" else "right")
    for name, cost in {**costs, "all": total(costs)}.items():
        table.add_row(name, str(cost.simulations), f"{cost.cpu_s:.0f}")
    return table


def read_costs(folder: Path) -> dict[str, Cost]:
    """What earlier runs cost, by experiment; empty where that was not written.

    Raises:
        ValueError: when the file is something else.
    """
    path = folder / COSTS_FILE
    if not path.is_file():
        return {}
    try:
        return TypeAdapter(dict[str, Cost]).validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: no costs: {error.errors()[0]['msg']}") from error


def write_costs(costs: Mapping[str, Cost], folder: Path) -> Path:
    """Write costs.json."""
    path = folder / COSTS_FILE
    path.write_bytes(
        orjson.dumps(dict(costs), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )
    return path
