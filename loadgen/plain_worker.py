"""Workers that cost nothing: many ports of one process, answers that are ready before the question.

`python -m loadgen.plain_worker PORT...`. A generation is a small JSON object, or a stream of so
many events at a steady pace; a `POST /v1/traces` is taken as a collector of spans takes it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final, cast

import uvloop

EVENTS: Final = 16
PACE_S: Final = 0.2
"""Of the streams: a thousand of them are five thousand events a second."""
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_USAGE: Final = b'"usage":{"prompt_tokens":8,"completion_tokens":4,"total_tokens":12}'
ANSWER: Final = b'{"id":"c","choices":[{"index":0,"text":"x"}],' + _USAGE + b"}"
MODELS: Final = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
METRICS: Final = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="100000",engine="0"} 1.0
"""
EVENT: Final = b'data: {"id":"c","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(body: bytes, media: bytes = b"application/json") -> bytes:
    """A whole answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (media, len(body)) + body


class PlainWorker(asyncio.Protocol):
    """One connection; requests on it come one after the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            found = _LENGTH.search(head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < size:
                return
            body, self._data = self._data[end + 4 : size], self._data[size:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/metrics"):
            self._write(answer(METRICS, b"text/plain"))
        elif path == b"/v1/models":
            self._write(answer(MODELS))
        elif path in (b"/health", b"/v1/traces"):
            self._write(answer(b""))
        elif b'"stream":true' in body:
            self._write(STREAM_HEAD)
            self._left = EVENTS
            self._next_event(asyncio.get_running_loop().time())
        else:
            self._write(answer(ANSWER))

    def _next_event(self, due_s: float) -> None:
        if self._left == 0:
            self._write(chunk(DONE) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._write(chunk(EVENT))
        asyncio.get_running_loop().call_at(due_s + PACE_S, self._next_event, due_s + PACE_S)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def serve(ports: list[int]) -> None:
    """Serve on every port, until cancelled."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(PlainWorker, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
