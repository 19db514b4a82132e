"""The whole service on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import structlog

from service.app import Rereading, Service, assemble
from service.fleet_types import WatchConfig
from service.listener import listen
from service.mock.profiles import UNIT
from service.mock.serving import running_mock_workers
from service.mock.worker import MockServer
from service.mock.worker_config import MockWorkerConfig
from service.reload import Loaded
from service.server import DrainingServer
from service.settings import ServerConfig, Settings
from service.worker_settings import WorkerSettings


async def until(condition: Callable[[], bool | Awaitable[bool]], within_s: float) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it did not come to hold in time.
    """
    async with asyncio.timeout(within_s):
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.01)


class QuietServer(DrainingServer):
    """A server that leaves the test process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Live:
    """A running service.

    Attributes:
        url: where it listens.
        client: for questions to it and to the workers.
        workers: base URLs of the mock workers behind it.
    """

    url: str
    service: Service
    server: QuietServer
    client: httpx.AsyncClient
    workers: tuple[str, ...]

    async def until_ready(self) -> None:
        """Wait until every worker is up, each rank of it."""
        known = self.service.queue.stats
        await until(
            lambda: self.usable() == len(known().router.workers) >= len(self.workers), within_s=20.0
        )

    def usable(self) -> int:
        """Workers that are up."""
        return self.service.queue.stats().usable_workers

    async def gauge(self, worker: str, name: str) -> float:
        """A gauge of a mock worker, now."""
        page = (await self.client.get(f"{worker}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def running(self) -> float:
        """Requests in the batches of all workers."""
        gauges = [await self.gauge(worker, "num_requests_running") for worker in self.workers]
        return sum(gauges)


def mock(**fields: object) -> MockServer:
    """A mock worker whose iterations take 10 ms."""
    defaults: dict[str, object] = {"model": "mock", "profile": UNIT, "batch_limit": 8}
    return MockServer(MockWorkerConfig(**defaults | fields))  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    urls: Sequence[str],
    *,
    wait: bool = True,
    reread: Callable[[Settings], Loaded] | None = None,
    **groups: object,
) -> AsyncIterator[Live]:
    """Serve in front of workers at these URLs; leaves with nothing held.

    With `reread` the settings are followed: it reads again what they name.
    """
    often = {"metrics_interval_s": 0.05, "histograms_interval_s": 0.05}
    quick = WatchConfig(**often, reprobe_min_s=0.05, reprobe_max_s=0.2)
    settings = Settings(**{"workers": tuple(urls), "watch": quick} | groups)  # type: ignore[arg-type]
    rereading = None
    if reread is not None:
        rereading = Rereading(loaded=reread(settings), load=partial(reread, settings), tls=None)
    service = assemble(settings, rereading)
    config = settings.server if "server" in groups else ServerConfig(port=0, drain_s=5.0)
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = QuietServer(service, config, structlog.get_logger())
        task = asyncio.create_task(server.serve(sockets=[listener]))
        timeout = httpx.Timeout(20.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
            live = Live(url, service, server, client, tuple(urls))
            try:
                if wait:
                    await live.until_ready()
                yield live
                stats = service.queue.stats()
                assert stats.imbalance == 0
                assert (stats.tick_errors, stats.event_errors) == (0, 0)
            finally:
                server.should_exit = True
                await task


@asynccontextmanager
async def serving_mocks(
    mocks: Sequence[MockServer],
    *,
    batch_limit: int = 8,
    data_parallel_size: int = 1,
    **groups: object,
) -> AsyncIterator[Live]:
    """Serve in front of mock workers on real sockets."""
    async with running_mock_workers(mocks) as urls:
        workers = tuple(
            WorkerSettings(url=url, batch_limit=batch_limit, data_parallel_size=data_parallel_size)
            for url in urls
        )
        async with serving(urls, workers=workers, **groups) as live:
            yield live
