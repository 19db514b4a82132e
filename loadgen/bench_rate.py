"""`bidgate-load bench rate`: false alarms and delays of the watch over the arrival rate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.arrivals import ArrivalProcess, Gamma, Poisson
from loadgen.live import command_line
from loadgen.summary import SUMMARY_FILE, write_json
from service.control.config import RateConfig
from service.control.rate import RateMonitor, RateShift

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loadgen.summary import JsonValue

PROCESSES: dict[str, ArrivalProcess] = {
    "poisson": Poisson(),
    "gamma, CV 2": Gamma(2.0),
    "gamma, CV 3": Gamma(3.0),
}
RATES_PER_S = (2.0, 8.0, 40.0)
FACTORS = (1.5, 3.0, 0.5)
BEFORE_S, AFTER_S = 300.0, 120.0
"""Time at the first rate, and time at the second in which the change must be noticed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One process at one rate.

    Attributes:
        alarms_per_hour: changes noticed in steady arrivals.
        delays_s: by factor, until the change was noticed; None where it was not.
    """

    process: str
    rate_per_s: float
    alarms_per_hour: float
    delays_s: dict[float, list[float | None]]

    def summary(self) -> dict[str, JsonValue]:
        """What summary.json says of it."""
        delays: dict[str, JsonValue] = {
            f"{factor:g}": list(delays) for factor, delays in self.delays_s.items()
        }
        return {
            "process": self.process,
            "rate_per_s": self.rate_per_s,
            "alarms_per_hour": self.alarms_per_hour,
            "delays_s": delays,
        }


def rate(
    *, out: Path = Path("out/bench/rate"), hours: float = 1.0, trials: int = 5, seed: int = 0
) -> int:
    """Measure how often steady arrivals raise an alarm and how soon a change is noticed.

    Parameters
    ----------
    out
        Directory for summary.json.
    hours
        Steady arrivals of each kind.
    trials
        Changes of each kind and size.
    seed
        Of the arrivals.
    """
    if not hours > 0 or trials < 1:
        raise ValueError("hours must be positive and trials at least 1")
    console, cases = Console(), list[Case]()
    for name in PROCESSES:
        for rate_per_s in RATES_PER_S:
            with console.status(f"{name}, {rate_per_s:g} a second"):
                cases.append(measure_rate(name, rate_per_s, hours, range(seed, seed + trials)))
    out.mkdir(parents=True, exist_ok=True)
    config = RateConfig()
    summary: dict[str, JsonValue] = {
        "command": command_line(),
        "significance": config.significance,
        "window_s": config.window_s,
        "hours": hours,
        "cases": [case.summary() for case in cases],
    }
    write_json(summary, out / SUMMARY_FILE)
    console.print(_table(cases))
    return 0


def measure_rate(name: str, rate_per_s: float, hours: float, seeds: Sequence[int]) -> Case:
    """Count alarms in steady arrivals, and time how long changes go unnoticed."""
    process = PROCESSES[name]
    steady = watched(_arrivals(process, rate_per_s, 3600.0 * hours, seeds[0]))
    return Case(
        process=name,
        rate_per_s=rate_per_s,
        alarms_per_hour=len(steady) / hours,
        delays_s={
            factor: [_delay_s(process, rate_per_s, factor, one) for one in seeds]
            for factor in FACTORS
        },
    )


def watched(times_s: Iterable[float]) -> list[RateShift]:
    """The changes that the shipped watch notices, looking at every arrival."""
    monitor, found = RateMonitor(RateConfig()), list[RateShift]()
    for now_s in times_s:
        shift = monitor.look(now_s)
        if shift is not None:
            found.append(shift)
        monitor.arrive(now_s)
    return found


def _delay_s(process: ArrivalProcess, rate_per_s: float, factor: float, seed: int) -> float | None:
    before = _arrivals(process, rate_per_s, BEFORE_S, seed)
    after = _arrivals(process, rate_per_s * factor, AFTER_S, seed + 10_000)
    found = watched([*before, *(BEFORE_S + time_s for time_s in after)])
    rightly = [
        shift.seen_s - BEFORE_S
        for shift in found
        if shift.seen_s > BEFORE_S and shift.rose == (factor > 1)
    ]
    return rightly[0] if rightly else None


def _arrivals(
    process: ArrivalProcess, rate_per_s: float, duration_s: float, seed: int
) -> list[float]:
    times_s = process.times(rate_per_s, np.random.default_rng(seed))
    return list(takewhile(lambda time_s: time_s < duration_s, times_s))


def _table(cases: Sequence[Case]) -> Table:
    table = Table(title="alarms in steady arrivals, and median time to notice a change")
    for title in ("arrivals", "rate, 1/s", "alarms an hour", *(f"x{f:g}" for f in FACTORS)):
        table.add_column(title, justify="left" if title == "arrivals" else "right")
    for case in cases:
        table.add_row(
            case.process,
            f"{case.rate_per_s:g}",
            f"{case.alarms_per_hour:.2g}",
            *(_delay_text(case.delays_s[factor]) for factor in FACTORS),
        )
    return table


def _delay_text(delays_s: Sequence[float | None]) -> str:
    """The median of those noticed, and how many were not."""
    noticed = [delay for delay in delays_s if delay is not None]
    missed = len(delays_s) - len(noticed)
    if not noticed:
        return "never"
    text = f"{np.median(noticed):.1f} s"
    return f"{text}, {missed} of {len(delays_s)} missed" if missed else text
