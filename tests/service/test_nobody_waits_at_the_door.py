"""Connections are let in as they come, however long a turn of the event loop takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from service.acceptor import Acceptor
from service.listener import listen
from tests.service.live import Live, mock, serving_mocks, until

CLIENTS = 150
TURNS_MAX = 50
"""Of the loop, for a crowd that came at once; uvloop alone needs a turn for each of them."""
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


def on_uvloop(scenario: Callable[[Live], Awaitable[None]]) -> None:
    """Play a scenario on the event loop that bidgate runs on."""

    async def play() -> None:
        async with serving_mocks([mock()]) as live:
            await scenario(live)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play())


@contextlib.contextmanager
def crowd(url: str) -> Iterator[list[socket.socket]]:
    """Clients that have asked already, each on a connection of its own."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.sendall(HEALTH)
            clients.append(client)
        yield clients


def answered(client: socket.socket) -> bool:
    try:
        head = client.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    assert head.startswith(b"HTTP/1.1 200")
    return True


def test_a_crowd_is_let_in_within_a_few_turns_of_the_loop() -> None:
    async def scenario(live: Live) -> None:
        with crowd(live.url) as clients:
            turns = 0
            while not all(map(answered, clients)):
                turns += 1
                assert turns <= TURNS_MAX, f"{sum(map(answered, clients))} of {CLIENTS} answered"
                await asyncio.sleep(0)

    on_uvloop(scenario)


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_answers_are_not_held_back_for_fuller_packets(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    seen: list[int] = []

    class Look(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            peer = transport.get_extra_info("socket")
            seen.append(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def play() -> None:
        with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
            acceptor = Acceptor(listener, Look, lambda: None)
            stack.enter_context(socket.create_connection(listener.getsockname()))
            await until(lambda: bool(seen), within_s=20.0)
            acceptor.close()
            await acceptor.wait_closed()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(play())
    assert seen == [1]


async def test_who_comes_while_no_file_can_be_opened_is_let_in_when_one_can() -> None:
    came: list[asyncio.BaseTransport] = []

    class Look(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            came.append(transport)
            transport.close()

    with listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        with no_more_files(lambda: socket.create_connection(listener.getsockname())) as client:
            stack.enter_context(client)
            acceptor = Acceptor(listener, Look, lambda: None)
            await asyncio.sleep(0.05)
            assert not came
        await until(lambda: len(came) == 1, within_s=20.0)
        acceptor.close()
        await acceptor.wait_closed()


@contextlib.contextmanager
def no_more_files(last: Callable[[], socket.socket]) -> Iterator[socket.socket]:
    """Open one more file, and let none be opened in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = last()
    lowest_free = os.dup(opened.fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield opened
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
