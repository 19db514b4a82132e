"""The open-loop client: sends a workload at its own times, whatever the server does.

A slow server never slows the arrivals: each request is its own task, connections are unbounded,
nothing waits for anything. The client measures how late its own sends were, so that a client that
was itself too slow is seen. Every request that was sent ends in exactly one outcome record, and a
deadline ends the whole run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import httpx
import httpx_aiohttp
import orjson

from loadgen.completion_stream import CompletionStream, Verdict, verdict_of_status
from loadgen.outcomes import End, OutcomeRecord
from loadgen.prompts import FIRST_TOKEN_ID, VOCABULARY_TOKENS, PromptForm, make_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.trace_record import TraceRequest

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 2.0
"""Idle connections go before a worker or router closes them (vLLM and uvicorn: 5 s)."""
LEAD_S = 0.05
ERROR_BODY_BYTES_MAX = 4096

HINT_HEADER = "x-bidgate-decode-tokens"
TENANT_HEADER = "x-bidgate-tenant"
VALUE_HEADER = "x-bidgate-value"
TTFT_HEADER = "x-bidgate-ttft-ms"
WORKER_HEADER = "x-bidgate-worker"
QUEUE_HEADER = "x-bidgate-queue-ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Where and how to send.

    Attributes:
        url: base URL of a router or worker, without /v1.
        model: model to ask for; "" takes the first one that the server lists.
        policy: name written into the records.
        prompt_form: token ids or text.
        block_tokens: tokens of a prompt that one block id of the trace stands for.
        max_tokens_cap: max_tokens of every request, so that it does not give the length away; the
            length then travels in mock_decode_tokens, which only mock workers read. None sends the
            length itself as max_tokens, as real engines need.
        drain_s: how long after the last arrival answers are waited for.
        api_key: sent as a bearer token, or None.
        spread: base URLs that the client itself sends to in turn, in place of url, like a load
            balancer; () for none.
        vocabulary_tokens: of the model; token ids of prompts stay below it.
        prompt_salt: added to the index from which a prompt is made, so that two runs against the
            same engines share no prompt in their prefix caches.
    """

    url: str
    model: str = ""
    policy: str = "router"
    prompt_form: PromptForm = PromptForm.TOKEN_IDS
    block_tokens: int = 512
    max_tokens_cap: int | None = None
    drain_s: float = 60.0
    api_key: str | None = field(default=None, repr=False)
    spread: tuple[str, ...] = ()
    vocabulary_tokens: int = VOCABULARY_TOKENS
    prompt_salt: int = 0

    def __post_init__(self) -> None:
        """Refuse a vocabulary without room for prompts."""
        if self.vocabulary_tokens <= FIRST_TOKEN_ID:
            raise ValueError(f"vocabulary_tokens must be above {FIRST_TOKEN_ID}")

    def target(self, index: int) -> str:
        """Where a request goes: the path at url, or the whole address in turn."""
        base = self.spread[index % len(self.spread)] if self.spread else ""
        return f"{base}/v1/completions"


@dataclass(slots=True)
class _Exchange:
    """What is known of one request while it is under way."""

    index: int
    request: TraceRequest
    sent_s: float
    stream: CompletionStream = field(default_factory=CompletionStream)
    status: int | None = None
    worker: str = ""
    queue_s: float | None = None
    verdict: Verdict = Verdict(End.CANCELLED, "interrupted")  # noqa: RUF009  (a frozen value)


class Replay:
    """One run of a workload against one server.

    Attributes:
        records: one per request that was sent and has ended.
        sent: requests sent so far.
    """

    def __init__(self, requests: Sequence[TraceRequest], settings: ReplaySettings) -> None:
        self.records: list[OutcomeRecord] = []
        self.sent = 0
        self._requests = requests
        self._settings = settings
        self._model = settings.model
        self._start_s = 0.0

    async def run(self) -> list[OutcomeRecord]:
        """Send everything, wait for the ends or the deadline, return the records in send order.

        Raises:
            httpx.HTTPError: when the server cannot be reached before the first send.
        """
        async with open_client(self._settings) as client:
            self._model = self._settings.model or await first_model(client)
            loop = asyncio.get_running_loop()
            self._start_s = loop.time() + LEAD_S
            last_s = self._requests[-1].arrival_s if self._requests else 0.0
            deadline_s = self._start_s + last_s + self._settings.drain_s
            async with asyncio.TaskGroup() as tasks:
                for index, request in enumerate(self._requests):
                    content = self._content(index, request)
                    await asyncio.sleep(self._start_s + request.arrival_s - loop.time())
                    exchange = _Exchange(index, request, loop.time() - self._start_s)
                    self.sent += 1
                    tasks.create_task(self._follow(client, exchange, content, deadline_s))
        self.records.sort(key=lambda record: record.index)
        return self.records

    def _content(self, index: int, request: TraceRequest) -> bytes:
        settings = self._settings
        cap = settings.max_tokens_cap
        body = {
            "model": self._model,
            "prompt": make_prompt(
                request,
                settings.prompt_salt + index,
                settings.prompt_form,
                settings.block_tokens,
                settings.vocabulary_tokens,
            ),
            "max_tokens": request.decode_tokens if cap is None else max(cap, request.decode_tokens),
            "ignore_eos": True,
            "mock_decode_tokens": request.decode_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return orjson.dumps(body)

    async def _follow(
        self, client: httpx.AsyncClient, exchange: _Exchange, content: bytes, deadline_s: float
    ) -> None:
        """See one request to its end; whatever happens, exactly one record is written."""
        try:
            async with asyncio.timeout_at(deadline_s):
                exchange.verdict = await self._exchange(client, exchange, content)
        except TimeoutError:
            exchange.verdict = Verdict(End.CANCELLED, "the run's deadline")
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            exchange.verdict = Verdict(End.FAILED, f"{type(error).__name__}: {error}")
        finally:
            self.records.append(self._record(exchange))

    async def _exchange(
        self, client: httpx.AsyncClient, exchange: _Exchange, content: bytes
    ) -> Verdict:
        now_s = asyncio.get_running_loop().time
        async with client.stream(
            "POST",
            self._settings.target(exchange.index),
            content=content,
            headers=request_headers(exchange.request),
        ) as response:
            exchange.status = response.status_code
            exchange.worker = response.headers.get(WORKER_HEADER, "")
            exchange.queue_s = _queue_s(response.headers.get(QUEUE_HEADER))
            if response.status_code != httpx.codes.OK:
                body = await response.aread()
                return verdict_of_status(response.status_code, body[:ERROR_BODY_BYTES_MAX])
            async for chunk in response.aiter_raw():
                exchange.stream.feed(chunk, now_s() - self._start_s)
        return exchange.stream.verdict()

    def _record(self, exchange: _Exchange) -> OutcomeRecord:
        request, stream, sent_s = exchange.request, exchange.stream, exchange.sent_s
        first_s = stream.first_token_s
        now_s = asyncio.get_running_loop().time() - self._start_s
        return OutcomeRecord(
            policy=self._settings.policy,
            index=exchange.index,
            arrival_s=request.arrival_s,
            sent_s=sent_s,
            prompt_tokens=request.prompt_tokens,
            decode_tokens=request.decode_tokens,
            decode_tokens_hint=request.decode_tokens_hint,
            outcome=exchange.verdict.end,
            status=exchange.status,
            ttft_s=None if first_s is None else first_s - sent_s,
            e2e_s=now_s - sent_s,
            output_tokens=stream.output_tokens,
            output_events=stream.events,
            worker=exchange.worker,
            queue_s=exchange.queue_s,
            ttft_bound_s=request.ttft_bound_s,
            tenant=request.tenant,
            group=request.group,
            detail=exchange.verdict.detail,
        )


def request_headers(request: TraceRequest) -> dict[str, str]:
    """Say in headers what a trace knows of a request beside its prompt."""
    headers = {"content-type": "application/json"}
    if request.decode_tokens_hint is not None:
        headers[HINT_HEADER] = str(request.decode_tokens_hint)
    if request.tenant:
        headers[TENANT_HEADER] = request.tenant
    if request.value != 1.0:
        headers[VALUE_HEADER] = f"{request.value:g}"
    if request.ttft_bound_s is not None:
        headers[TTFT_HEADER] = f"{request.ttft_bound_s * 1e3:g}"
    return headers


def open_client(settings: ReplaySettings) -> httpx.AsyncClient:
    """Make a client without bounds on connections or reading time; call inside a running loop."""
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    session = aiohttp.ClientSession(
        # The transport's own session would stop at 100 connections: limit=0 means no limit.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )
    return httpx.AsyncClient(
        base_url=settings.url,
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        transport=httpx_aiohttp.AiohttpTransport(client=session),
        trust_env=False,
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """Ask the server which model it serves.

    Raises:
        ValueError: when it lists none.
        httpx.RequestError: it cannot be reached, or refuses.
    """
    url = str(client.base_url).rstrip("/")
    try:
        response = await client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
    except httpx.TransportError as error:
        raise httpx.RequestError(
            f"{url} does not answer ({error}); does a server run there?"
        ) from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise httpx.RequestError(f"{url} wants a key: give one with --api-key")
    if response.is_error:
        raise httpx.RequestError(
            f"{url}/v1/models answers {response.status_code}: {response.text[:200]}"
        )
    models = response.json().get("data", [])
    if not models:
        raise ValueError(f"{client.base_url} serves no model")
    return str(models[0]["id"])


def _queue_s(text: str | None) -> float | None:
    try:
        return None if text is None else float(text) / 1e3
    except ValueError:
        return None
