"""What a decode worker keeps of its requests, of the iteration in flight and of all before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.mock.decode_records import DecodeWorkerStats

if TYPE_CHECKING:
    from service.mock.kv_blocks import KvBlocks
    from service.mock.prefix_blocks import PrefixBlocks


@dataclass(slots=True)
class Sequences:
    """One request inside the worker; its parallel sequences advance together.

    Attributes:
        produced: output tokens of each sequence when it last stood still.
        prefill_left: tokens of all sequences still to be computed before they decode.
        kv_tokens: KV tokens of each sequence at admission, then in first_step.
        first_step: step in which it decodes (again) for the first time; None while it does not.
        prefilled: whether its prompt comes from elsewhere; not again after a preemption.
        pieces: ids of its prompt's pieces.
    """

    request_id: str
    prompt_tokens: int
    decode_tokens: int
    count: int
    produced: int = 0
    prefill_left: int = 0
    kv_tokens: int = 0
    first_step: int | None = None
    prefilled: bool = False
    pieces: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """The iteration in flight."""

    started: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    first_tokens: dict[str, Sequences] = field(default_factory=dict)
    prefilled: dict[str, Sequences] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    waiting: int = 0


@dataclass(slots=True)
class Totals:
    """Counters since the worker was made."""

    preemptions: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    iterations: int = 0
    finished: int = 0
    aborted: int = 0

    def count(self, step: Step, tokens: int, finished: int) -> None:
        """Book an ended iteration."""
        self.iterations += 1
        self.generation_tokens += tokens
        self.prefill_tokens += step.prefill_tokens
        self.finished += finished
        for sequences in step.first_tokens.values():
            self.prompt_tokens += sequences.count * sequences.prompt_tokens

    def stats(
        self, running: int, waiting: int, kv: KvBlocks, prefixes: PrefixBlocks
    ) -> DecodeWorkerStats:
        """Return the counters, with gauges of now; running and waiting count sequences."""
        return DecodeWorkerStats(
            running=running,
            waiting=waiting,
            kv_tokens=kv.tokens,
            kv_blocks_used=kv.used,
            kv_blocks_total=kv.total,
            block_tokens=kv.block_tokens,
            preemptions_total=self.preemptions,
            prompt_tokens_total=self.prompt_tokens,
            prefill_tokens_total=self.prefill_tokens,
            generation_tokens_total=self.generation_tokens,
            iterations_total=self.iterations,
            finished_total=self.finished,
            aborted_total=self.aborted,
            prefix_queries_total=prefixes.queries,
            prefix_hits_total=prefixes.hits,
        )
