"""A chaos run: a router before mock workers that fail in every way, clients that come and go.

Workers and clients live here, the router in a process of its own, so that its memory, tasks and
open files are its alone. At the end the fleet is well again, and the router's own figures must say
that nothing was lost and nothing is left. What happens when is in chaos_plan.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final

import httpx

from loadgen.chaos_client import send
from loadgen.chaos_faults import plan_faults
from loadgen.chaos_judge import End
from loadgen.chaos_keys import Key, let_in_most, per_minute
from loadgen.chaos_patience import Patience
from loadgen.chaos_plan import plan_requests
from loadgen.chaos_requests import proxied
from loadgen.chaos_router import LEASE_S, running_router
from loadgen.chaos_verdict import Books, memory_growth_mib, read_page, troubles
from loadgen.processes import ClusterError
from service.mock.faults import FragileWorker
from service.mock.profiles import UNIT
from service.mock.worker_config import MockWorkerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from loadgen.chaos_faults import PlannedFault
    from loadgen.chaos_plan import ChaosSpec, PlannedRequest

WITHIN_S: Final = 45.0
"""A client that has no end after this was forgotten (chaos_patience.py says whose time it is)."""
SETTLE_S: Final = 30.0
SAMPLE_S: Final = 0.5
LOOKS: Final = 4
IDLE_S: Final = 5.0
"""Until connections that were kept for reuse are gone (forward.keepalive_s is 4)."""
WRONG_KEPT_MAX: Final = 20


@dataclass(kw_only=True)
class ChaosReport:
    """What was done and what was found.

    Attributes:
        requests: sent. ends: how they ended for their clients. faults: done to workers, by kind.
        wrong: what clients saw that must not be, the first few.
        before, after: the router's books when all was quiet. samples: books during the run.
        slow_most: requests that the rate of the key SLOW may have let in.
        twice: requests that two engines, or one engine twice, decoded.
        left_at_workers: requests still inside a worker at the end.
        late_s: by how much this process, workers and clients, was behind the clock in all.
        troubles: everything that fails the run, one line each.
    """

    requests: int = 0
    proxied: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: Books
    after: Books
    samples: list[Books] = field(default_factory=list)
    slow_most: float = 0.0
    twice: int = 0
    left_at_workers: int = 0
    late_s: float = 0.0
    troubles: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """What was found, for people and for a JSON file."""
        return {
            "requests": self.requests,
            # Plain strings: JSON takes no members of enumerations as keys.
            "ends": {str(end): count for end, count in sorted(self.ends.items())},
            "faults": {str(fault): count for fault, count in sorted(self.faults.items())},
            "memory_growth_mib": round(memory_growth_mib(self.samples), 1),
            "waiting_most": max((books.waiting for books in self.samples), default=0),
            "generated_twice": self.twice,
            "left_at_workers": self.left_at_workers,
            "late_s": round(self.late_s, 1),
            "before": asdict(self.before),
            "after": asdict(self.after),
            "wrong": self.wrong,
            "troubles": self.troubles,
        }


async def run_chaos(spec: ChaosSpec, out: Path) -> ChaosReport:
    """Play one run and judge it; the router's log goes to `out`, which is there.

    Raises:
        ClusterError: the router did not start, or ended during the run.
    """
    config = MockWorkerConfig(
        profile=UNIT,
        batch_limit=spec.batch_limit,
        time_scale=spec.time_scale,
        kv_transfer=spec.prefill_workers > 0,
        kv_lease_s=LEASE_S,
    )
    workers = [FragileWorker(config, seed=spec.seed + number) for number in range(spec.workers)]
    plan = plan_requests(spec)
    urls = [worker.url for worker in workers]
    async with _living(workers), running_router(spec, plan, urls, out) as url:
        return await _Run(spec, plan, workers, url).play()


@contextlib.asynccontextmanager
async def _living(workers: list[FragileWorker]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        for worker in workers:
            await worker.until_up()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Run:
    """The parts of one run while it goes on."""

    def __init__(
        self, spec: ChaosSpec, plan: list[PlannedRequest], workers: list[FragileWorker], url: str
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._workers = workers
        self._url = url
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._address = host, int(port)
        self._begin_s = 0.0
        self._patience = Patience(WITHIN_S)

    async def play(self) -> ChaosReport:
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            before = await self._quiet(client, samples=LOOKS)
            report = ChaosReport(before=before, after=before)
            self._begin_s = asyncio.get_running_loop().time()
            beside = [
                asyncio.create_task(self._sample(client, report)),
                asyncio.create_task(self._patience.run()),
            ]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_all(report))
                group.create_task(self._break_things(report))
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            report.late_s = self._patience.late_s
            report.after = await self._quiet(client, samples=LOOKS + round(IDLE_S / SAMPLE_S))
        report.slow_most = self._slow_most()
        report.twice = sum(count > 1 for count in self._generations().values())
        report.left_at_workers = sum(worker.held for worker in self._workers)
        report.troubles = troubles(report)
        return report

    def _slow_most(self) -> float:
        offered = sum(request.key is Key.SLOW for request in self._plan)
        passed_s = asyncio.get_running_loop().time() - self._begin_s
        return let_in_most(per_minute(offered, self._spec.duration_s), passed_s)

    def _generations(self) -> Counter[str]:
        """How often each request was decoded; to compute its prompt again harms nothing."""
        total: Counter[str] = Counter()
        for worker in self._workers[self._spec.prefill_workers :]:
            total.update(worker.generations)
        return total

    async def _send_all(self, report: ChaosReport) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self._plan:
                await self._until(request.at_s)
                group.create_task(self._send(request, report))

    async def _send(self, request: PlannedRequest, report: ChaosReport) -> None:
        report.requests += 1
        report.proxied += proxied(request.kind)
        name = f"chaos-{request.index}"
        end, why = await send(*self._address, request, name, self._patience)
        report.ends[end] += 1
        if end in (End.WRONG, End.HUNG) and len(report.wrong) < WRONG_KEPT_MAX:
            report.wrong.append(why)

    async def _break_things(self, report: ChaosReport) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in plan_faults(self._spec):
                await self._until(fault.at_s)
                report.faults[fault.fault] += 1
                group.create_task(self._break(fault))

    async def _break(self, fault: PlannedFault) -> None:
        await self._workers[fault.worker].suffer(fault.fault, fault.for_s)

    async def _sample(self, client: httpx.AsyncClient, report: ChaosReport) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            with contextlib.suppress(httpx.HTTPError):
                report.samples.append(await self._books(client))

    async def _quiet(self, client: httpx.AsyncClient, samples: int) -> Books:
        """Wait until nothing is held for so many samples; the fewest tasks and files of the last.

        A scrape of a worker is a task and a socket too, so one look may see a few more.
        """
        give_up_s = asyncio.get_running_loop().time() + SETTLE_S
        seen: list[Books] = []
        while len(seen) < samples:
            await asyncio.sleep(SAMPLE_S)
            try:
                seen.append(await self._books(client))
            except httpx.TimeoutException:
                # A machine that is too busy for a scrape is not quiet yet.
                seen.clear()
                continue
            if not seen[-1].is_empty and asyncio.get_running_loop().time() < give_up_s:
                seen.clear()
        tasks = min(books.tasks for books in seen[-LOOKS:])
        files = min(books.open_files for books in seen[-LOOKS:])
        return replace(seen[-1], tasks=tasks, open_files=files)

    async def _books(self, client: httpx.AsyncClient) -> Books:
        response = await client.get(f"{self._url}/metrics")
        if response.status_code != httpx.codes.OK:
            raise ClusterError(f"/metrics answered {response.status_code}")
        return read_page(response.text)

    async def _until(self, at_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._begin_s + at_s - loop.time())
