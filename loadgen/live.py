"""Running the client for people: a progress bar, orderly interruption, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rich.console import Console
    from rich.progress import TaskID

    from loadgen.outcomes import OutcomeRecord
    from loadgen.replay import Replay

REFRESH_S = 0.25

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end; Ctrl-C and SIGTERM cancel it, so that its clean-up runs.

    Raises:
        KeyboardInterrupt: after either signal.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_terminable(main))


async def _terminable(main: Coroutine[object, object, T]) -> T:
    task = asyncio.create_task(main)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def command_line() -> str:
    """Write the command line of this process as a person would type it."""
    return shlex.join(["bidgate-load", *sys.argv[1:]])


def progress_bar(console: Console) -> Progress:
    """Make the bar: requests ended of all, and how many are under way."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests ended, {task.fields[under_way]} under way"),
        TimeElapsedColumn(),
        console=console,
    )


async def run_with_progress(
    replay: Replay, requests: int, title: str, progress: Progress
) -> list[OutcomeRecord]:
    """Run a replay while a bar shows how far it is."""
    bar = progress.add_task(title, total=requests, under_way=0)
    watcher = asyncio.create_task(_watch(replay, bar, progress))
    try:
        return await replay.run()
    finally:
        watcher.cancel()
        progress.update(bar, completed=len(replay.records), under_way=0)


async def _watch(replay: Replay, bar: TaskID, progress: Progress) -> None:
    while True:
        ended = len(replay.records)
        progress.update(bar, completed=ended, under_way=replay.sent - ended)
        await asyncio.sleep(REFRESH_S)
