"""`bidgate-load bench scrapes`: what a scrape costs a real engine, by its own processor clock.

vLLM writes its page in the process that streams tokens, and tells on the same page how much
processor time that process has used. The pages are those that bidgate asks for.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from loadgen.engine_watch import RUNNING, WAITING
from loadgen.live import command_line, run
from loadgen.summary import SUMMARY_FILE, write_json
from service.engine_metrics import CHEAP_SERIES, WANTED_SERIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue

CPU: Final = "process_cpu_seconds_total"
WHOLE: Final = "whole page"
PAGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    WHOLE: ("/metrics", ()),
    "all that bidgate reads": ("/metrics/", WANTED_SERIES),
    "most scrapes of bidgate": ("/metrics/", CHEAP_SERIES),
}
"""Path, and the names that the page is filtered by; only the path with a slash filters."""
IDLE_S: Final = 5.0
"""How long the engine is left alone, to know what it uses without scrapes."""
TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCost:
    """One page.

    Attributes:
        page: its name. size_bytes: of the last one.
        cpu_s: processor seconds of the engine for one scrape, less what it uses when idle.
    """

    page: str
    size_bytes: int
    cpu_s: float


def scrapes(url: str, *, out: Path = Path("out/bench/scrapes"), scrapes_per_page: int = 500) -> int:
    """Measure the processor time that an idle engine takes to write its page of metrics.

    Parameters
    ----------
    url
        Base URL of an engine without requests.
    out
        Directory for summary.json.
    scrapes_per_page
        How often each page is asked for, one request after the other.
    """
    if scrapes_per_page < 1:
        raise ValueError(f"scrapes-per-page must be at least 1, got {scrapes_per_page}")
    console = Console()
    with console.status(f"{len(PAGES)} x {scrapes_per_page} scrapes"):
        costs = run(_measure(url.rstrip("/"), scrapes_per_page))
    table = Table(show_edge=False, header_style="bold")
    for title in ("page", "bytes", "processor ms a scrape", "of the whole page"):
        table.add_column(title, justify="left" if title == "page" else "right")
    for cost in costs:
        share = cost.cpu_s / costs[0].cpu_s if costs[0].cpu_s > 0 else None
        shown = "-" if share is None else f"{share:.2f}"
        table.add_row(cost.page, str(cost.size_bytes), f"{1000 * cost.cpu_s:.2f}", shown)
    console.print(table)
    rows: list[JsonValue] = [asdict(cost) for cost in costs]
    out.mkdir(parents=True, exist_ok=True)
    write_json({"command": command_line(), "pages": rows}, out / SUMMARY_FILE)
    return 0


async def _measure(url: str, count: int) -> list[PageCost]:
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT_S) as client:
        return await measure_pages(client, count)


async def measure_pages(client: httpx.AsyncClient, count: int) -> list[PageCost]:
    """Ask for every page so many times.

    Args:
        client: whose base URL is the engine's.
        count: scrapes of each page.

    Raises:
        ValueError: the engine does not tell its processor time, or has requests.
    """
    loop = asyncio.get_running_loop()
    started_s, before_s = loop.time(), await _cpu_s(client)
    await asyncio.sleep(IDLE_S)
    # Between two looks at the clock stands the cost of one: nothing beside five seconds.
    idle_share = (await _cpu_s(client) - before_s) / (loop.time() - started_s)
    costs: list[PageCost] = []
    for page, (path, names) in PAGES.items():
        started_s, before_s = loop.time(), await _cpu_s(client)
        size_bytes = 0
        for _ in range(count):
            size_bytes = len(await _page(client, path, names))
        took_s = loop.time() - started_s
        used_s = await _cpu_s(client) - before_s - idle_share * took_s
        costs.append(PageCost(page=page, size_bytes=size_bytes, cpu_s=max(0.0, used_s) / count))
    return costs


async def _cpu_s(client: httpx.AsyncClient) -> float:
    """Processor seconds of the engine so far.

    Raises:
        ValueError: it does not tell, or has requests.
    """
    page = await _page(client, "/metrics/", (CPU, RUNNING, WAITING))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    if CPU not in found:
        raise ValueError(
            f"{client.base_url} has no {CPU} on /metrics/: an engine with one API server has it"
        )
    if found.get(RUNNING, 0.0) + found.get(WAITING, 0.0) > 0:
        raise ValueError(f"{client.base_url} has requests: measure an engine that is idle")
    return found[CPU]


async def _page(client: httpx.AsyncClient, path: str, names: Sequence[str]) -> str:
    response = await client.get(path, params=[("name[]", name) for name in names])
    response.raise_for_status()
    return response.text
