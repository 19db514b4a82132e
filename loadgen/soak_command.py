"""`bidgate-load soak`: flags of the chaos run. What it does is in chaos.py."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

DEFAULT_OUT = Path("out/soak")
SUMMARY = "summary.json"
PREFILL_WORKERS = 3
"""Of eight workers."""


class Fleet(StrEnum):
    """Before which workers the router stands."""

    WHOLE = "whole"
    PAIRS = "pairs"
    BOTH = "both"


def soak(
    *,
    duration_s: float = 120.0,
    seed: int = 0,
    load: float = 1.2,
    fleet: Fleet = Fleet.BOTH,
    out: Path = DEFAULT_OUT,
) -> int:
    """Torture a router with failing workers and leaving clients; fails if anything is lost.

    Parameters
    ----------
    duration_s
        How long requests arrive; of both fleets, half of it each.
    seed
        Of requests, clients and faults: the same seed gives the same plan.
    load
        Offered work over what the healthy fleet can do.
    fleet
        Workers that do whole requests, prefill and decode workers, or one fleet after the other.
    out
        Directory for summary.json and, by fleet, the router's log and settings.
    """
    from loadgen.chaos import run_chaos
    from loadgen.chaos_plan import ChaosSpec

    fleets = [Fleet.WHOLE, Fleet.PAIRS] if fleet is Fleet.BOTH else [fleet]
    figures: dict[str, object] = {"duration_s": duration_s, "seed": seed, "load": load}
    troubles: list[str] = []
    for each in fleets:
        spec = ChaosSpec(
            duration_s=duration_s / len(fleets),
            seed=seed,
            load=load,
            prefill_workers=PREFILL_WORKERS if each is Fleet.PAIRS else 0,
        )
        (out / each).mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run_chaos(spec, out / each))
        troubles += [f"{each}: {trouble}" for trouble in report.troubles]
        figures[each.value] = report.figures()
        _tell(each, report.figures())
    figures["troubles"] = troubles
    (out / SUMMARY).write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    return 1 if troubles else 0


def _tell(fleet: Fleet, figures: dict[str, object]) -> None:
    console = Console()
    table = Table("figure", "value", title=f"fleet: {fleet}")
    for name, value in figures.items():
        if name in ("before", "after") and isinstance(value, dict):
            value = ", ".join(f"{key} {_short(part)}" for key, part in value.items())
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {part}" for key, part in sorted(value.items()))
        elif isinstance(value, list):
            value = "\n".join(map(str, value)) or "none"
        table.add_row(name, str(value))
    console.print(table)


def _short(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
