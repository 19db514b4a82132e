"""The decode model put on the event loop: iterations take their time, requests see tokens come.

One task runs the iterations of a worker; a request only waits for news and reads its sequences.
Read decode_model.py for what an iteration does and worker.py for HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from service.mock.decode_model import DecodeWorker
from service.mock.engine_series import EngineSeries
from service.mock.kv_transfer import KvStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.mock.decode_records import Iteration
    from service.mock.worker_config import MockWorkerConfig

LAG_MAX_S: Final = 1.0
"""An engine further behind its schedule than this (a stopped process) does not catch up."""


class EngineDeadError(Exception):
    """The engine has stopped; nothing will be generated any more."""


class QueueFullError(Exception):
    """The worker's own queue is full."""


@dataclass(slots=True, eq=False)
class Decode:
    """One sequence of a generation.

    Attributes:
        prompt_tokens: length of its prompt.
        decode_tokens: output tokens it will have.
        finish_reason: why it will end there: "stop" or "length".
        engine_id: its name inside the engine.
        produced: output tokens so far.
        last_token_s: when the newest of them came, on the loop's clock.
        started: whether it has left the worker's queue before.
        prefilled: whether its prompt was computed elsewhere.
        keep_as: name under which its prompt is kept for another worker, or "".
        prompt_key: which prompt that is.
        pieces: ids of its prompt's blocks. cached_tokens: found in the prefix cache.
    """

    prompt_tokens: int
    decode_tokens: int
    finish_reason: str
    engine_id: str = ""
    produced: int = 0
    last_token_s: float = 0.0
    started: bool = False
    prefilled: bool = False
    keep_as: str = ""
    prompt_key: int = 0
    pieces: tuple[int, ...] = ()
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Generation:
    """One request inside the engine: n sequences for each of its prompts.

    Attributes:
        decodes: the sequences, in the order of the choices.
        arrived_s: when it was submitted, on the loop's clock.
        open_decodes: sequences that have not got all their tokens.
        news: set when a sequence moved, or when nothing will come any more.
        aborted: the client has left.
        failed: the engine died.
    """

    decodes: tuple[Decode, ...]
    arrived_s: float
    open_decodes: int
    news: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False
    failed: bool = False

    @property
    def complete(self) -> bool:
        """Whether every sequence has all its tokens."""
        return self.open_decodes == 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.open_decodes == 0 or self.aborted or self.failed


class MockEngine:
    """Runs a DecodeWorker in real time, or time_scale times faster.

    Sequences of one request are scheduled one by one, as vLLM does it.

    Args:
        config: of the worker.
        label: the engine's number in the series.

    Attributes:
        series: what /metrics shows.
        slowdown: how many times longer iterations take than they should; at least 1 in sense.
    """

    def __init__(self, config: MockWorkerConfig, label: int = 0) -> None:
        self._config = config
        self._model = DecodeWorker(
            config.profile,
            config.batch_limit,
            config.kv_tokens,
            config.block_tokens,
            config.prefill,
            config.block_tokens if config.prefix_caching else 0,
        )
        self.kv_store = KvStore(config.kv_lease_s, self._pin, self._unpin)
        self._held: dict[str, tuple[Generation, Decode]] = {}
        self._submitted = 0
        self._work = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()
        self.slowdown = 1.0
        self._alive = False
        self._runner: asyncio.Task[None] | None = None
        self.series = EngineSeries(config, self._model.stats(), label, time.time())

    @property
    def load(self) -> int:
        """Sequences in the batch and in the queue."""
        return len(self._held)

    @property
    def alive(self) -> bool:
        """Whether iterations are being run."""
        return self._alive

    def submit(self, decodes: Sequence[Decode]) -> Generation:
        """Queue the sequences of one request.

        Raises:
            EngineDeadError: the engine does not run.
            QueueFullError: the worker's own queue has no room for them.
        """
        if not self._alive:
            raise EngineDeadError
        if self._model.queued >= self._config.queue_max:
            raise QueueFullError
        now_s = asyncio.get_running_loop().time()
        generation = Generation(tuple(decodes), now_s, open_decodes=len(decodes))
        for decode in generation.decodes:
            self._submitted += 1
            decode.engine_id = str(self._submitted)
            self._model.submit(
                decode.engine_id,
                decode.prompt_tokens,
                decode.decode_tokens,
                prefilled=decode.prefilled,
                pieces=decode.pieces,
            )
            self._held[decode.engine_id] = (generation, decode)
        self._work.set()
        return generation

    def abort(self, generation: Generation) -> None:
        """Drop what is left of a request; its batch slots are free from the next iteration."""
        if generation.ended:
            return
        generation.aborted = True
        generation.news.set()
        for decode in generation.decodes:
            if self._held.pop(decode.engine_id, None) is not None:
                self._model.abort(decode.engine_id)
        self._work.set()

    async def run(self) -> None:
        """Run iterations until stopped; whatever ends this fails what is still held."""
        self._runner = asyncio.current_task()
        self._alive = True
        try:
            await self._iterate()
        finally:
            self._alive = False
            self._runner = None
            for generation, _ in self._held.values():
                generation.failed = True
                generation.news.set()
            self._held.clear()

    def stop(self) -> None:
        """End run(), if it runs."""
        if self._runner is not None:
            self._runner.cancel()

    def pause(self) -> None:
        """Make no progress until resume(): a hung engine behind a server that still answers."""
        self._going.clear()

    def resume(self) -> None:
        """Go on."""
        self._going.set()

    async def until_going(self) -> None:
        """Return when the engine is not hung: what is computed in one pass waits for no slot.

        Raises:
            EngineDeadError: the engine does not run.
        """
        await self._going.wait()
        if not self._alive:
            raise EngineDeadError

    async def _iterate(self) -> None:
        """Each iteration ends on a schedule that the ones before it set, so lateness never adds."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            await self._going.wait()
            began_s = loop.time()
            duration_s = self._model.begin_iteration()
            if duration_s is None:
                self.series.observe_idle(self._model.stats())
                self._work.clear()
                await self._work.wait()
                due_s = loop.time()
                continue
            if began_s - due_s > LAG_MAX_S:
                due_s = began_s
            due_s += duration_s * self.slowdown / self._config.time_scale
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._deliver(self._model.end_iteration(), began_s, loop.time())

    def _deliver(self, iteration: Iteration, began_s: float, now_s: float) -> None:
        """Tell the requests about their tokens and the series about the iteration."""
        series = self.series
        for engine_id in iteration.started:
            self._note_start(engine_id, began_s)
        for engine_id, tokens in iteration.cached_tokens.items():
            if engine_id in self._held:
                self._held[engine_id][1].cached_tokens = tokens
        gaps_s: Counter[float] = Counter()
        finished = set(iteration.finished)
        for engine_id in (*self._model.running, *iteration.finished):
            generation, decode = self._held[engine_id]
            produced = (
                decode.decode_tokens
                if engine_id in finished
                else self._model.decode_tokens(engine_id)
            )
            if produced == decode.produced:
                continue
            if decode.produced:
                gaps_s[now_s - decode.last_token_s] += 1
            else:
                series.first_token_s.observe(now_s - generation.arrived_s)
            decode.produced = produced
            decode.last_token_s = now_s
            generation.news.set()
        for engine_id in iteration.finished:
            generation, decode = self._held.pop(engine_id)
            generation.open_decodes -= 1
            if decode.keep_as:
                self.kv_store.keep(decode.keep_as, decode.prompt_tokens, decode.prompt_key)
            series.finished[decode.finish_reason] += 1
            series.request_s.observe(now_s - generation.arrived_s)
        stats = replace(self._model.stats(), waiting=iteration.waiting)
        series.observe_iteration(stats, iteration.tokens, gaps_s)

    def _pin(self, tokens: int) -> None:
        """Keep the memory of a request that has just ended."""
        self._model.kv.take(1, tokens)

    def _unpin(self, tokens: int) -> None:
        """Free memory that was kept for another worker; requests may wait for it."""
        self._model.kv.give(1, tokens)
        self._work.set()

    def _note_start(self, engine_id: str, began_s: float) -> None:
        """Count the time in the worker's queue, once."""
        held = self._held.get(engine_id)
        if held is None:
            return
        generation, decode = held
        if not decode.started:
            decode.started = True
            self.series.queue_s.observe(max(0.0, began_s - generation.arrived_s))
