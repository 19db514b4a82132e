"""Sixty-four workers with many streams each, and hundreds of trivial requests: none is lost.

Work is counted in function calls, not in time: what one event and one request cost must not depend
on how many workers, streams or requests there are beside them.
"""

from __future__ import annotations

import asyncio
import re
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import FrameType

import httpx
import orjson
import pytest

import service
from service.fleet_types import WatchConfig
from service.worker_settings import WorkerSettings
from tests.clock import run_virtual
from tests.service.live import Live, serving, until
from tests.service.raw_worker import Got, RawWorker, whole
from tests.service.stage import (
    DONE,
    HandlerTransport,
    Stage,
    answer,
    completion,
    ends,
    event,
    stream,
)

WORKERS, STREAMS = 64, 16
SENT = 4
"""Streams a worker over real sockets: that many more would only take longer."""
EVENTS = 5
FILES_NEEDED = 2000
OURS = str(Path(service.__file__).parent)


SELDOM = WatchConfig(metrics_interval_s=5.0, histograms_interval_s=5.0)
EVENT = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)


def posted(body: dict[str, object]) -> bytes:
    """A request as bytes: a client that costs nothing."""
    raw = orjson.dumps(body)
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        len(raw),
        raw,
    )


@asynccontextmanager
async def connection(
    live: Live,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection, for a block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(live.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.fixture
def _many_files() -> None:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_NEEDED:
        pytest.skip(f"needs {FILES_NEEDED} open files, the system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES_NEEDED), hard))


@pytest.mark.usefixtures("_many_files")
async def test_streams_of_sixty_four_workers_at_once_arrive_whole_each_from_its_own() -> None:
    everybody = asyncio.Event()
    begun: Counter[str] = Counter()

    async def scripted(request: Got) -> None:
        """Begin at once, go on when all streams of all workers have begun."""
        me = request.values("host")[0]
        writer = request.writer
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        writer.write(event(f"{me} 0"))
        begun[me] += 1
        if begun.total() == WORKERS * SENT:
            everybody.set()
        await everybody.wait()
        for number in range(1, EVENTS):
            writer.write(event(f"{me} {number}"))
        writer.write(DONE)

    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(RawWorker(scripted).listening()) for _ in range(WORKERS)
        ]
        workers = tuple(WorkerSettings(url=url, batch_limit=SENT) for url in urls)
        live = await stack.enter_async_context(serving(urls, workers=workers, watch=SELDOM))

        async def one() -> list[str]:
            async with connection(live) as (reader, writer):
                writer.write(posted(completion(stream=True, max_tokens=EVENTS)))
                content = await reader.readuntil(DONE) + await reader.readuntil(b"0\r\n\r\n")
            events = EVENT.findall(content)
            return [orjson.loads(one)["choices"][0]["text"] for one in events]

        got = await asyncio.gather(*(one() for _ in range(WORKERS * SENT)))
        for texts in got:
            me = texts[0].split()[0]
            assert texts == [f"{me} {number}" for number in range(EVENTS)]
        assert set(begun.values()) == {SENT}
        await until(lambda: live.service.queue.held == 0, within_s=20.0)
        assert ends(live.service.queue.stats()) == {"completed": WORKERS * SENT}


async def test_hundreds_of_trivial_requests_are_all_answered_each_with_its_own() -> None:
    count, at_once = 500, 64

    async def scripted(request: Got) -> None:
        assert request.body is not None
        echo = b"<" + orjson.loads(request.body)["prompt"].encode() + b">"
        # This worker hangs up after each answer, and must say so.
        request.writer.write(whole(200, echo, "application/json", "connection: close"))

    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(RawWorker(scripted).listening()) for _ in range(4)]
        live = await stack.enter_async_context(serving(urls, watch=SELDOM))
        numbers = iter(range(count))
        answered: list[int] = []

        async def client() -> None:
            async with connection(live) as (reader, writer):
                for number in numbers:
                    writer.write(posted(completion(prompt=f"{number}")))
                    head, _, rest = (
                        await asyncio.wait_for(reader.readuntil(b">"), 60.0)
                    ).partition(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200 OK")
                    assert rest == b"<%d>" % number
                    answered.append(number)

        await asyncio.gather(*(client() for _ in range(at_once)))
        assert sorted(answered) == list(range(count))
        await until(lambda: live.service.queue.held == 0, within_s=20.0)
        assert ends(live.service.queue.stats()) == {"completed": count}


class Calls:
    """Counts calls of functions of this service, while it is on."""

    def __init__(self) -> None:
        self.count = 0

    def on(self) -> None:
        sys.setprofile(self._note)

    def off(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, what: str, _: object) -> None:
        if what == "call" and frame.f_code.co_filename.startswith(OURS):
            self.count += 1


def calls_per_event(workers: int, streams: int) -> float:
    """Function calls for one event of a stream, while all streams flow."""
    calls, later = Calls(), 5
    parts = [(1.0, event("x")), *((0.1, event("x")) for _ in range(later)), (2.0, DONE)]

    async def handle(_: httpx.Request) -> httpx.Response:
        return stream(*parts)

    async def scenario() -> None:
        named = {f"w{number}": HandlerTransport(handle) for number in range(workers)}
        async with Stage(named, batch_limit=streams).open() as stage:
            body = completion(stream=True)
            inside = [asyncio.create_task(stage.post(body)) for _ in range(workers * streams)]
            await asyncio.sleep(1.05)
            calls.on()
            await asyncio.sleep(0.1 * later)
            calls.off()
            assert {exchange.status for exchange in await asyncio.gather(*inside)} == {200}

    try:
        run_virtual(scenario())
    finally:
        calls.off()
    return calls.count / (workers * streams * later)


def test_an_event_costs_the_same_whatever_flows_beside_it() -> None:
    few, many = calls_per_event(2, 4), calls_per_event(WORKERS, STREAMS)
    assert many <= 1.1 * few
    assert few < 30


def calls_per_request(workers: int, running: int) -> float:
    """Function calls for one small request, while so many others run on every worker."""
    calls, count = Calls(), 50

    async def handle(request: httpx.Request) -> httpx.Response:
        if b"long" in request.content:
            await asyncio.sleep(100.0)
        return answer()

    async def scenario() -> None:
        named = {f"w{number}": HandlerTransport(handle) for number in range(workers)}
        async with Stage(named, batch_limit=2 * running).open() as stage:
            long = completion(prompt="long")
            inside = [asyncio.create_task(stage.post(long)) for _ in range(workers * running)]
            await asyncio.sleep(1.0)
            calls.on()
            for _ in range(count):
                assert (await stage.post(completion(prompt="short"))).status == 200
            calls.off()
            assert {exchange.status for exchange in await asyncio.gather(*inside)} == {200}

    try:
        run_virtual(scenario())
    finally:
        calls.off()
    return calls.count / count


def test_a_request_costs_the_same_however_many_workers_and_requests_there_are() -> None:
    few, many = calls_per_request(2, 4), calls_per_request(WORKERS, STREAMS)
    assert many <= 1.1 * few
