"""Drive a fleet through bidgate with twice the requests its batches hold, and watch the engines.

The load is closed: twice as many clients as batch slots, each sending its next request when the
last one ended. So the overload is the same however fast or busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.vllm.engine import Stream, client, completion, sample, settle, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from service.engine_metrics import EngineSample

WATCH_S = 0.02
QUEUE_TIME = "vllm:request_queue_time_seconds_bucket"


@dataclass(slots=True)
class Watched:
    """What one engine's own counters said over a run.

    Attributes:
        waiting: vllm:num_requests_waiting at every look.
        running: vllm:num_requests_running at the same looks.
        preemptions: requests thrown out of the batch.
        iteration_s: mean time between two tokens of a request.
        queue_time_s: bucket edges of the engine's queue time and requests counted in each.
    """

    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    preemptions: int = 0
    iteration_s: float = 0.0
    queue_time_s: list[tuple[float, float]] = field(default_factory=list)

    def queue_time_quantile_s(self, share: float) -> float:
        """Upper edge of the bucket in which this share of the requests has been scheduled."""
        total = sum(count for _, count in self.queue_time_s)
        seen = 0.0
        for edge_s, count in self.queue_time_s:
            seen += count
            if seen >= share * total:
                return edge_s
        raise AssertionError("the engine scheduled no request")


async def _queue_time_counts(http: httpx.AsyncClient) -> dict[float, float]:
    """Cumulative counts of the queue-time histogram by upper edge."""
    page = (await http.get("/metrics/", params={"name[]": QUEUE_TIME})).text
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == QUEUE_TIME
    }


def _iteration_s(before: EngineSample, after: EngineSample) -> float:
    """d(sum)/d(count) of the engine's inter-token latency."""
    gaps = (after.token_latency_count or 0) - (before.token_latency_count or 0)
    return ((after.token_latency_sum_s or 0) - (before.token_latency_sum_s or 0)) / gaps


@contextlib.asynccontextmanager
async def watching(url: str) -> AsyncIterator[Watched]:
    """Watch one engine; the totals are known after the block."""
    seen = Watched()

    async def look_on(http: httpx.AsyncClient) -> None:
        while True:
            now = await sample(http)
            seen.waiting.append(now.waiting or 0)
            seen.running.append(now.running or 0)
            await asyncio.sleep(WATCH_S)

    async with client(url) as http:
        before, edges_before = await settle(http), await _queue_time_counts(http)
        looking = asyncio.create_task(look_on(http))
        try:
            yield seen
        finally:
            looking.cancel()
            await asyncio.wait([looking])
        after, edges_after = await settle(http), await _queue_time_counts(http)
    seen.preemptions = (after.preemptions_total or 0) - (before.preemptions_total or 0)
    seen.iteration_s = _iteration_s(before, after)
    edges_s = sorted(edges_after)
    passed = [edges_after[edge] - edges_before.get(edge, 0.0) for edge in edges_s]
    seen.queue_time_s = list(zip(edges_s, np.diff(passed, prepend=0.0).tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A closed load.

    Attributes:
        model: name to ask for.
        clients: requests in flight.
        requests: in all.
        prompt_tokens: of every request.
        decode_tokens: (least, most) output length, drawn evenly.
        seed: of the lengths.
    """

    model: str
    clients: int
    requests: int
    prompt_tokens: int
    decode_tokens: tuple[int, int]
    seed: int = 1

    def bodies(self) -> list[dict[str, object]]:
        """The same requests, in the same order, for the same seed."""
        least, most = self.decode_tokens
        lengths = np.random.default_rng(self.seed).integers(least, most + 1, self.requests)
        return [
            completion(
                self.model,
                prompt_tokens=self.prompt_tokens,
                decode_tokens=int(length),
                salt=index + 1,
            )
            for index, length in enumerate(lengths)
        ]

    async def run(self, http: httpx.AsyncClient) -> list[Stream]:
        """Send them all; the answers in the order of `bodies`."""
        bodies = self.bodies()
        answers: list[Stream] = [Stream() for _ in bodies]
        turns = itertools.count()

        async def serve_one_client() -> None:
            while (turn := next(turns)) < len(bodies):
                answers[turn] = await stream(http, bodies[turn])

        await asyncio.gather(*(serve_one_client() for _ in range(self.clients)))
        return answers
