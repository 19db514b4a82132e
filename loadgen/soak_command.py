"""`bidgate-load soak`: flags of the chaos run. What it does is in chaos.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

DEFAULT_OUT = Path("out/soak")
SUMMARY = "summary.json"


def soak(
    *, duration_s: float = 120.0, seed: int = 0, load: float = 1.2, out: Path = DEFAULT_OUT
) -> int:
    """Torture a router with failing workers and leaving clients; fails if anything is lost.

    Parameters
    ----------
    duration_s
        How long requests arrive.
    seed
        Of requests, clients and faults: the same seed gives the same plan.
    load
        Offered work over what the healthy fleet can do.
    out
        Directory for summary.json and the router's log.
    """
    from loadgen.chaos import run_chaos
    from loadgen.chaos_plan import ChaosSpec

    out.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(run_chaos(ChaosSpec(duration_s=duration_s, seed=seed, load=load), out))
    figures = {"duration_s": duration_s, "seed": seed, "load": load} | report.figures()
    (out / SUMMARY).write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    _tell(figures)
    return 1 if report.troubles else 0


def _tell(figures: dict[str, object]) -> None:
    console = Console()
    table = Table("figure", "value")
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
