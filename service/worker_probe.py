"""5 fleet: the three questions put to a worker over HTTP: is it alive, how is it, what is there.

One attempt each, bounded in time and in bytes; when to ask again is worker_watch.py's business.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import httpx
import orjson

from service.engine_metrics import CHEAP_SERIES, WANTED_SERIES, parse_engine_page

if TYPE_CHECKING:
    from service.engine_metrics import EnginePage
    from service.worker_config import WorkerConfig

PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
MODELS_MAX: Final = 1024
"""Models of one worker that are listed; adapters can be many."""

ModelCard = dict[str, object]
"""One entry of /v1/models as the worker wrote it."""


class ProbeFailedError(Exception):
    """The worker gave no usable answer.

    Attributes:
        refused: nobody listens there, so the worker is certainly down.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class WorkerProbe:
    """Asks one worker. The transport is shared and owned by the caller.

    No httpx client stands between: what it adds (cookies, redirects, authentication) has no place
    here, and costs as much as the question.
    """

    def __init__(self, worker: WorkerConfig, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self._headers = httpx.Headers({"accept": "*/*", "accept-encoding": "identity"})
        if worker.api_key is not None:
            self._headers["authorization"] = f"Bearer {worker.api_key}"
        self._health_url = httpx.URL(worker.url + "/health")
        self._models_url = httpx.URL(worker.url + "/v1/models")
        self._page_url = httpx.URL(worker.url + "/metrics")
        # With the slash the request reaches prometheus_client's own application, which filters.
        self._filtered_url, self._cheap_url = (
            httpx.URL(worker.url + "/metrics/", params=[("name[]", name) for name in names])
            for names in (WANTED_SERIES, CHEAP_SERIES)
        )
        self._filter_works = True

    @property
    def filter_works(self) -> bool:
        """Whether the cheap, filtered page is in use."""
        return self._filter_works

    def reset(self) -> None:
        """Forget what was learned about the server: another one may stand in its place."""
        self._filter_works = True

    async def health(self, timeout_s: float) -> None:
        """Return when the worker answers /health; any answer but a server error will do.

        Raises:
            ProbeFailedError: no answer, or a 5xx: vLLM's own word for a dead engine.
        """
        status, _ = await self._get(self._health_url, timeout_s)
        if status >= 500:
            raise ProbeFailedError(f"/health answered {status}")

    async def metrics(self, timeout_s: float, *, cheap: bool = False) -> EnginePage:
        """Scrape the engine's series, filtered when the server can do that.

        Args:
            timeout_s: for one page.
            cheap: leave histograms and cache counters out, where the server can filter.

        Raises:
            ProbeFailedError: no answer, an error status, or a page without any vLLM series.
        """
        if self._filter_works:
            url = self._cheap_url if cheap else self._filtered_url
            status, body = await self._get(url, timeout_s)
            page = parse_engine_page(body)
            if status == 200 and not page.total.is_empty:
                return page
        status, body = await self._get(self._page_url, timeout_s)
        page = parse_engine_page(body)
        if status != 200:
            raise ProbeFailedError(f"/metrics answered {status}")
        if page.total.is_empty:
            raise ProbeFailedError("/metrics has none of vLLM's series")
        self._filter_works = False
        return page

    async def models(self, timeout_s: float) -> tuple[ModelCard, ...]:
        """Ask which models are served.

        Raises:
            ProbeFailedError: no answer, an error status or not a model list.
        """
        status, body = await self._get(self._models_url, timeout_s)
        if status != 200:
            raise ProbeFailedError(f"/v1/models answered {status}")
        return _model_cards(body)

    async def _get(self, url: httpx.URL, timeout_s: float) -> tuple[int, bytes]:
        """One GET, whole, within the time and PAGE_BYTES_MAX."""
        limits = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)}
        request = httpx.Request("GET", url, headers=self._headers, extensions=limits)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                try:
                    return response.status_code, await _whole(response, url)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise ProbeFailedError(f"{url.path} took longer than {timeout_s} s") from error
        except (httpx.HTTPError, aiohttp.ClientError) as error:
            # The transport lets some of aiohttp's errors through, a malformed reply among them.
            reason = f"{url.path}: {type(error).__name__} {error}".rstrip()
            raise ProbeFailedError(reason, refused=is_refusal(error)) from error


async def _whole(response: httpx.Response, url: httpx.URL) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > PAGE_BYTES_MAX:
            raise ProbeFailedError(f"{url.path} is longer than {PAGE_BYTES_MAX} bytes")
    return bytes(body)


def is_refusal(error: Exception) -> bool:
    """Whether the connection could not be opened at all.

    httpx-aiohttp reports every lost connection, refused or broken later, as a ConnectTimeout, so
    the cause decides.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (httpx.ConnectError, aiohttp.ClientConnectorError)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def context_limits(cards: tuple[ModelCard, ...]) -> dict[str, int]:
    """Context lengths in tokens by model, of those that told it.

    An adapter's card has none in vLLM: it names its base model, whose limit it shares. One engine
    has one limit, so that a base model under another name than those listed tells nothing else.
    """
    told = {
        str(card["id"]): limit
        for card in cards
        if isinstance(limit := card.get("max_model_len"), int) and limit > 0
    }
    lengths = set(told.values())
    only = lengths.pop() if len(lengths) == 1 else None
    found: dict[str, int] = {}
    for card in cards:
        limit = told.get(str(card["id"]), told.get(str(card.get("parent")), only))
        if limit is not None:
            found[str(card["id"])] = limit
    return found


def _model_cards(body: bytes) -> tuple[ModelCard, ...]:
    """Entries of an OpenAI model list that have an id; others are left out."""
    try:
        listed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProbeFailedError("/v1/models is not JSON") from error
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        raise ProbeFailedError("/v1/models is not a model list")
    named = [
        entry
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"]
    ]
    return tuple(named[:MODELS_MAX])
