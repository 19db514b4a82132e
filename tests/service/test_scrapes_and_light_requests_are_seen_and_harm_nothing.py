"""Pages asked for while streams run, and light requests beside queued ones, over real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.service.live import Live, until
from tests.service.raw_exchange import in_front_of
from tests.service.raw_worker import Got, RawWorker, chunk, events_head, whole
from tests.service.scripted_server import page
from tests.service.stage import DONE

STREAMS, TOKENS = 6, 40
EVENTS = [b'data: {"choices":[{"index":0,"text":"%d"}]}\n\n' % number for number in range(TOKENS)]


async def scrape(live: Live) -> Counter[str]:
    """The page, parsed by Prometheus's own parser; the sum of every name."""
    text = (await live.client.get(f"{live.url}/metrics")).text
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value  # type: ignore[assignment]
    return sums


async def test_scrapes_change_neither_the_order_nor_the_count_of_tokens() -> None:
    """T66: pages asked for without a pause while numbered events pass."""

    async def numbered(request: Got) -> None:
        request.writer.write(events_head())
        for one in EVENTS:
            request.writer.write(chunk(one))
            await request.writer.drain()
            await asyncio.sleep(0.005)
        request.writer.write(chunk(DONE) + chunk(b""))

    with capture_logs() as lines:
        async with in_front_of(RawWorker(numbered)) as live:
            body = {"model": "m", "prompt": "x", "max_tokens": TOKENS, "stream": True}
            posts = [
                asyncio.create_task(live.client.post(f"{live.url}/v1/completions", json=body))
                for _ in range(STREAMS)
            ]
            running, ended = [], []
            while not all(post.done() for post in posts):
                sums = await scrape(live)
                running.append(sums["bidgate_queue_running"])
                ended.append(sums["bidgate_requests_ended_total"])
            assert {post.result().content for post in posts} == {b"".join(EVENTS) + DONE}
            assert (await scrape(live))["bidgate_requests_ended_total"] == STREAMS
    assert max(running) == STREAMS
    assert ended == sorted(ended)
    told = [line["decode_tokens"] for line in lines if line["event"] == "request"]
    assert told == [TOKENS] * STREAMS


async def test_light_and_queued_requests_each_avoid_the_worker_that_the_others_fill() -> None:
    """T85: what an engine says of its load counts whatever the kind of request that made it."""

    async def answer(request: Got) -> None:
        told = b'{"usage":{"completion_tokens":1}}'
        request.writer.write(whole(200, told, "application/json", "connection: close"))

    workers = [RawWorker(answer), RawWorker(answer)]
    async with in_front_of(*workers) as live:

        def seen(*foreign: int) -> bool:
            return [w.foreign for w in live.service.queue.stats().router.workers] == [*foreign]

        limit = live.service.queue.stats().router.workers[0].batch_limit
        for full, loads in ((0, (limit, 0)), (1, (0, limit))):
            for worker, running in zip(workers, loads, strict=True):
                worker.metrics = page(running=running)
                worker.got.clear()
            await until(lambda loads=loads: seen(*loads), within_s=20.0)  # type: ignore[misc]
            for path in ("/v1/embeddings", "/v1/chat/completions", "/pooling", "/v1/completions"):
                body = {"model": "m", "prompt": "x", "input": "x", "messages": [], "max_tokens": 1}
                answers = await asyncio.gather(
                    *(live.client.post(f"{live.url}{path}", json=body) for _ in range(5))
                )
                assert {one.status_code for one in answers} == {200}
            assert (len(workers[full].got), len(workers[1 - full].got)) == (0, 20)
