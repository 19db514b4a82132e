"""A worker's HTTP side as a script: what it answers to the fleet, how late, and whether at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import httpx
import orjson

from service.engine_metrics import CHEAP_SERIES, WANTED_SERIES


def page(
    *,
    running: int = 0,
    waiting: int = 0,
    kv_use: float = 0.0,
    gaps: int = 0,
    gap_s: float = 0.01,
    engine: str = "0",
    started_s: float = 1000.0,
) -> bytes:
    """A page of one engine in the new naming: `gaps` output tokens, gap_s apart."""
    labels = f'{{engine="{engine}",model_name="m"}}'
    return (
        f"vllm:num_requests_running{labels} {running}\n"
        f"vllm:num_requests_waiting{labels} {waiting}\n"
        f"vllm:kv_cache_usage_perc{labels} {kv_use}\n"
        f'vllm:cache_config_info{{engine="{engine}",block_size="16",num_gpu_blocks="1001"}} 1\n'
        f"vllm:inter_token_latency_seconds_sum{labels} {gaps * gap_s}\n"
        f"vllm:inter_token_latency_seconds_count{labels} {gaps}\n"
        f"vllm:num_preemptions_total{labels} 0\n"
        f"vllm:generation_tokens_total{labels} {gaps}\n"
        f"process_start_time_seconds {started_s}\n"
    ).encode()


@dataclass
class ScriptedServer:
    """One worker. Change its attributes while the fleet watches it."""

    listening: bool = True
    health_status: int = 200
    metrics: bytes = field(default_factory=page)
    metrics_status: int = 200
    metrics_delay_s: float = 0.0
    metrics_error: Exception | None = None
    filters: bool = True
    models: tuple[dict[str, object], ...] = ({"id": "m", "object": "model", "max_model_len": 100},)
    models_status: int = 200
    api_key: str | None = None
    hits: Counter[str] = field(default_factory=Counter)
    unauthorized: int = 0
    authorizations: set[str | None] = field(default_factory=set)
    open_scrapes: int = 0
    open_scrapes_max: int = 0
    cheap_scrapes: int = 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        """Play the script."""
        path = request.url.path
        self.hits[path] += 1
        self.authorizations.add(request.headers.get("authorization"))
        if not self.listening:
            raise httpx.ConnectError("connection refused", request=request)
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            self.unauthorized += 1
            return httpx.Response(401, json={"error": "Unauthorized"})
        if path == "/health":
            return httpx.Response(self.health_status)
        if path == "/v1/models":
            body = orjson.dumps({"object": "list", "data": self.models})
            return httpx.Response(self.models_status, content=body)
        return await self._scrape(request)

    async def _scrape(self, request: httpx.Request) -> httpx.Response:
        self.open_scrapes += 1
        self.open_scrapes_max = max(self.open_scrapes_max, self.open_scrapes)
        try:
            await asyncio.sleep(self.metrics_delay_s)
        finally:
            self.open_scrapes -= 1
        if self.metrics_error is not None:
            raise self.metrics_error
        body = self.metrics
        if request.url.path == "/metrics/":
            wanted = tuple(request.url.params.get_list("name[]"))
            assert wanted in (WANTED_SERIES, CHEAP_SERIES)
            self.cheap_scrapes += wanted == CHEAP_SERIES
            body = _only(wanted, body) if self.filters else b""
        return httpx.Response(self.metrics_status, content=body)


def _only(names: tuple[str, ...], body: bytes) -> bytes:
    """The lines of some series, as prometheus_client's application picks them."""
    wanted = {name.encode() for name in names}
    lines = body.split(b"\n")
    return b"\n".join(
        line for line in lines if line.partition(b"{")[0].partition(b" ")[0] in wanted
    )


def transport_of(servers: dict[str, ScriptedServer]) -> httpx.AsyncBaseTransport:
    """A transport for which every host name is one of the servers."""

    async def answer(request: httpx.Request) -> httpx.Response:
        return await servers[request.url.host].answer(request)

    return httpx.MockTransport(answer)
