"""Talking to a mock worker, over real HTTP on loopback or straight to its application."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from service.mock.profiles import UNIT
from service.mock.serving import running_mock_workers
from service.mock.worker import MockServer
from service.mock.worker_config import MockWorkerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FAST = 20.0


def unit_config(**overrides: Any) -> MockWorkerConfig:
    """A worker whose iterations take 10 ms whatever they hold, run faster than real time."""
    return MockWorkerConfig(**{"profile": UNIT, "time_scale": FAST} | overrides)


@asynccontextmanager
async def in_process(**overrides: Any) -> AsyncIterator[tuple[httpx.AsyncClient, MockServer]]:
    """A client that calls the application itself; a response arrives when it is complete."""
    server = MockServer(unit_config(**overrides))
    engines = [asyncio.create_task(engine.run()) for engine in server.engines]
    await asyncio.sleep(0)
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://mock") as client:
        yield client, server
    for engine in engines:
        engine.cancel()
    await asyncio.wait(engines)


@asynccontextmanager
async def over_http(**overrides: Any) -> AsyncIterator[tuple[httpx.AsyncClient, MockServer]]:
    """A client of one mock worker behind a real server on loopback."""
    server = MockServer(unit_config(**overrides))
    async with (
        running_mock_workers([server]) as (url,),
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client, server


def events_of(body: bytes) -> list[Any]:
    """Messages of an event stream that ends with [DONE]."""
    *events, done, rest = body.split(b"\n\n")
    assert done == b"data: [DONE]"
    assert rest == b""
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]
