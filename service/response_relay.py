"""4 forwarder, one response on its way: bytes untouched, tokens counted, silences bounded."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import httpx

from service.call import Call, Place, Reply
from service.control.events import Outcome
from service.errors import BidgateError, ClientGoneError, WorkerBrokeError, WorkerLateError
from service.forward_config import ForwardConfig
from service.headers import EVENT_STREAM, first, is_compressed, media_type, to_client
from service.interrupt import Watchdog
from service.sse import Meter, OpaqueMeter, UsageReader, meter_of
from service.surface import Api
from service.worker_link import BROKEN

BUSY_STATUSES: Final = (429, 503)


class ResponseRelay:
    """One response on its way.

    Attributes:
        placement: what is told of first token, progress and end.
        at: the worker that is asked now.
        watchdog: of the silences; set before anything is awaited.
        worker_broke: whether the answer speaks of a broken engine.
    """

    watchdog: Watchdog
    worker_broke = False

    def __init__(self, call: Call, placement: Place, reply: Reply, config: ForwardConfig) -> None:
        self.placement = placement
        self.at = placement.worker_id
        self._api = call.api
        self._reply = reply
        self._config = config
        self._meter: Meter | None = None

    def turn_to(self, worker_id: str) -> None:
        """A worker is asked now, and must answer in time."""
        self.at = worker_id
        self.watchdog.expect(self._late, self._config.first_byte_timeout_s)

    async def pass_on(self, response: httpx.Response) -> None:
        """Pass a worker's response to the client, to its end.

        Raises:
            WorkerBrokeError: it broke off.
        """
        headers = to_client(response.headers.raw)
        plain = not is_compressed(headers)
        if response.status_code >= 400:
            self.placement.outcome = Outcome.FAILED
        self.worker_broke = is_broken(response.status_code)
        if media_type(headers) == EVENT_STREAM:
            if first(headers, b"x-accel-buffering") is None:
                headers.append((b"x-accel-buffering", b"no"))
            # Into compressed bytes no error event can be written, nor tokens counted in them.
            self._meter = meter_of(self._api) if plain else None
        await self._reply.start(response.status_code, headers)
        try:
            if self._meter is not None:
                await self._pass_events(response, self._meter)
            else:
                await self._pass_body(response, count=plain)
        except BROKEN as error:
            raise WorkerBrokeError(f"worker {self.at} broke off its response") from error
        self.watchdog.stop()
        await self._reply.end()

    async def break_off(self, error: BidgateError) -> None:
        """Tell the reader of a begun event stream that it is not complete."""
        if self._meter is None:
            return
        gap = b"\n\n" if self._meter.mid_event else b""
        body = error.body(anthropic=self._api is Api.MESSAGES)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.client_stall_timeout_s):
                await self._reply.write(gap + self._meter.error_event(body))
                await self._reply.end()

    async def _pass_events(self, response: httpx.Response, meter: Meter) -> None:
        placement, reply, config = self.placement, self._reply, self._config
        expect = self.watchdog.expect
        usage = UsageReader() if isinstance(meter, OpaqueMeter) else None
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for chunk in response.stream:
            expect(_unread, config.client_stall_timeout_s)
            seen = meter.tokens
            meter.feed(chunk)
            if meter.tokens != seen:
                if not seen:
                    placement.first_token()
                placement.progressed(meter.tokens, exact=meter.exact)
            if usage is not None:
                usage.feed(chunk)
            await reply.write(chunk)
            expect(self._late, config.stall_timeout_s)
        if isinstance(meter, OpaqueMeter) and usage is not None:
            self._note(usage)
            if usage.decode_tokens is None:
                placement.decode_tokens = meter.events
        if meter.failed:
            placement.outcome = Outcome.FAILED
            self.worker_broke = is_broken(meter.error_code)
        elif not meter.done:
            raise WorkerBrokeError(f"worker {placement.worker_id} ended its stream early")

    async def _pass_body(self, response: httpx.Response, *, count: bool) -> None:
        usage = UsageReader()
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for chunk in response.stream:
            self.watchdog.expect(_unread, self._config.client_stall_timeout_s)
            await self._reply.write(chunk)
            usage.feed(chunk)
            self.watchdog.expect(self._late, self._config.stall_timeout_s)
        if count:
            self._note(usage)

    def _note(self, usage: UsageReader) -> None:
        self.placement.decode_tokens = usage.decode_tokens
        # Anthropic's count has no prompt tokens that were cached, and is all of some answers.
        if self._api is not Api.MESSAGES:
            self.placement.told_prompt_tokens = usage.prompt_tokens

    def _late(self) -> WorkerLateError:
        return WorkerLateError(f"worker {self.at} sent nothing for too long")


def is_broken(status: int) -> bool:
    """Whether an answer speaks of a broken engine, not of a full one or of a wrong request."""
    return status >= 500 and status not in BUSY_STATUSES


def _unread() -> ClientGoneError:
    return ClientGoneError("the client stopped reading")
