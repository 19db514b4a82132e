"""A router in the state that costs most: every batch full, a long queue, ends all along.

Built through the controller's public events alone. One step is what happens between two ticks of a
live router at full load: some workers decode a token for each of their requests, one or two
requests end, as many arrive.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from loadgen.lmsys_like import sample_lengths
from service.control import (
    Arrived,
    ControlConfig,
    Event,
    Left,
    Outcome,
    Progressed,
    Request,
    Router,
    Start,
    WorkerJoined,
    WorkerSpec,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from service.control import Command

BATCH_LIMITS = (64, 128, 256)
KV_TOKENS_PER_SLOT = 600
ITERATION_S = 0.0225
ENDS_PER_TICK = (1, 2)
HINTED = 0.7
"""Share of requests that come with a forecast of their length."""
LENGTHS_AT_ONCE = 4096
BUILT_AT_S = 0.0


@dataclass
class Running:
    """A started request, as the world outside the router knows it."""

    request_id: str
    worker: int
    decode_tokens: int
    produced: int = 0


@dataclass
class BusyRouter:
    """A router and the world around it.

    Attributes:
        router: under measurement.
        now_s: time of the last events.
        tick_s: time between two ticks, such that the ends are those of a full fleet.
        running: requests on each worker.
    """

    router: Router
    workers: int
    rng: np.random.Generator
    now_s: float = BUILT_AT_S
    tick_s: float = 0.0
    running: list[list[Running]] = field(default_factory=list)
    _waiting: dict[str, int] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _lengths: list[tuple[int, int]] = field(default_factory=list)
    _decoding: float = 0.0

    def events(self) -> list[Event]:
        """Move time on by a tick; what has happened meanwhile, in order."""
        self.now_s += self.tick_s
        self._decoding += self.workers * self.tick_s / ITERATION_S
        decoding, self._decoding = int(self._decoding), self._decoding % 1.0
        events: list[Event] = [self._decode(worker) for worker in self._next_workers(decoding)]
        ends = int(self.rng.integers(ENDS_PER_TICK[0], ENDS_PER_TICK[1] + 1))
        events += [self._end_one() for _ in range(ends)]
        return events + [self._arrive() for _ in range(ends)]

    def decode_everywhere(self) -> list[Event]:
        """Let every worker decode one iteration, as between two price refreshes."""
        self.now_s += ITERATION_S
        return [self._decode(worker) for worker in range(self.workers)]

    def obey(self, commands: Sequence[Command]) -> None:
        """Start what the router wants started."""
        for command in commands:
            if isinstance(command, Start):
                worker = int(command.worker_id.removeprefix("w"))
                tokens = self._waiting.pop(command.request_id)
                self.running[worker].append(Running(command.request_id, worker, tokens))

    def _next_workers(self, count: int) -> list[int]:
        return [int(worker) for worker in self.rng.integers(0, self.workers, count)]

    def _decode(self, worker: int) -> Progressed:
        for one in self.running[worker]:
            one.produced += 1
        return Progressed({one.request_id: one.produced for one in self.running[worker]})

    def _end_one(self) -> Left:
        """End the request of a random worker that is nearest to its length."""
        here = self.running[int(self.rng.integers(self.workers))]
        left = [one.decode_tokens - one.produced for one in here]
        ended = here.pop(int(np.argmin(left)))
        return Left(ended.request_id, Outcome.COMPLETED, max(1, ended.produced))

    def _arrive(self) -> Arrived:
        if not self._lengths:
            drawn = sample_lengths(self.rng, LENGTHS_AT_ONCE)
            self._lengths = [(int(prompt), int(answer)) for prompt, answer in drawn]
        prompt_tokens, decode_tokens = self._lengths.pop()
        request_id = f"r{next(self._ids)}"
        self._waiting[request_id] = decode_tokens
        hint = max(1, round(decode_tokens * self.rng.uniform(0.8, 1.2)))
        return Arrived(
            Request(
                request_id=request_id,
                arrival_s=self.now_s,
                prompt_tokens=prompt_tokens,
                decode_tokens_hint=hint if self.rng.random() < HINTED else None,
                decode_tokens_limit=2 * decode_tokens if self.rng.random() < 0.5 else None,
                group=f"g{self.rng.integers(8)}",
            )
        )

    def handle(self, events: Sequence[Event]) -> None:
        """Book events; at full load nothing is refused."""
        for event in events:
            assert not self.router.handle(event, self.now_s)

    def fill(self, waiting: int) -> None:
        """Let workers join one by one, fill each, scatter progress, then let requests queue up.

        Only the newest worker has room while it fills, so its batch is what the tick starts.
        """
        limits = self.rng.choice(BATCH_LIMITS, self.workers).tolist()
        for worker, limit in enumerate(limits):
            spec = WorkerSpec(
                worker_id=f"w{worker}",
                batch_limit=limit,
                kv_capacity_tokens=KV_TOKENS_PER_SLOT * limit,
                iteration_s=ITERATION_S,
            )
            self.running.append([])
            self.handle([WorkerJoined(spec), *(self._arrive() for _ in range(limit))])
            self.obey(self.router.tick(self.now_s))
            for one in self.running[worker]:
                one.produced = int(self.rng.integers(0, one.decode_tokens))
            self.handle([self._decode(worker)])
        self.now_s += ITERATION_S
        self.handle([self._arrive() for _ in range(waiting)])
        mean_tokens = np.mean([one.decode_tokens for here in self.running for one in here])
        ends_per_s = sum(limits) / (float(mean_tokens) * ITERATION_S)
        self.tick_s = sum(ENDS_PER_TICK) / 2 / ends_per_s


def busy_router(workers: int, waiting: int, config: ControlConfig, seed: int) -> BusyRouter:
    """Build a full fleet with so many requests waiting."""
    busy = BusyRouter(Router(config), workers, np.random.default_rng(seed))
    busy.fill(waiting)
    return busy
