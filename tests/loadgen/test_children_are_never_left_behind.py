"""Processes that the load generator starts end with it, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from loadgen.cluster import ClusterSpec, running_cluster
from loadgen.cpu import CpuMeter
from loadgen.processes import (
    LOOPBACK,
    Child,
    ClusterError,
    free_ports,
    require_free,
    start,
    stop,
    stopping,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE_S = 20.0
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(holds: Callable[[], bool]) -> bool:
    """Poll until a condition holds or patience ends."""
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


def start_python(code: str, folder: Path, name: str = "child") -> Child:
    child = start(name, [sys.executable, "-c", code], folder / f"{name}.log")
    assert eventually(lambda: b"up" in child.log.read_bytes())
    return child


def test_leaving_the_block_ends_children_even_after_an_error(tmp_path: Path) -> None:
    def fail_inside(children: list[Child]) -> None:
        with stopping(children):
            children.append(start_python(SLEEPER, tmp_path))
            raise RuntimeError("boom")

    children: list[Child] = []
    with pytest.raises(RuntimeError, match="boom"):
        fail_inside(children)
    assert children[0].process.returncode == -signal.SIGTERM


def test_a_child_that_ignores_the_request_to_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.processes.STOP_PATIENCE_S", 0.2)
    child = start_python(STUBBORN, tmp_path)
    stop([child])
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_parent_that_is_killed_outright_takes_its_children_along(tmp_path: Path) -> None:
    parent_code = (
        "import sys, time; from pathlib import Path; from loadgen.processes import start;"
        f"log = Path({str(tmp_path)!r}) / 'c.log';"
        f"child = start('c', [sys.executable, '-c', {SLEEPER!r}], log);"
        "print(child.process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        assert is_alive(child_pid)
        os.kill(parent.pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(child_pid))


def test_a_child_that_died_is_reported_with_its_last_line(tmp_path: Path) -> None:
    code = "import sys; print('starting'); sys.exit('no such profile')"
    child = start("worker 0", [sys.executable, "-c", code], tmp_path / "w.log")
    child.process.wait()
    with pytest.raises(ClusterError, match="worker 0 ended with status 1: no such profile"):
        child.require_alive()


def test_a_command_that_does_not_exist_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="worker 0 cannot be started"):
        start("worker 0", ["/no/such/program"], tmp_path / "w.log")


def test_free_ports_are_distinct_and_a_taken_one_is_refused() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {taken} on 127.0.0.1 cannot be used"):
            require_free(taken)
    require_free(taken)


async def test_a_taken_router_port_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind((LOOPBACK, 0))
        holder.listen()
        spec = ClusterSpec(
            workers=1,
            batch_limit=1,
            profile="llama-3-8b-a100",
            time_scale=1.0,
            log_dir=tmp_path / "logs",
            router_port=holder.getsockname()[1],
        )
        with pytest.raises(ClusterError, match="cannot be used"):
            async with running_cluster(spec, "round_robin"):
                pytest.fail("the cluster must not start")
    assert not (tmp_path / "logs").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_of_this_process_is_counted() -> None:
    meter = CpuMeter.start([])
    until_s = time.process_time() + 0.1
    while time.process_time() < until_s:
        pass
    share = meter.share()
    assert share is not None
    assert share > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_of_others_is_counted() -> None:
    meter = CpuMeter.start([])
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            time.sleep(0.5)
            share = meter.others_share()
        finally:
            other.kill()
    assert share is not None
    assert share > 0
