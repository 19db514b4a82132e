"""Raw bytes at both sockets, damaged HTTP of every kind: no 500, no hang, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from service.edge_config import EdgeConfig
from service.forward_config import ForwardConfig
from service.settings import ServerConfig, WorkerSettings
from tests.fuzz.conftest import examples
from tests.fuzz.mutation import mutate
from tests.service.live import Live, mock, serving, serving_mocks, until

ANSWER_S = 20.0
AT_ONCE = 16
FILES_SLACK = 8
"""Connections that ask the workers for health, metrics and models, both ends of each."""
BODY = b'{"model":"mock","prompt":"x","max_tokens":2,"ignore_eos":true,"stream":true}'
CHAT = b'{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":2}'
RESPONSE = b'{"model":"mock","input":"hello","max_output_tokens":2,"stream":true}'
MESSAGE = CHAT[:-1] + b',"stream":true}'
EMBED = b'{"model":"mock","input":["hello","world"]}'
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nmock\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"content-type: audio/wav\r\n\r\n%s\r\n--b--\r\n" % (b"\x00\xffRIFF" * 500)
)


def posted(path: bytes, body: bytes, media: bytes = b"application/json") -> bytes:
    """A request with a body, as a client that closes its connection sends it."""
    return (
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: %s\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (path, media, len(body), body)
    )


REQUESTS = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY),
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"connection: close\r\nx-request-id: a\r\ncontent-length: %d\r\n\r\n%s" % (len(CHAT), CHAT),
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (len(BODY), BODY),
    b"GET /v1/models?a=b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: x\r\naccept: application/openmetrics-text\r\n\r\n",
    b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    posted(b"/v1/responses", RESPONSE),
    posted(b"/v1/messages", MESSAGE),
    posted(b"/v1/embeddings", EMBED),
    posted(b"/v1/audio/transcriptions", FORM, b"multipart/form-data; boundary=b"),
    # The file before the model: the router reads all of it before it knows where it goes.
    posted(
        b"/v1/audio/transcriptions",
        b"--b\r\n" + b"--b\r\n".join(reversed(FORM[5:-7].split(b"--b\r\n"))) + b"--b--\r\n",
        b"multipart/form-data; boundary=b",
    ),
    b"DELETE /v1/responses/resp_1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"PUT /v1/something/newer HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    b"content-length: 3\r\n\r\nabc",
)
GENERATING = (*REQUESTS[:3], *REQUESTS[6:8])
EVENTS = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'
WHOLE = b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}'
ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%s\r\n0\r\n\r\n" % (len(EVENTS), EVENTS),
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    % (len(WHOLE), WHOLE),
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\nbad",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENTS,
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
)
QUICK = {
    "server": ServerConfig(port=0, head_timeout_s=1.0, client_keepalive_s=1),
    "edge": EdgeConfig(body_timeout_s=1.0, log_requests=False),
    "forward": ForwardConfig(
        first_byte_timeout_s=2.0, stall_timeout_s=1.0, client_stall_timeout_s=2.0
    ),
}


async def exchange(live: Live, data: bytes, *, half_close: bool) -> bytes:
    """Send bytes and read to the end, whatever it is."""
    host, port = live.url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    got = b""
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            if half_close:
                writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                while part := await reader.read(65536):
                    got += part
    finally:
        writer.transport.abort()
    return got


def statuses(got: bytes) -> list[str]:
    """The status of each response in what came back; "none" if it is no response."""
    lines = [line for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [line[9:12].decode("latin-1") for line in lines] or ["none"]


def open_files() -> int:
    """Files and sockets of this process: the service, its workers and its clients."""
    return len(os.listdir("/proc/self/fd"))


async def settled(live: Live, tasks: int, files: int) -> None:
    """Nothing is held, no task is left and no socket; idle connections to workers go by time."""

    def is_quiet() -> bool:
        alive = len(asyncio.all_tasks())
        return live.service.queue.held == 0 and alive <= tasks and open_files() <= files

    try:
        await until(is_quiet, within_s=30.0)
    except TimeoutError:
        state = (live.service.queue.held, len(asyncio.all_tasks()), open_files())
        pytest.fail(f"held, tasks and files are {state}; at most 0, {tasks} and {files} should be")
    assert live.service.inside.bytes.held == 0
    stats = live.service.queue.stats()
    assert (stats.router.running, stats.router.waiting) == (0, 0)
    assert sum(worker.kv_tokens for worker in stats.router.workers) == 0


async def test_damaged_requests_are_refused_or_served_and_leave_nothing(
    tally: Counter[str],
) -> None:
    rng = random.Random(0)
    async with serving_mocks([mock(time_scale=10.0)], **QUICK) as live:
        await live.client.get(f"{live.url}/health")
        tasks = len(asyncio.all_tasks()) + 4
        files = open_files() + FILES_SLACK
        for _ in range(examples(160) // AT_ONCE):
            cases = [mutate(rng.choice(REQUESTS), rng) for _ in range(AT_ONCE)]
            answers = await asyncio.gather(
                *(exchange(live, data, half_close=rng.random() < 0.2) for data in cases)
            )
            for data, got in zip(cases, answers, strict=True):
                seen = statuses(got)
                tally.update(seen)
                assert not {"500", "502"} & set(seen), (data, got[:500])
        await settled(live, tasks, files)
        assert (await live.client.get(f"{live.url}/ready")).status_code == 200


@contextlib.asynccontextmanager
async def damaged_worker(rng: random.Random, sent: list[bytes]) -> AsyncIterator[str]:
    """A worker that is healthy by its health check and answers everything else with damage."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health"):
                answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            else:
                answer = mutate(rng.choice(ANSWERS), rng)
                if head.startswith(b"POST"):
                    sent.append(answer)
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_damaged_answers_of_workers_reach_no_client_as_a_bug_of_ours(
    tally: Counter[str],
) -> None:
    rng = random.Random(1)
    sent: list[bytes] = []
    async with damaged_worker(rng, sent) as url:
        patient = ForwardConfig(
            first_byte_timeout_s=2.0, stall_timeout_s=1.0, failures_to_suspect=1_000_000
        )
        workers = (WorkerSettings(url=url, batch_limit=AT_ONCE),)
        async with serving([url], workers=workers, **QUICK | {"forward": patient}) as live:
            await live.client.get(f"{live.url}/health")
            tasks = len(asyncio.all_tasks()) + 8
            files = open_files() + FILES_SLACK
            for _ in range(examples(160) // AT_ONCE):
                answers = await asyncio.gather(
                    *(
                        exchange(live, rng.choice(GENERATING), half_close=False)
                        for _ in range(AT_ONCE)
                    )
                )
                for got in answers:
                    tally.update(statuses(got))
                    assert got, "closed without a response"
                    assert b"internal error" not in got
            assert len(sent) >= examples(160) // AT_ONCE * AT_ONCE * 0.5
            await settled(live, tasks, files)
