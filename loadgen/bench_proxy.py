"""What a proxied request costs: the router's processor time, its lag, and times beside none at all.

Workers answer at once, so all that is measured is the way there and back. Each variant of the
router is started anew in every round, one after the other in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import yaml

from loadgen.cluster import bidgate_command, until_ready
from loadgen.cpu import used_s
from loadgen.plain_client import Seen, closed_loop, open_loop, posted, probe
from loadgen.plain_worker import EVENTS
from loadgen.processes import LOOPBACK, Child, free_ports, start, stopping

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from loadgen.summary import JsonValue

PROBE_S: Final = 0.02
SETTLE_S: Final = 1.5
"""After a router is ready: its other workers come up."""
WARM_S: Final = 0.5
CLOSED_CONNECTIONS: Final = 16
OPEN_CONNECTIONS: Final = 256
PROMPT: Final = "You are a helpful assistant that answers in one word. " * 40
KEY: Final = "bench"
DIRECT: Final = "straight to a worker"
DEFAULT: Final = "as shipped"
_LIMITS: Final = {"requests_max": 100_000, "requests_per_minute": 1e9, "tokens_per_minute": 1e12}
_NO_AFFINITY: Final = {"control": {"affinity": {"weight": 0.0}}}
_KEYS: Final = {"auth": {"keys": [{"key": KEY, "tenant": "t", **_LIMITS}]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySpec:
    """One measurement.

    Attributes:
        workers: of the streams; small requests go to a sixteenth of them.
        streams: at once on each worker.
        rate_per_s: of small requests, in the open loop.
        seconds: each part lasts.
        rounds: of the variants.
        log_dir: where output goes.
    """

    workers: int
    streams: int
    rate_per_s: float
    seconds: float
    rounds: int
    log_dir: Path

    def __post_init__(self) -> None:
        """Refuse measurements of nothing."""
        if min(self.workers, self.streams, self.rounds) < 1:
            raise ValueError("workers, streams and rounds must be at least 1")
        if not (self.rate_per_s > 0 and self.seconds > 0):
            raise ValueError("rate and seconds must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One load on one way.

    Attributes:
        load: what was asked. way: through which router, or none.
        answered, lost: requests. per_s: answered in a second.
        p50_ms, p99_ms: time of an answer.
        lag_p50_ms, lag_p99_ms: time of an answer to /health beside it.
        cpu_ms: processor time of the router for each request; None without one.
        cpu_share: of one processor.
    """

    load: str
    way: str
    answered: int
    lost: int
    per_s: float
    p50_ms: float | None
    p99_ms: float | None
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    cpu_ms: float | None
    cpu_share: float | None


def variants(collector: str) -> dict[str, dict[str, object]]:
    """Settings of the routers that are compared, by name."""
    tracing = {"tracing": {"enabled": True, "endpoint": collector}}
    return {
        DEFAULT: {},
        "without affinity": dict(_NO_AFFINITY),
        "with a key and its limits": dict(_KEYS),
        "with tracing": dict(tracing),
        "with a key, its limits and tracing": {**_KEYS, **tracing},
    }


async def measure(spec: ProxySpec, tell: Callable[[str], None]) -> list[Part]:
    """Run everything.

    Raises:
        ClusterError: a process does not start.
    """
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    ports = free_ports(spec.workers)
    urls = [f"http://{LOOPBACK}:{port}" for port in ports]
    command = [sys.executable, "-m", "loadgen.plain_worker", *map(str, ports)]
    parts: list[Part] = []
    with stopping([]) as children:
        children.append(start("workers", command, spec.log_dir / "workers.log"))
        await until_ready(children[0], f"{urls[0]}/health")
        few = urls[: max(1, spec.workers // 16)]
        for number in range(spec.rounds):
            for name, settings in variants(urls[0]).items():
                tell(f"round {number + 1}: {name}")
                async with router(spec, few, settings) as (url, child):
                    parts.append(await _small(spec, url, name, child))
        tell("at a steady rate")
        parts.append(await _steady(spec, urls[0], DIRECT, None))
        async with router(spec, few, {}) as (url, child):
            parts.append(await _steady(spec, url, DEFAULT, child))
        tell("streams")
        parts.append(await _streams(spec, urls[0], DIRECT, None))
        async with router(spec, urls, {}) as (url, child):
            parts.append(await _streams(spec, url, DEFAULT, child))
    return parts


@contextlib.asynccontextmanager
async def router(
    spec: ProxySpec, workers: list[str], settings: dict[str, object]
) -> AsyncIterator[tuple[str, Child]]:
    """A router in front of workers, in a process of its own."""
    (port,) = free_ports(1)
    common = {
        "server": {"host": LOOPBACK, "port": port, "log_level": "warning"},
        "fleet": {"max_num_seqs": 256},
        "workers": workers,
    }
    file = spec.log_dir / "bidgate.yaml"
    file.write_text(yaml.safe_dump({**common, **settings}), encoding="utf-8")
    url = f"http://{LOOPBACK}:{port}"
    with stopping([]) as children:
        command = [*bidgate_command(), "serve", "--config", str(file)]
        children.append(start("bidgate", command, spec.log_dir / "bidgate.log"))
        await until_ready(children[0], f"{url}/ready")
        await asyncio.sleep(SETTLE_S)
        yield url, children[0]


async def _small(spec: ProxySpec, url: str, way: str, child: Child | None) -> Part:
    request = _request(stream=False)
    await closed_loop(url, request, CLOSED_CONNECTIONS, WARM_S)

    async def load() -> Seen:
        return await closed_loop(url, request, CLOSED_CONNECTIONS, spec.seconds)

    return await _part(f"small, {CLOSED_CONNECTIONS} at a time", way, url, child, load)


async def _steady(spec: ProxySpec, url: str, way: str, child: Child | None) -> Part:
    request = _request(stream=False)
    await closed_loop(url, request, CLOSED_CONNECTIONS, WARM_S)

    async def load() -> Seen:
        return await open_loop(url, request, OPEN_CONNECTIONS, spec.rate_per_s, spec.seconds)

    return await _part(f"small, {spec.rate_per_s:g} a second", way, url, child, load)


async def _streams(spec: ProxySpec, url: str, way: str, child: Child | None) -> Part:
    count = spec.workers * spec.streams

    async def load() -> Seen:
        return await closed_loop(url, _request(stream=True), count, spec.seconds)

    return await _part(f"{count} streams of {EVENTS} events", way, url, child, load)


def _request(*, stream: bool) -> bytes:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": EVENTS, "stream": stream}
    return posted(body, {"authorization": f"Bearer {KEY}"})


async def _part(
    load: str, way: str, url: str, child: Child | None, run: Callable[[], Awaitable[Seen]]
) -> Part:
    """Run a load, with a probe beside it."""
    loop, lag = asyncio.get_running_loop(), Seen()
    probing = asyncio.create_task(probe(url, PROBE_S, lag))
    began_s = loop.time()
    cpu_s = 0.0 if child is None else used_s(child.process.pid)
    seen = await run()
    elapsed_s = loop.time() - began_s
    cpu_s = 0.0 if child is None else used_s(child.process.pid) - cpu_s
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    answered = len(seen.latencies_s)
    return Part(
        load=load,
        way=way,
        answered=answered,
        lost=seen.lost,
        per_s=answered / elapsed_s,
        p50_ms=_quantile_ms(seen, 50),
        p99_ms=_quantile_ms(seen, 99),
        lag_p50_ms=_quantile_ms(lag, 50),
        lag_p99_ms=_quantile_ms(lag, 99),
        cpu_ms=1e3 * cpu_s / answered if child is not None and answered else None,
        cpu_share=None if child is None else cpu_s / elapsed_s,
    )


def _quantile_ms(seen: Seen, percent: float) -> float | None:
    return 1e3 * float(np.percentile(seen.latencies_s, percent)) if seen.latencies_s else None


def as_json(parts: list[Part]) -> list[JsonValue]:
    """The parts, for summary.json."""
    return [asdict(part) for part in parts]
