"""One client of a chaos run: sends one request over its own socket and judges what comes back.

Raw sockets, so that it can leave, stop reading, and tell a response that is complete from one that
was cut. What an answer means is in chaos_judge.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import httptools

from loadgen.chaos_judge import Answer, End, judge
from loadgen.chaos_requests import request_bytes
from loadgen.chaos_texts import wrong_text

if TYPE_CHECKING:
    from loadgen.chaos_patience import Patience
    from loadgen.chaos_plan import PlannedRequest

READ_BYTES: Final = 4096


async def send(
    host: str, port: int, request: PlannedRequest, name: str, patience: Patience
) -> tuple[End, str]:
    """Play one client; returns how it ended and, when that is wrong, why."""
    answer = Answer()
    leaving = request.leave_s is not None
    limit = asyncio.timeout(request.leave_s) if leaving else patience.limit()
    try:
        async with limit:
            await _converse(host, port, request_bytes(request, name), request.dawdle_s, answer)
    except TimeoutError:
        if leaving:
            return End.LEFT, ""
        return End.HUNG, (
            f"{request.kind}: no end within {patience.within_s:g} s; it waits for"
            f" {answer.stage}, status {answer.status}, {len(answer.body)} bytes"
        )
    except httptools.HttpParserError as error:
        return End.WRONG, f"{request.kind}: the response is no HTTP: {error}"
    except OSError as error:
        if not answer.status:
            return End.WRONG, f"{request.kind}: no response: {error}"
    end, why = judge(request.kind, answer, request.key)
    if end is End.COMPLETED and wrong_text(request, bytes(answer.body)):
        return End.WRONG, f"{request.kind}: another request's text: {bytes(answer.body[-200:])!r}"
    return end, why


async def _converse(host: str, port: int, data: bytes, dawdle_s: float, answer: Answer) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
    parser = httptools.HttpResponseParser(answer)
    try:
        answer.stage = "its request to be taken"
        writer.write(data)
        # A refusal may come before all of a large body was read; then reading tells why.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        answer.stage = "an answer"
        while part := await reader.read(READ_BYTES):
            parser.feed_data(part)
            answer.status = parser.get_status_code()
            answer.stage = "the end of the connection" if answer.complete else "more"
            if dawdle_s:
                await asyncio.sleep(dawdle_s)
                dawdle_s = 0.0
    finally:
        # Unsent bytes must not keep the socket of a client that left.
        writer.transport.abort()
