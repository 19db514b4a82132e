"""Child processes that cannot be left behind: started, watched, and stopped by process id.

A child gets its own session, so that Ctrl-C reaches only the parent, which then stops it in order.
On Linux the kernel also ends it when the parent is killed outright.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOOPBACK = "127.0.0.1"
STOP_PATIENCE_S = 5.0
LOG_TAIL_BYTES = 4096
PR_SET_PDEATHSIG = 1


class ClusterError(Exception):
    """Something could not be started or died; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running child process.

    Attributes:
        name: what it is, for messages.
        process: the handle; its pid is the only thing ever signalled.
        log: file that takes its output.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def require_alive(self) -> None:
        """Raise ClusterError with the last line it wrote when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ClusterError(f"{self.name} ended with status {code}: {last_line(self.log)}")


def free_ports(count: int) -> list[int]:
    """Ask the kernel for distinct free loopback ports; they are held together, then let go."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def require_free(port: int) -> None:
    """Raise ClusterError when a port that was asked for is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise ClusterError(f"port {port} on {LOOPBACK} cannot be used: {error}") from error


def start(name: str, command: Sequence[str], log: Path) -> Child:
    """Start a child whose output goes to a log file.

    Raises:
        ClusterError: when the command cannot be run.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Not a session of its own: Linux may share the CPU by session (autogroup),
                # and two engines in theirs then starve everything else for seconds.
                process_group=0,
                preexec_fn=functools.partial(_die_with_parent, _libc(), os.getpid()),
            )
        except OSError as error:
            raise ClusterError(f"{name} cannot be started: {error}") from error
    return Child(name, process, log)


@contextlib.contextmanager
def stopping(children: list[Child]) -> Iterator[list[Child]]:
    """Stop every child in the list when the block is left, however it is left."""
    try:
        yield children
    finally:
        stop(children)


def stop(children: Sequence[Child]) -> None:
    """End children: ask all, wait a bounded time, then kill those that stayed; reap them all."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
    until_s = time.monotonic() + STOP_PATIENCE_S
    for child in children:
        try:
            child.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def last_line(log: Path) -> str:
    """Return the last line that a child wrote, or say that it wrote nothing."""
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
    return tail[-1] if tail else "it wrote nothing"


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent(libc: ctypes.CDLL | None, parent_pid: int) -> None:
    """Run in the child before exec: ask the kernel to end it when its parent ends."""
    if libc is None:
        return
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
