"""What the tests ask of a real engine or of bidgate in front of it: bodies, streams, counters."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from service.engine_metrics import WANTED_SERIES, EngineSample, parse_engine_page

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

POLL_S = 0.02
# On a busy machine a long request may be passed over for minutes before it starts.
ANSWER_MAX_S = 300.0


def client(url: str) -> httpx.AsyncClient:
    """A client of one server; generous limits, so that nothing waits on our side."""
    return httpx.AsyncClient(
        base_url=url,
        trust_env=False,
        timeout=httpx.Timeout(ANSWER_MAX_S, connect=5.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


def prompt_of(tokens: int, salt: int = 0) -> list[int]:
    """A prompt of exactly this many token ids that shares no prefix with another salt's."""
    return [3 + (salt * 7919 + 31 * position * (salt + 1)) % 1900 for position in range(tokens)]


def completion(
    model: str, *, prompt_tokens: int, decode_tokens: int, salt: int = 0, **extra: object
) -> dict[str, object]:
    """A /v1/completions body whose lengths are exact and whose answer is deterministic."""
    return {
        "model": model,
        "prompt": prompt_of(prompt_tokens, salt),
        "max_tokens": decode_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **extra,
    }


@dataclass(slots=True)
class Stream:
    """One streamed answer as a client saw it.

    Attributes:
        status: HTTP status.
        events: parsed `data:` payloads, in order, without [DONE].
        arrived_s: time.monotonic() of each event that carries a choice.
        ended_by_done: whether `data: [DONE]` was the last event.
    """

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    ended_by_done: bool = False

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event, if the stream carried one."""
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def decode_tokens(self) -> int:
        """Output tokens by the engine's own count, which `include_usage` asks for; else 0."""
        usages = [event["usage"] for event in self.events if event.get("usage")]
        return int(usages[-1]["completion_tokens"]) if usages else 0

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return "".join(event["choices"][0]["text"] for event in self.events if event.get("choices"))

    def add(self, line: str) -> None:
        """Read one line of the event stream."""
        if not line.startswith("data:"):
            return
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            self.ended_by_done = True
            return
        event = json.loads(payload)
        self.events.append(event)
        if event.get("choices"):
            self.arrived_s.append(time.monotonic())


async def stream(
    http: httpx.AsyncClient, body: dict[str, object], path: str = "/v1/completions"
) -> Stream:
    """Send a streaming request and read it to its end."""
    seen = Stream()
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", path, json=body | asked) as response:
        seen.status = response.status_code
        async for line in response.aiter_lines():
            seen.add(line)
    return seen


async def lines_of(
    http: httpx.AsyncClient, body: dict[str, object], path: str = "/v1/completions"
) -> AsyncGenerator[str, None]:
    """The data lines of a streaming request, for clients that leave early."""
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                yield line


async def sample(http: httpx.AsyncClient) -> EngineSample:
    """What the engine says of itself now, by the cheap filtered page."""
    page = await http.get("/metrics/", params=[("name[]", name) for name in WANTED_SERIES])
    return parse_engine_page(page.content).total


async def eventually(
    told: Callable[[], Awaitable[bool]], within_s: float, poll_s: float = POLL_S
) -> float | None:
    """Seconds until the condition held; None when it did not hold in time."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < within_s:
        if await told():
            return time.monotonic() - began_s
        await asyncio.sleep(poll_s)
    return None


async def settle(http: httpx.AsyncClient, within_s: float = 20.0) -> EngineSample:
    """Wait until the engine holds no request; the last sample."""

    async def idle() -> bool:
        now = await sample(http)
        return now.running == 0 and now.waiting == 0

    if await eventually(idle, within_s) is None:
        raise AssertionError(f"the engine is still busy after {within_s} s: {await sample(http)}")
    return await sample(http)
