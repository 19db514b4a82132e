"""Real workers for the tests marked `vllm`: ours on loopback, or those of BIDGATE_VLLM_URLS."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.vllm.workers import Worker, WorkerOptions, running_workers

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
# Small, so that eight long requests do not fit: 100 blocks of 32 tokens.
KV_BLOCKS = 100
# The first test waits for the workers to start, which takes minutes on a busy machine.
TEST_MAX_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The workers under test.

    Attributes:
        urls: base URLs without a trailing slash.
        model: the name every worker serves.
        batch_limit: B_g of every worker.
        owned: the processes, in the order of urls; empty when they are somebody else's.
    """

    urls: tuple[str, ...]
    model: str
    batch_limit: int
    owned: tuple[Worker, ...] = ()

    def process(self, index: int) -> Worker:
        """The process behind one URL, for tests that kill it."""
        if not self.owned:
            pytest.skip("the workers of BIDGATE_VLLM_URLS are not ours to kill")
        return self.owned[index]

    def revive(self) -> None:
        """Start dead processes of ours again, on their ports, and wait for their health."""
        dead = [worker for worker in self.owned if not worker.alive]
        for worker in dead:
            worker.start()
        for worker in dead:
            worker.wait_healthy()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, so that no test here runs in the plain suite."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TEST_MAX_S), append=False)


def served_model(url: str) -> str:
    """The first name a worker serves."""
    listed = httpx.get(f"{url}/v1/models", trust_env=False, timeout=10.0).json()
    name: str = listed["data"][0]["id"]
    return name


@pytest.fixture
def fleet(session_fleet: Fleet) -> Fleet:
    """Healthy real workers, whatever the test before did to them."""
    session_fleet.revive()
    return session_fleet


@pytest.fixture(scope="session")
def session_fleet() -> Iterator[Fleet]:
    """Two (BIDGATE_VLLM_COUNT) real workers for the whole session."""
    batch_limit = int(os.environ.get("BIDGATE_VLLM_BATCH_LIMIT", "8"))
    named = os.environ.get("BIDGATE_VLLM_URLS", "").replace(",", " ").split()
    if named:
        urls = tuple(url.rstrip("/") for url in named)
        yield Fleet(urls=urls, model=served_model(urls[0]), batch_limit=batch_limit)
        return
    # A run that is timed out from outside must not leave engines behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    count = int(os.environ.get("BIDGATE_VLLM_COUNT", "2"))
    options = WorkerOptions(batch_limit=batch_limit, kv_blocks=KV_BLOCKS)
    with running_workers(count, options) as workers:
        urls = tuple(worker.url for worker in workers)
        model = served_model(urls[0])
        yield Fleet(urls=urls, model=model, batch_limit=batch_limit, owned=tuple(workers))
