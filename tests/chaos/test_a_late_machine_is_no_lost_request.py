"""A client of a chaos run that waits too long fails the run; one whose own process was late not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from loadgen.chaos_client import send
from loadgen.chaos_judge import End
from loadgen.chaos_patience import TICK_S, Patience
from loadgen.chaos_plan import Kind, PlannedRequest

WITHIN_S = 0.3
REQUEST = PlannedRequest(0.0, 1, Kind.EMBEDDING, 3, None, 0.0)
BODY = b'{"choices":[]}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(BODY), BODY)


@contextlib.asynccontextmanager
async def answering(answer: bytes, *, closes: bool) -> AsyncIterator[tuple[str, int]]:
    """A server that sends the same to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            if not closes:
                await reader.read()
                await reader.read()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


async def played(answer: bytes, *, closes: bool, late_s: float = 0.0) -> tuple[End, str]:
    """One client's end; its loop stands still for a while as soon as it has asked."""
    patience = Patience(WITHIN_S)
    counting = asyncio.create_task(patience.run())
    async with answering(answer, closes=closes) as (host, port):
        client = asyncio.create_task(send(host, port, REQUEST, "chaos-1", patience))
        await asyncio.sleep(0)
        time.sleep(late_s)  # noqa: ASYNC251 - the machine gives this process no time
        end = await client
        await asyncio.sleep(2 * TICK_S)
    counting.cancel()
    assert patience.late_s >= late_s - TICK_S
    return end


async def test_who_gets_nothing_hangs_and_says_what_it_waited_for() -> None:
    end, why = await played(b"", closes=False)
    assert end is End.HUNG
    assert "waits for an answer" in why


async def test_who_gets_half_an_answer_hangs() -> None:
    end, why = await played(ANSWER[:-4], closes=False)
    assert end is End.HUNG
    assert "waits for more, status 200, 10 bytes" in why


async def test_a_connection_that_is_not_closed_after_its_answer_hangs() -> None:
    end, why = await played(ANSWER, closes=False)
    assert end is End.HUNG
    assert "the end of the connection" in why


async def test_an_answer_that_only_this_process_was_too_late_for_is_an_answer() -> None:
    end, why = await played(ANSWER, closes=True, late_s=3 * WITHIN_S)
    assert (end, why) == (End.COMPLETED, "")
