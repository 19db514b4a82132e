"""A client that goes takes its request with it: streaming or not, running or queued, over TCP."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import orjson
import pytest

from tests.mock.mock_client import over_http

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from service.mock.worker import MockServer

PATIENCE_S = 5.0


def request_bytes(*, stream: bool) -> bytes:
    body = orjson.dumps({"prompt": [1], "max_tokens": 30_000, "ignore_eos": True, "stream": stream})
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: mock\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


async def until(server: MockServer, *, running: int, waiting: int) -> None:
    series = server.engine.series
    async with asyncio.timeout(PATIENCE_S):
        while (series.stats.running, series.stats.waiting) != (running, waiting):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.005)


async def connect(
    client: httpx.AsyncClient, *, stream: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(request_bytes(stream=stream))
    await writer.drain()
    return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def half_close(writer: asyncio.StreamWriter) -> None:
    """Say that nothing more will be sent, which aborts the request as in vLLM."""
    writer.write_eof()


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("leave", [asyncio.StreamWriter.close, reset, half_close])
async def test_leaving_aborts_a_running_and_a_waiting_request(
    leave: Callable[[asyncio.StreamWriter], None], stream: bool
) -> None:
    async with over_http(batch_limit=1, time_scale=10.0) as (client, server):
        _, first = await connect(client, stream=stream)
        await until(server, running=1, waiting=0)
        _, second = await connect(client, stream=stream)
        await until(server, running=1, waiting=1)
        leave(second)
        await until(server, running=1, waiting=0)
        leave(first)
        await until(server, running=0, waiting=0)
        assert server.engine.series.stats.kv_blocks_used == 0
        assert server.engine.series.stats.aborted_total == 2
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get("/load")).json() != {"server_load": 0}:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.005)
        first.close()
        second.close()


async def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    async with over_http(time_scale=50.0) as (client, server):
        _, deaf = await connect(client, stream=True)
        await until(server, running=1, waiting=0)
        body = {"prompt": [1], "max_tokens": 200, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 200
        deaf.close()
        await until(server, running=0, waiting=0)
