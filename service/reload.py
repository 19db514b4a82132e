"""Settings that are read again while bidgate serves: what may change, and when to look.

A file that cannot be used changes nothing: the settings before it stay, one log line says what is
wrong and where, and a metric shows it until it is mended. What only a restart can change keeps
its old value and is named. SIGHUP looks at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger
from watchfiles import awatch

from service.settings import Settings
from service.settings_text import FILE_BYTES_MAX, SettingsError

LOOK_S: Final = 5.0
"""How often files are looked at where no notice of a change comes, as on network file systems."""
SETTLE_S: Final = 0.2
"""A file that changes within this time is still being written."""
SETTLES_MAX: Final = 25
NAMES_LOGGED_MAX: Final = 20

LIVE: Final = (
    "workers",
    "prefill_workers",
    "decode_workers",
    "discovery",
    "auth",
    "fleet.max_num_seqs",
    "fleet.worker_api_key",
    "fleet.data_parallel_size",
    "fleet.worker_ca_file",
    "fleet.worker_client_cert_file",
    "fleet.worker_client_key_file",
    "fleet.worker_client_key_password",
    "server.tls_key_password",
    "watch",
    "queue",
    "edge.api_key",
    "edge.body_bytes_max",
    "edge.held_bytes_max",
    "edge.queue_comment_s",
    "edge.body_timeout_s",
    "edge.parse_off_loop_bytes",
    "edge.log_requests",
    "edge.response_headers",
    "edge.model_aliases",
    "edge.forward_priority",
    "edge.clients_pin",
    "edge.session_headers",
    "forward.connect_timeout_s",
    "forward.first_byte_timeout_s",
    "forward.stall_timeout_s",
    "forward.client_stall_timeout_s",
    "forward.retries_max",
    "forward.retry_share",
    "forward.retry_burst",
    "forward.failures_to_suspect",
    "control.policy",
    "control.weights",
    "control.prices",
    "control.age_bound_s",
    "control.age_factor",
    "control.age_floor_s",
    "control.age_share",
    "control.age_stretch",
    "control.age_memory_s",
    "control.tenants.weights",
    "control.tenants.memory_s",
    "control.affinity",
    "control.slow_start_s",
    "control.queue_max",
    "control.displace",
    "control.max_wait_s",
    "control.no_worker_hold_s",
)
"""Settings, or groups of them, that take effect without a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings as read.

    Attributes:
        settings: checked in full. files: that they came from.
    """

    settings: Settings
    files: frozenset[Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadStats:
    """For metrics.

    Attributes:
        applied: times that new settings were taken. rejections: times that they were not.
        rejected: whether what is in the files now cannot be used.
        restart_pending: settings in the files that only a restart brings.
    """

    applied: int = 0
    rejections: int = 0
    rejected: bool = False
    restart_pending: tuple[str, ...] = ()


class Reloader:
    """Looks for changes and applies them.

    Args:
        loaded: the settings in use and their files.
        load: reads them again; called in a thread.
        apply: takes checked settings; must not raise.
        log: takes what happened.
    """

    def __init__(
        self,
        loaded: Loaded,
        load: Callable[[], Loaded],
        apply: Callable[[Settings], None],
        log: FilteringBoundLogger,
    ) -> None:
        self._in_use = loaded.settings
        self._files = loaded.files
        self._load = load
        self._apply = apply
        self._log = log
        self._wake = asyncio.Event()
        self._forced = False
        self._seen = _digest(loaded.files)
        self._reason = ""
        self._applied = 0
        self._rejections = 0
        self._pending: tuple[str, ...] = ()

    def wake(self) -> None:
        """Look now, and read even if no file changed."""
        self._forced = True
        self._wake.set()

    def stats(self) -> ReloadStats:
        """Counters for metrics."""
        return ReloadStats(
            applied=self._applied,
            rejections=self._rejections,
            rejected=bool(self._reason),
            restart_pending=self._pending,
        )

    async def run(self) -> None:
        """Look until cancelled; SIGHUP looks at once."""
        with _on_hangup(self.wake):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._notice())
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._wake.wait()
                    self._wake.clear()
                    await self._look()
                    # A folder where others write all the time must not keep us looking.
                    await asyncio.sleep(SETTLE_S)

    async def _look(self) -> None:
        """Read settings if their files changed, once nobody writes to them any more."""
        digest = await asyncio.to_thread(_digest, self._files)
        if digest == self._seen and not self._forced:
            return
        for _ in range(SETTLES_MAX):
            await asyncio.sleep(SETTLE_S)
            before, digest = digest, await asyncio.to_thread(_digest, self._files)
            if digest == before:
                break
        self._forced = False
        try:
            loaded = await asyncio.to_thread(self._load)
        except SettingsError as error:
            self._seen = digest
            self._reject(str(error))
            return
        # What changed while it was read differs from what was seen before, so it is read again.
        self._seen = digest
        if loaded.files != self._files:
            self._files = loaded.files
            self._seen = await asyncio.to_thread(_digest, self._files)
        self._take(loaded.settings)

    def _reject(self, reason: str, advice: str = "mend the file") -> None:
        self._rejections += 1
        self._reason = reason
        self._log.error(
            "settings_rejected",
            reason=reason,
            advice=f"{advice}; the settings before it stay in use until then",
        )

    def _take(self, settings: Settings) -> None:
        names = differing(self._in_use, settings)
        pending = tuple(name for name in names if not is_live(name))
        try:
            effective = with_old(self._in_use, settings, pending)
        except ValueError as error:
            needs = ", ".join(pending[:NAMES_LOGGED_MAX])
            self._reject(f"{error} (with the old {needs})", "mend the file, or restart bidgate")
            return
        if self._reason:
            self._log.info("settings_usable_again")
        self._reason = ""
        live = [name for name in names if is_live(name)]
        if pending and pending != self._pending:
            self._log.warning(
                "settings_need_restart",
                settings=list(pending[:NAMES_LOGGED_MAX]),
                advice="restart bidgate to use them; the others are in use now",
            )
        self._pending = pending
        self._in_use = effective
        self._applied += 1
        self._apply(effective)
        self._log.info("settings_applied", changed=live[:NAMES_LOGGED_MAX])

    async def _notice(self) -> None:
        """Wake at once when a folder of one of the files changes."""
        while True:
            files = self._files
            folders = {path.parent for path in files if path.parent.is_dir()}
            if not folders:
                await asyncio.sleep(LOOK_S)
                continue
            try:
                watch = awatch(
                    *folders,
                    recursive=False,
                    yield_on_timeout=True,
                    rust_timeout=int(LOOK_S * 1000),
                    watch_filter=None,
                )
                async for changes in watch:
                    if changes:
                        self._wake.set()
                    if self._files != files:
                        break
            except (OSError, RuntimeError) as error:
                # The system's limit of watched files, most often.
                self._log.warning("settings_looked_at_by_time", reason=str(error), every_s=LOOK_S)
                await asyncio.Event().wait()


def is_live(name: str) -> bool:
    """Whether a setting, by its dotted name, takes effect without a restart."""
    return any(name == live or name.startswith(f"{live}.") for live in LIVE)


def differing(old: Settings, new: Settings) -> tuple[str, ...]:
    """Dotted names of the settings that differ, in the order of the model."""
    names: list[str] = []
    for name in Settings.model_fields:
        names += _differing(getattr(old, name), getattr(new, name), name)
    return tuple(names)


def with_old(old: Settings, new: Settings, names: Iterable[str]) -> Settings:
    """The new settings with the old values of some.

    Raises:
        ValueError: old and new values do not go together.
    """
    kept = _below(name.split(".") for name in names)
    update = {name: _with_old(getattr(old, name), getattr(new, name), kept[name]) for name in kept}
    return new.model_copy(update=update)


def _with_old(old: object, new: object, paths: list[list[str]]) -> object:
    """Replace at once what is kept of one group: its values are checked together."""
    if [] in paths:
        return old
    assert is_dataclass(new)
    assert not isinstance(new, type)
    kept = _below(paths)
    values = {name: _with_old(getattr(old, name), getattr(new, name), kept[name]) for name in kept}
    return replace(new, **values)


def _below(paths: Iterable[list[str]]) -> dict[str, list[list[str]]]:
    """Paths without their first name, by that name."""
    found: dict[str, list[list[str]]] = {}
    for name, *rest in paths:
        found.setdefault(name, []).append(rest)
    return found


def _differing(old: object, new: object, name: str) -> Iterator[str]:
    if old == new:
        return
    if is_dataclass(old) and not isinstance(old, type) and type(old) is type(new):
        for spec in fields(old):
            below = f"{name}.{spec.name}"
            yield from _differing(getattr(old, spec.name), getattr(new, spec.name), below)
    else:
        yield name


def _digest(files: Iterable[Path]) -> bytes:
    """What the files hold now; one that cannot be read counts as a content of its own."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path).encode() + b"\0")
        try:
            with path.open("rb") as file:
                content = file.read(FILE_BYTES_MAX)
        except OSError:
            content = b"unreadable"
        digest.update(hashlib.sha256(content).digest())
    return digest.digest()


@contextmanager
def _on_hangup(wake: Callable[[], None]) -> Iterator[None]:
    """Call on SIGHUP, where signals can be had: in the main thread."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGHUP, wake)
    except (NotImplementedError, RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
