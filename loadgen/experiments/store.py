"""Finished simulations on disk, so that a run which was broken off goes on where it stopped.

A result is used again only if nothing that made it has changed: the key of a case hashes its
settings and, where it reads a recorded trace, that file's identity; the folder it lies in is named
by a hash of every line of code and every version that simulations depend on. Folders of other code
are removed, so that there is never more than one run's worth.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import loadgen
import service.control
import service.mock
from loadgen.experiments.measures import Measured

if TYPE_CHECKING:
    from types import ModuleType
    from typing import TypeAlias

    from loadgen.experiments.cases import Case

    Timed: TypeAlias = tuple[Measured, float]
    """What a simulation gave, and the processor time that it took, seconds."""

FOLDER = "simulations"
LIBRARIES = ("numpy", "scipy")
KEY_DIGITS = 32
SOURCES: tuple[ModuleType, ...] = (service.control, service.mock, loadgen)


@dataclass(frozen=True, slots=True)
class ResultStore:
    """One folder of finished simulations, all made by the same code.

    Attributes:
        folder: where they lie; one JSON a simulation.
    """

    folder: Path

    @classmethod
    def open(cls, out: Path) -> ResultStore:
        """Open the store of the code that runs now, and drop those of other code."""
        root = out / FOLDER
        own = root / code_fingerprint()
        if root.is_dir():
            for other in root.iterdir():
                if other != own and other.is_dir():
                    shutil.rmtree(other)
        own.mkdir(parents=True, exist_ok=True)
        return cls(own)

    def load(self, case: Case) -> Timed | None:
        """What a case gave earlier; None when it is not known or its file was cut short."""
        try:
            found = json.loads(self._path(case).read_bytes())
            values = cast("dict[str, float]", found["values"])
            series = cast("dict[str, list[float | None]]", found["series"])
            return Measured(values, series), float(found["cpu_s"])
        except (OSError, ValueError, KeyError):
            return None

    def save(self, case: Case, timed: Timed) -> None:
        """Keep what a case gave and cost; the file appears whole or not at all."""
        path = self._path(case)
        unfinished = path.with_suffix(".part")
        measured, cpu_s = timed
        record = {"values": measured.values, "series": measured.series, "cpu_s": cpu_s}
        # Not orjson: it writes infinity as null.
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(path)

    def _path(self, case: Case) -> Path:
        return self.folder / f"{case_key(case)}.json"


def case_key(case: Case) -> str:
    """Hash a case's settings and the recorded traces that it reads."""
    traces = {case.load.trace, *(tier.trace for tier in case.load.tiers)}
    files = [Path(trace) for trace in sorted(traces)]
    seen = [f"{path.name} {_identity(path)}" for path in files if path.is_file()]
    return _hash("\n".join([repr(case), *seen]).encode())


def code_fingerprint() -> str:
    """Hash the code and the libraries that simulations depend on."""
    parts = [platform.python_version(), *(f"{name} {version(name)}" for name in LIBRARIES)]
    for package in SOURCES:
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            parts.append(f"{package.__name__} {path.relative_to(root)} {digest}")
    return _hash("\n".join(parts).encode())


def _identity(path: Path) -> str:
    known = path.stat()
    return f"{known.st_size} {known.st_mtime_ns}"


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:KEY_DIGITS]
