"""The second signal: every kind of request inside ends at once, in the shape its client reads."""

from __future__ import annotations

import asyncio
import json

import httpx

from service.edge_config import EdgeConfig
from service.settings import ServerConfig
from service.worker_settings import WorkerSettings
from tests.service.live import Live, serving, until
from tests.service.raw_worker import Got, RawWorker, chunk, events_head

EVENT = b'event: x\ndata: {"choices":[{"index":0,"text":"x"}]}\n\n'
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LIGHT = ("/v1/embeddings", "/v1/new", "/tokenize")
BODY = {"model": "m", "prompt": "x", "input": "x", "messages": [], "max_tokens": 9}


async def endless(request: Got) -> None:
    """Begins to stream, or says nothing; never ends."""
    if json.loads(request.body).get("stream"):
        request.writer.write(events_head() + chunk(EVENT))
        await request.writer.drain()
    await asyncio.sleep(600)


def send(live: Live, path: str, streams: bool) -> asyncio.Task[httpx.Response]:
    body = BODY | ({"stream": True} if streams else {})
    return asyncio.create_task(live.client.post(f"{live.url}{path}", json=body))


async def test_all_that_is_inside_ends_and_says_why() -> None:
    """Streams of each format, whole answers, what waits, with comments or not, light requests."""
    worker = RawWorker(endless)
    async with worker.listening() as url:
        settings = (WorkerSettings(url=url, batch_limit=len(STREAMS) + 1),)
        groups = {"edge": EdgeConfig(queue_comment_s=0.05), "workers": settings}
        server = ServerConfig(port=0, drain_s=600.0)
        async with serving([url], server=server, **groups) as live:
            inside = {f"{path} streams": send(live, path, streams=True) for path in STREAMS}
            inside["whole"] = send(live, "/v1/completions", streams=False)
            await until(lambda: len(worker.got) == len(STREAMS) + 1, within_s=20.0)
            inside |= {path: send(live, path, streams=False) for path in LIGHT}
            inside |= {f"{path} waits": send(live, path, streams=False) for path in STREAMS}
            inside |= {f"{path} commented": send(live, path, streams=True) for path in STREAMS}
            await until(lambda: live.service.held == len(inside), within_s=20.0)
            await asyncio.sleep(0.2)  # in which several comments are due
            live.server.handle_exit(15, None)
            await until(lambda: live.service.queue.draining, within_s=20.0)
            assert not any(one.done() for one in inside.values())
            live.server.handle_exit(15, None)
            answers = {name: await one for name, one in inside.items()}
    for name, answer in answers.items():
        head, body = (EVENT, answer.content) if "streams" in name else (b"", answer.content)
        if "commented" in name:
            head = b": waiting\n\n"
            body = head + body.replace(head, b"")
            assert body != answer.content, "one comment at least"
        wrong = body.removeprefix(head)
        if head:
            named = b"event: error\n" * name.startswith(("/v1/responses", "/v1/messages"))
            assert (answer.status_code, wrong[-2:]) == (200, b"\n\n"), name
            assert wrong.startswith(named + b"data: "), name
            wrong = wrong.removeprefix(named + b"data: ")
        else:
            assert answer.status_code == 503, name
        told = json.loads(wrong)
        assert told["error"]["code"] == "stopped", name
        assert ("type" in told) == name.startswith("/v1/messages"), name
