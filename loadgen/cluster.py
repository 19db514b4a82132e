"""A whole installation on loopback, as separate processes: mock workers and the router before them.

Only used to measure: the demo and the benchmarks talk to it over HTTP like any client.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from loadgen.processes import (
    LOOPBACK,
    Child,
    ClusterError,
    free_ports,
    require_free,
    start,
    stopping,
)
from service.mock.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from service.mock.profiles import DecodeProfile

START_TIMEOUT_S = 60.0
POLL_S = 0.1
WORKER_READY_PATH = "/health"
ROUTER_READY_PATH = "/ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What to start.

    Attributes:
        workers: number of equal mock workers.
        batch_limit: requests in one worker's batch.
        profile: whose iteration times the workers have.
        time_scale: above 1 the workers run faster than the profile's real time.
        router_port: port of the router; 0 takes a free one.
        log_dir: where the processes' output goes.
    """

    workers: int
    batch_limit: int
    profile: str
    time_scale: float
    log_dir: Path
    router_port: int = 0

    def __post_init__(self) -> None:
        """Refuse clusters that cannot be."""
        if self.workers < 1 or self.batch_limit < 1 or not self.time_scale > 0:
            raise ValueError("workers and batch_limit must be at least 1, time_scale positive")
        if self.profile not in PROFILES:
            raise ValueError(f"no profile {self.profile!r}; known: {', '.join(PROFILES)}")

    def decode_profile(self) -> DecodeProfile:
        """The figures behind the profile's name."""
        return PROFILES[self.profile]

    def iteration_s(self, kv_tokens_per_request: float) -> float:
        """Wall seconds of one decode iteration at full batch, without prefill."""
        kv_tokens = round(self.batch_limit * kv_tokens_per_request)
        return self.decode_profile().iteration_s(self.batch_limit, kv_tokens, 0) / self.time_scale


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running installation: where it answers, and the processes behind it."""

    router_url: str
    worker_urls: tuple[str, ...]
    children: tuple[Child, ...]


@contextlib.asynccontextmanager
async def running_cluster(spec: ClusterSpec, policy: str) -> AsyncIterator[Cluster]:
    """Start workers, then the router; stop them all when the block is left, however it is left.

    Raises:
        ClusterError: when a port is taken or a process does not come up.
    """
    if spec.router_port:
        require_free(spec.router_port)
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    *worker_ports, free = free_ports(spec.workers + 1)
    router_port = spec.router_port or free
    worker_urls = tuple(f"http://{LOOPBACK}:{port}" for port in worker_ports)
    router_url = f"http://{LOOPBACK}:{router_port}"
    with stopping([]) as workers, stopping([]) as routers:
        for number, port in enumerate(worker_ports):
            log = spec.log_dir / f"worker-{number}.log"
            workers.append(start(f"worker {number}", worker_command(spec, port), log))
        for child, url in zip(workers, worker_urls, strict=True):
            await until_ready(child, url + WORKER_READY_PATH)
        command = router_command(spec, policy, router_port, worker_urls)
        routers.append(start("the router", command, spec.log_dir / f"router-{policy}.log"))
        await until_ready(routers[0], router_url + ROUTER_READY_PATH)
        yield Cluster(router_url, worker_urls, (*workers, *routers))


def worker_command(spec: ClusterSpec, port: int) -> list[str]:
    """Write the command line of one mock worker."""
    return [
        *bidgate_command(),
        "mock-worker",
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--profile", spec.profile),
        *("--max-num-seqs", str(spec.batch_limit)),
        *("--time-scale", f"{spec.time_scale:g}"),
    ]


def router_command(
    spec: ClusterSpec, policy: str, port: int, worker_urls: tuple[str, ...]
) -> list[str]:
    """Write the command line of the router."""
    return [
        *bidgate_command(),
        "serve",
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--policy", policy),
        *("--max-num-seqs", str(spec.batch_limit)),
        *("--log-level", "warning"),
        "--workers",
        *worker_urls,
    ]


def bidgate_command() -> list[str]:
    """Run the service with this very interpreter, so that one environment holds both."""
    return [sys.executable, "-m", "service"]


async def until_ready(child: Child, url: str) -> None:
    """Wait until a child's URL answers 200.

    Raises:
        ClusterError: when the child ends or START_TIMEOUT_S passes.
    """
    give_up_s = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < give_up_s:
            child.require_alive()
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(POLL_S)
    raise ClusterError(f"{child.name} did not become ready within {START_TIMEOUT_S:.0f} s")
