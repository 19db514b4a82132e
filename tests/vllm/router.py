"""A real `bidgate serve` process in front of real workers, and what it says about itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.workers import LOGS, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

READY_MAX_S = 60.0
STOP_MAX_S = 20.0
POLL_S = 0.1
_ids = itertools.count(1)


def worker_id(url: str) -> str:
    """The name bidgate gives a worker that was configured by URL alone."""
    return urlsplit(url).netloc


@dataclass(frozen=True, slots=True)
class RouterPage:
    """One read of bidgate's /metrics.

    Attributes:
        values: by series name, then by the set of its label values.
    """

    values: dict[str, dict[frozenset[str], float]]

    def __call__(self, name: str, *labels: str) -> float:
        """The value of a series, 0 where it does not exist."""
        return self.values.get(name, {}).get(frozenset(labels), 0.0)

    def total(self, name: str) -> float:
        """Sum of a series over its labels."""
        return sum(self.values.get(name, {}).values())


@dataclass(slots=True)
class Router:
    """One `bidgate serve` process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    flags: tuple[str, ...] = field(default=())

    async def page(self, http: httpx.AsyncClient) -> RouterPage:
        """Read /metrics through the general parser."""
        text = (await http.get("/metrics")).text
        values: dict[str, dict[frozenset[str], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, {})[frozenset(sample.labels.values())] = sample.value
        return RouterPage(values)

    def log_events(self, name: str) -> list[dict[str, object]]:
        """Log lines of one event, in order."""
        lines = self.log.read_text(errors="replace").splitlines()
        records = (json.loads(line) for line in lines if line.startswith("{"))
        return [record for record in records if record.get("event") == name]


def _wait_ready(router: Router) -> None:
    deadline_s = time.monotonic() + READY_MAX_S
    while time.monotonic() < deadline_s and router.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{router.url}/ready", trust_env=False, timeout=2.0).status_code == 200:
                return
        time.sleep(POLL_S)
    raise AssertionError(f"bidgate did not become ready:\n{router.log.read_text()[-4000:]}")


@contextlib.contextmanager
def running_router(
    urls: Sequence[str], *, batch_limit: int, flags: Sequence[str] = ()
) -> Iterator[Router]:
    """Yield a ready router in front of these workers; it is stopped by SIGTERM afterwards."""
    port = free_port()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"bidgate-{next(_ids)}-{port}.log"
    command = [
        *(sys.executable, "-m", "service", "serve"),
        *(("--workers", *urls) if urls else ()),
        *("--port", str(port), "--max-num-seqs", str(batch_limit)),
        *("--log-format", "json", "--drain-s", "5", *flags),
    ]
    environment = {key: text for key, text in os.environ.items() if not key.startswith("BIDGATE_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
    try:
        router = Router(f"http://127.0.0.1:{port}", log, process, tuple(flags))
        _wait_ready(router)
        yield router
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_MAX_S)
        process.kill()
        process.wait()


async def until_all_up(router: Router, http: httpx.AsyncClient, urls: Sequence[str]) -> None:
    """Wait until the worker at every URL is in rotation."""
    await until_workers_up(router, http, [worker_id(url) for url in urls])


async def until_workers_up(router: Router, http: httpx.AsyncClient, names: Sequence[str]) -> None:
    """Wait until every one of these workers is in rotation."""
    deadline_s = time.monotonic() + READY_MAX_S
    while time.monotonic() < deadline_s:
        page = await router.page(http)
        if all(page("bidgate_worker_state", name, "up") for name in names):
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError("not every worker came into rotation")
