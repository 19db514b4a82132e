"""What a scrape costs an engine is told by the engine's own processor clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from loadgen.bench_scrapes import CPU, PAGES, PageCost, measure_pages
from loadgen.engine_watch import RUNNING
from service.engine_metrics import CHEAP_SERIES, WANTED_SERIES
from tests.clock import run_virtual

LOOK_S = 0.001
"""What the engine takes to tell its clock."""
SCRAPES = 400


class Engine:
    """Spends a known processor time on every page, and some on nothing."""

    def __init__(self, idle_share: float = 0.0, running: int = 0) -> None:
        self.spent_s = 100.0
        self.idle_share = idle_share
        self.running = running

    async def answer(self, request: httpx.Request) -> httpx.Response:
        names = request.url.params.get_list("name[]")
        filtered = request.url.path == "/metrics/" and names
        if CPU in names:
            self.spent_s += LOOK_S
            used_s = self.spent_s + self.idle_share * asyncio.get_running_loop().time()
            return httpx.Response(200, text=f"{CPU} {used_s}\n{RUNNING} {self.running}\n")
        self.spent_s += cost_s(len(names)) if filtered else cost_s(1000)
        await asyncio.sleep(0.01)
        return httpx.Response(200, text="x" * (len(names) or 1000))


def cost_s(series: int) -> float:
    """By how many series a page has."""
    return series * 1e-5


def measured(handler: Callable[..., object]) -> list[PageCost]:
    async def scenario() -> list[PageCost]:
        transport = httpx.MockTransport(handler)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await measure_pages(client, SCRAPES)

    return run_virtual(scenario())


@pytest.mark.parametrize("idle_share", [0.0, 0.3])
def test_the_cost_of_each_page_is_found_whatever_the_engine_uses_when_idle(
    idle_share: float,
) -> None:
    costs = measured(Engine(idle_share).answer)
    series = (1000, len(WANTED_SERIES), len(CHEAP_SERIES))
    assert [cost.page for cost in costs] == list(PAGES)
    assert [cost.size_bytes for cost in costs] == list(series)
    # One look at the clock among so many scrapes, and one in the idle time, are not told apart.
    for cost, count in zip(costs, series, strict=True):
        assert cost.cpu_s == pytest.approx(cost_s(count), abs=LOOK_S / 100)


def test_an_engine_with_requests_is_not_measured() -> None:
    with pytest.raises(ValueError, match="http://engine has requests: measure an engine that is"):
        measured(Engine(running=1).answer)


def test_an_engine_that_does_not_tell_its_processor_time_is_named() -> None:
    def silent(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=f"{RUNNING} 0\n")

    with pytest.raises(ValueError, match=f"has no {CPU}"):
        measured(silent)
