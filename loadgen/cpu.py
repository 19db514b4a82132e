"""How much processor time a group of processes used: whether a measurement was short of CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STAT_FIELDS_BEFORE_UTIME = 11
"""Fields of /proc/PID/stat between the closing bracket of the name and utime."""
IDLE_FIELDS = (3, 4)
"""Of a cpu line in /proc/stat: idle and waiting for a disk. The first eight are all its time."""


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Measures processes, this one included, from when it was made.

    Attributes:
        pids: process ids to measure; those that are gone count nothing.
        started_cpu_s: what they had used when the meter was made.
        started_s: when that was, monotonic seconds.
        machine_busy_s: what everybody had used of this process's processors by then, and before.
    """

    pids: tuple[int, ...]
    started_cpu_s: float
    started_s: float
    machine_busy_s: float | None = None

    @classmethod
    def start(cls, pids: Sequence[int]) -> CpuMeter:
        """Begin to measure this process and the given ones."""
        everyone = (os.getpid(), *pids)
        return cls(everyone, _cpu_s(everyone), time.monotonic(), _machine_busy_s())

    def share(self) -> float | None:
        """Share of all processors used since the start; None where /proc does not tell."""
        elapsed_s = time.monotonic() - self.started_s
        used_s = _cpu_s(self.pids) - self.started_cpu_s
        return used_s / (elapsed_s * processors()) if used_s > 0 and elapsed_s > 0 else None

    def others_share(self) -> float | None:
        """Share of all processors that other processes, and other machines on them, used."""
        elapsed_s, busy_s = time.monotonic() - self.started_s, _machine_busy_s()
        if busy_s is None or self.machine_busy_s is None or not elapsed_s > 0:
            return None
        ours_s = _cpu_s(self.pids) - self.started_cpu_s
        others_s = busy_s - self.machine_busy_s - ours_s
        return max(0.0, others_s / (elapsed_s * processors()))


def used_s(pid: int) -> float:
    """Processor seconds that a process has used so far; 0 where /proc does not tell."""
    return _cpu_s((pid,))


def processors() -> int:
    """Count the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine_busy_s() -> float | None:
    """Seconds in which the processors of this process did not idle; None where /proc is silent."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
        if name in mine:
            ticks += sum(map(int, fields[:8])) - sum(int(fields[at]) for at in IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def _cpu_s(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        ticks += sum(map(int, fields[STAT_FIELDS_BEFORE_UTIME : STAT_FIELDS_BEFORE_UTIME + 2]))
    return ticks / os.sysconf("SC_CLK_TCK")
