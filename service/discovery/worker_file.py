"""5 fleet, workers from a YAML file: a list like `workers` in the settings, followed as it changes.

The file is looked at again and again rather than watched: that also works where it is replaced,
mounted by Kubernetes, or on a network file system.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from service.discovery.source import Snapshot, SourceError
from service.settings_text import SettingsError, describe, read_yaml
from service.worker_settings import WorkerEntry, WorkerSettings

Look = tuple[int, int, int]
_ENTRIES: TypeAdapter[tuple[WorkerEntry, ...]] = TypeAdapter(tuple[WorkerEntry, ...])


class FileSource:
    """Follows one file.

    Args:
        path: of the file.
        interval_s: how often it is looked at.
    """

    def __init__(self, path: Path, interval_s: float) -> None:
        self.label = f"file:{path}"
        self.retry_max_s = interval_s
        self.trouble = ""
        self._path = path
        self._interval_s = interval_s

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the workers in the file, now and whenever it has changed."""
        seen: Look | None = None
        while True:
            look = await asyncio.to_thread(_look, self._path)
            if look != seen:
                entries = await asyncio.to_thread(read_workers, self._path)
                # A file that is being written would be read in part; look again first.
                if await asyncio.to_thread(_look, self._path) == look:
                    seen = look
                    yield entries
            await asyncio.sleep(self._interval_s)


def read_workers(path: Path) -> Snapshot:
    """Read a file of workers.

    Raises:
        SourceError: it cannot be used; says file, line and field.
    """
    try:
        entries = read_yaml(path)
        if isinstance(entries, dict) and set(entries) == {"workers"}:
            entries = entries["workers"]
        workers = _ENTRIES.validate_python(entries or ())
        _refuse_repeated(workers, path)
        return workers
    except ValidationError as error:
        known = WorkerSettings.__dataclass_fields__
        raise SourceError("; ".join(describe(error, known, path))) from None
    except SettingsError as error:
        raise SourceError(str(error)) from error


def _refuse_repeated(entries: Snapshot, path: Path) -> None:
    names = Counter(one if isinstance(one, str) else one.id or one.url for one in entries)
    twice = next((name for name, times in names.items() if times > 1), None)
    if twice is not None:
        raise SourceError(f"{path}: {twice} is listed twice")


def _look(path: Path) -> Look:
    """What changes when the file does."""
    try:
        state = path.stat()
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    return state.st_mtime_ns, state.st_size, state.st_ino
