"""4 forwarder: relay one started request to its worker, bytes untouched, and report what passes.

Tells the placement of first token, progress and end. The only place that retries: before the
first byte, and only when the worker cannot have taken the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Final

import httpx

from service.call import Call, Place, Reply
from service.errors import (
    DeadlineExceededError,
    HandoffMissingError,
    UpstreamError,
    WorkerBrokeError,
    WorkerUnreachableError,
)
from service.forward_config import ForwardConfig
from service.headers import CREDENTIALS, DATA_PARALLEL_RANK
from service.interrupt import Interrupt, Watchdog
from service.placement import Placement
from service.prefill_leg import Params, PrefillLeg, with_params
from service.response_relay import BUSY_STATUSES, ResponseRelay, is_broken
from service.retry_budget import RetryBudget
from service.worker_config import WorkerConfig
from service.worker_link import BROKEN

WHOLE_BYTES_MAX: Final = 1 << 20
PART_BYTES: Final = 1 << 18
"""Longer bodies are written in parts of this size: one write would hold up the event loop."""
URLS_MAX: Final = 4096
"""Parsed URLs that are kept; clients choose paths."""


class Forwarder:
    """Relays requests to workers.

    Attributes:
        retries: how often another worker was tried, by reason (connect, busy, prefill), or was not
            tried because retries are too many already (over_budget).
        handoffs: how first legs ended: done, failed, or missing (answered without parameters).
    """

    def __init__(
        self,
        *,
        worker: Callable[[str], WorkerConfig],
        transports: Mapping[str, httpx.AsyncBaseTransport],
        config: ForwardConfig,
        suspect: Callable[[str], None],
    ) -> None:
        self.retries: Counter[str] = Counter(
            {"connect": 0, "busy": 0, "prefill": 0, "over_budget": 0}
        )
        self.handoffs: Counter[str] = Counter({"done": 0, "failed": 0, "missing": 0})
        self._budget = RetryBudget(share=config.retry_share, burst=config.retry_burst)
        self._worker = worker
        self._transports = transports
        self._config = config
        self._suspect = suspect
        self._first_leg = PrefillLeg(self._send)
        self._failures_in_a_row: Counter[str] = Counter()
        self._urls: dict[str, httpx.URL] = {}
        self.reconfigure(config)

    def reconfigure(self, config: ForwardConfig) -> None:
        """Take other bounds, from the next request on."""
        self._config = config
        self._budget.configure(share=config.retry_share, burst=config.retry_burst)
        timeout_s = httpx.Timeout(None, connect=config.connect_timeout_s)
        self._extensions = {"timeout": timeout_s.as_dict()}

    def forget(self, worker: WorkerConfig) -> None:
        """Drop what is remembered about a worker that left."""
        self._failures_in_a_row.pop(worker.worker_id, None)
        for text in [text for text in self._urls if text.startswith(f"{worker.url}/")]:
            del self._urls[text]

    async def relay(self, call: Call, placement: Place, reply: Reply) -> None:
        """Send a placed request to its worker and the response to the client.

        An event stream that dies ends with an error event and without `[DONE]`.

        Raises:
            UpstreamError: the worker failed; if the response had begun it was finished or cut.
            DeadlineExceededError: the call's deadline passed; likewise.
            ClientGoneError: the client stopped reading.
            RefusedError: after a worker did not take it, no other could.
        """
        relay = ResponseRelay(call, placement, reply, self._config)
        try:
            with Interrupt() as interrupt, _deadline(interrupt, call.deadline_s):
                relay.watchdog = Watchdog(interrupt)
                try:
                    response = await self._open(call, relay)
                    try:
                        await relay.pass_on(response)
                    finally:
                        await response.aclose()
                finally:
                    relay.watchdog.stop()
        except (UpstreamError, DeadlineExceededError) as error:
            if isinstance(error, UpstreamError):
                self._judge(relay.at, broke=True)
            await relay.break_off(error)
            raise
        self._judge(relay.at, broke=relay.worker_broke)

    def _judge(self, worker_id: str, *, broke: bool) -> None:
        """Suspect a worker whose answers break one after the other; before its place is free."""
        if not broke:
            self._failures_in_a_row.pop(worker_id, None)
            return
        self._failures_in_a_row[worker_id] += 1
        if self._failures_in_a_row[worker_id] >= self._config.failures_to_suspect:
            self._suspect(worker_id)

    async def _open(self, call: Call, relay: ResponseRelay) -> httpx.Response:
        placement = relay.placement
        self._budget.earn()
        for attempt in itertools.count():
            last = attempt >= self._config.retries_max
            response = await self._attempt(call, relay, last=last)
            if response is not None:
                return response
            relay.watchdog.stop()
            if isinstance(placement, Placement):
                await placement.returned(relay.at)
            else:
                await placement.returned()
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(
        self, call: Call, relay: ResponseRelay, *, last: bool
    ) -> httpx.Response | None:
        """Send a placed request, in two legs where it has them; None when another may be tried."""
        placement = relay.placement
        try:
            legs = await self._legs(call, relay, last=last)
            if not isinstance(legs, Call):
                return legs
            relay.turn_to(placement.worker_id)
            response = await self._send(legs, placement.worker_id)
        except WorkerUnreachableError:
            self._suspect(relay.at)
            if last:
                raise
            self.retries["connect"] += 1
            return None
        except WorkerBrokeError:
            # Of the first leg the client has seen nothing; the second may have begun.
            if last or relay.at == placement.worker_id:
                raise
            self._judge(relay.at, broke=True)
            self.retries["prefill"] += 1
            return None
        once = not isinstance(call.body, bytes)
        may_retry = response.status_code in BUSY_STATUSES and not (last or once)
        if not may_retry or not self._in_budget():
            return response
        await self._give_up(response, "busy")
        return None

    async def _legs(
        self, call: Call, relay: ResponseRelay, *, last: bool
    ) -> Call | httpx.Response | None:
        """Run first legs until none is due; the call of the second, or why there is none."""
        placement = relay.placement
        if not isinstance(placement, Placement):
            return call
        params: Params | None = None
        while placement.prefill_due:
            answer = await self._prefill(call, relay, placement)
            if isinstance(answer, httpx.Response):
                if last or not _may_try_another(answer.status_code):
                    return answer
                await self._give_up(answer, "prefill")
                return None
            params = answer
            # Until the decode worker is asked nobody owes an answer: a hold may take its time.
            relay.watchdog.stop()
            await placement.prefilled()
        if params is None or not placement.prefill_id:
            return call
        return with_params(call, params)

    async def _give_up(self, response: httpx.Response, reason: str) -> None:
        await response.aclose()
        self.retries[reason] += 1

    async def _prefill(
        self, call: Call, relay: ResponseRelay, placement: Placement
    ) -> Params | httpx.Response:
        """Run the first leg, and book how it ended."""
        relay.turn_to(placement.prefill_id)
        try:
            answer = await self._first_leg.run(call, placement)
        except UpstreamError as error:
            missing = isinstance(error, HandoffMissingError)
            self.handoffs["missing" if missing else "failed"] += 1
            placement.prefill_failed(kept=isinstance(error, WorkerBrokeError))
            raise
        if isinstance(answer, httpx.Response):
            self.handoffs["failed"] += 1
            placement.prefill_failed(kept=False)
            self._judge(relay.at, broke=is_broken(answer.status_code))
        else:
            self.handoffs["done"] += 1
            self._judge(relay.at, broke=False)
        return answer

    def _in_budget(self) -> bool:
        """Whether a busy worker's request may be offered to another; counted when not.

        Refused connections are no load on any worker, and each takes its worker out of use, so
        they need no budget.
        """
        allowed = self._budget.spend()
        self.retries["over_budget"] += not allowed
        return allowed

    def _url(self, base: str, path: str) -> httpx.URL:
        """Parse a URL once; with a query, and beyond URLS_MAX paths, every time."""
        text = base + path
        url = self._urls.get(text)
        if url is None:
            url = httpx.URL(text)
            if "?" not in path and len(self._urls) < URLS_MAX:
                self._urls[text] = url
        return url

    async def _send(self, call: Call, worker_id: str) -> httpx.Response:
        worker = self._worker(worker_id)
        headers = call.headers
        if worker.api_key is not None:
            headers = [pair for pair in headers if pair[0] not in CREDENTIALS]
            headers.append((b"authorization", b"Bearer " + worker.api_key.encode()))
        if worker.data_parallel_rank is not None:
            rank = str(worker.data_parallel_rank).encode()
            headers = [*headers, (DATA_PARALLEL_RANK, rank)]
        content = call.body
        if isinstance(content, bytes) and len(content) > WHOLE_BYTES_MAX:
            headers = [*headers, (b"content-length", str(len(content)).encode())]
            content = _in_parts(content)
        headers = call.trace.sent(headers, worker_id, call.leg)
        request = httpx.Request(
            call.method,
            self._url(worker.url, call.path),
            headers=headers,
            content=content,
            extensions=self._extensions,
        )
        try:
            response = await self._transports[worker_id].handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            call.trace.unanswered(error)
            raise WorkerUnreachableError(f"worker {worker_id} cannot be reached") from error
        except BROKEN as error:
            call.trace.unanswered(error)
            raise WorkerBrokeError(f"worker {worker_id} dropped the request") from error
        call.trace.answered(response.status_code)
        return response


async def _in_parts(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PART_BYTES):
        yield body[start : start + PART_BYTES]


@contextlib.contextmanager
def _deadline(interrupt: Interrupt, at_s: float | None) -> Iterator[None]:
    """End the block at a time of the loop's clock."""
    if at_s is None:
        yield
        return
    error = DeadlineExceededError("the request's deadline has passed")
    timer = asyncio.get_running_loop().call_at(at_s, interrupt.trip, error)
    try:
        yield
    finally:
        timer.cancel()


def _may_try_another(status: int) -> bool:
    """Whether an error of a prefill worker may be its own; else the request is wrong anywhere."""
    return status >= 500 or status in BUSY_STATUSES
