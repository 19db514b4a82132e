"""Sending what an engine generates, as a stream or when it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.mock.bodies import ApiError
from service.mock.exchange import EVENTS

if TYPE_CHECKING:
    from service.mock.engine import Generation, MockEngine
    from service.mock.exchange import Exchange
    from service.mock.kv_transfer import Params
    from service.mock.named_replies import AnyReply


async def abort_when_client_leaves(
    engine: MockEngine, generation: Generation, exchange: Exchange
) -> None:
    """Drop what is left of a request when its client has closed its connection."""
    await exchange.client_leaves()
    engine.abort(generation)


async def stream(generation: Generation, reply: AnyReply, exchange: Exchange) -> None:
    """Send events as tokens come: one write for all that came since the last."""
    await exchange.start(200, EVENTS)
    while True:
        await generation.news.wait()
        generation.news.clear()
        events = reply.news()
        if generation.ended:
            break
        await exchange.write(events)
    if generation.failed:
        await exchange.end(events + reply.failure(engine_died()))
    elif generation.complete:
        await exchange.end(events + reply.closing())


async def send_whole(
    generation: Generation, reply: AnyReply, exchange: Exchange, params: Params | None
) -> None:
    """Wait for the end, then send everything."""
    while not generation.ended:
        await generation.news.wait()
        generation.news.clear()
    if generation.failed:
        await exchange.refuse(engine_died())
    elif generation.complete:
        await exchange.answer(200, reply.whole(params))


def engine_died() -> ApiError:
    """Return the error of every request that an engine held when it died."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return ApiError(500, message, kind="InternalServerError")
