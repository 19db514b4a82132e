"""Every experiment by name, in the order of the report."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from loadgen.experiments import (
    ablation,
    affinity,
    decode_columns,
    fleet_changes,
    forecasts,
    frontier,
    harm,
    hindsight,
    knowledge,
    live_twin,
    paper_figures,
    paper_tables,
    price_diagnostics,
    price_step,
    recorded,
    scaling,
    synthetic,
    tail_weight,
    tiers,
    tradeoff,
    yardsticks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.experiment import Experiment


def all_experiments() -> dict[str, Experiment]:
    """Name to experiment."""
    found = (
        yardsticks.EXPERIMENT,
        ablation.EXPERIMENT,
        hindsight.EXPERIMENT,
        paper_figures.EXPERIMENT,
        tradeoff.EXPERIMENT,
        tail_weight.EXPERIMENT,
        synthetic.EXPERIMENT,
        paper_tables.TABLE_1,
        paper_tables.TABLE_2,
        price_step.EXPERIMENT,
        price_diagnostics.EXPERIMENT,
        frontier.EXPERIMENT,
        tiers.EXPERIMENT,
        harm.EXPERIMENT,
        affinity.EXPERIMENT,
        recorded.EXPERIMENT,
        fleet_changes.UNEQUAL,
        fleet_changes.FAILURE,
        knowledge.STALENESS,
        knowledge.PREDICTION,
        forecasts.EXPERIMENT,
        decode_columns.EXPERIMENT,
        scaling.SCALING,
        scaling.OVERHEAD,
        live_twin.EXPERIMENT,
    )
    return {experiment.name: experiment for experiment in found}


def choose(names: Sequence[str]) -> list[Experiment]:
    """Pick experiments by name, all of them for no name.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    known = all_experiments()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"no experiment {name!r}{hint}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
