"""What real engines say about themselves while a run goes on: their queues and preemptions.

Reads vLLM's own counters over HTTP, so that no router is judged by its own words.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

LOOK_EVERY_S = 0.25
LOOK_TIMEOUT_S = 20.0
SETTLE_POLL_S = 0.1
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
TOKENS = "vllm:generation_tokens_total"
QUEUE_SUM = "vllm:request_queue_time_seconds_sum"
QUEUE_COUNT = "vllm:request_queue_time_seconds_count"
GAP_SUM = "vllm:inter_token_latency_seconds_sum"
GAP_COUNT = "vllm:inter_token_latency_seconds_count"
SERIES = (RUNNING, WAITING, PREEMPTIONS, TOKENS, QUEUE_SUM, QUEUE_COUNT, GAP_SUM, GAP_COUNT)

Values = dict[str, float]
"""One look at one engine, by series name, all `engine` labels together."""


@dataclass(frozen=True, slots=True)
class Look:
    """All engines at one time.

    Attributes:
        at_s: on the loop's clock, when the pages had come.
        engines: in the order of the URLs.
    """

    at_s: float
    engines: tuple[Values, ...]

    def sum(self, series: str) -> float:
        """A series over all engines."""
        return sum(values.get(series, 0.0) for values in self.engines)


@dataclass(slots=True)
class EngineWatch:
    """Looks at the engines, the first before anything was sent and the last after the end."""

    looks: list[Look] = field(default_factory=list)

    def grown(self, series: str) -> float:
        """How much a counter grew over the watch, all engines together."""
        return self.looks[-1].sum(series) - self.looks[0].sum(series)

    def mean(self, series: str, until_s: float) -> float:
        """Mean of a gauge over engines and looks up to a time."""
        seen = [
            values.get(series, 0.0)
            for look in self.looks
            if look.at_s <= until_s
            for values in look.engines
        ]
        return sum(seen) / len(seen) if seen else 0.0

    def rate_per_s(self, series: str, until_s: float) -> float | None:
        """How fast a counter grew, all engines together, from the first look up to a time."""
        seen = [look for look in self.looks if look.at_s <= until_s]
        if len(seen) < 2:
            return None
        return (seen[-1].sum(series) - seen[0].sum(series)) / (seen[-1].at_s - seen[0].at_s)

    def most(self, series: str) -> float:
        """Largest value of a gauge on any one engine."""
        return max(values.get(series, 0.0) for look in self.looks for values in look.engines)

    def saturated_tokens_per_s(self) -> float | None:
        """Output tokens per second while every engine had requests waiting; None if never long."""
        full = [
            look
            for look in self.looks
            if all(values.get(WAITING, 0.0) > 0 for values in look.engines)
        ]
        if len(full) < 2 or full[-1].at_s <= full[0].at_s:
            return None
        return (full[-1].sum(TOKENS) - full[0].sum(TOKENS)) / (full[-1].at_s - full[0].at_s)


def read_page(text: str) -> Values:
    """Sum the wanted series of a Prometheus page over their labels."""
    values: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in SERIES:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@contextlib.asynccontextmanager
async def watching(urls: Sequence[str]) -> AsyncIterator[EngineWatch]:
    """Look at the engines while the block runs, and once more after it."""
    watch = EngineWatch()
    async with httpx.AsyncClient(trust_env=False, timeout=LOOK_TIMEOUT_S) as client:
        watch.looks.append(await look(client, urls))
        task = asyncio.create_task(_look_on(client, urls, watch))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.wait([task])
        watch.looks.append(await look(client, urls))


async def until_idle(urls: Sequence[str], within_s: float) -> None:
    """Wait until no engine holds a request.

    Raises:
        TimeoutError: one still does.
    """
    async with (
        asyncio.timeout(within_s),
        httpx.AsyncClient(trust_env=False, timeout=LOOK_TIMEOUT_S) as client,
    ):
        while True:
            now = await look(client, urls)
            if now.sum(RUNNING) + now.sum(WAITING) == 0:
                return
            await asyncio.sleep(SETTLE_POLL_S)


async def look(client: httpx.AsyncClient, urls: Sequence[str]) -> Look:
    """Read every engine's counters once."""
    engines = tuple(await asyncio.gather(*(_values(client, url) for url in urls)))
    return Look(asyncio.get_running_loop().time(), engines)


async def _values(client: httpx.AsyncClient, url: str) -> Values:
    """One engine: the filtered page, or the whole one where filtering gives nothing."""
    filtered = await client.get(f"{url}/metrics/", params=[("name[]", name) for name in SERIES])
    values = read_page(filtered.text) if filtered.status_code == httpx.codes.OK else {}
    if values:
        return values
    whole = await client.get(f"{url}/metrics")
    whole.raise_for_status()
    return read_page(whole.text)


async def _look_on(client: httpx.AsyncClient, urls: Sequence[str], watch: EngineWatch) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        with contextlib.suppress(httpx.HTTPError):
            watch.looks.append(await look(client, urls))
