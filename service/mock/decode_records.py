"""What a decode worker says about itself: iterations, gauges, counters, and its one refusal."""

from __future__ import annotations

from dataclasses import dataclass, field


class RequestTooLargeError(ValueError):
    """The request can never run on this worker, however empty it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration did; every tuple holds request ids.

    Attributes:
        started: entered the batch, for the first time or again after a preemption.
        preempted: lost their KV blocks and went back to the front of the queue.
        first_tokens: produced their first output token.
        finished: produced their last output token and left.
        tokens: output tokens produced, over all sequences.
        waiting: sequences that it left in the worker's own queue, which is what an engine's gauge
            tells; those that came meanwhile are not counted.
        cached_tokens: by request id that entered, prompt tokens found in the prefix cache, if any.
    """

    started: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    first_tokens: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    tokens: int = 0
    waiting: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkerStats:
    """Gauges and counters, in the meaning of vLLM's; a request of n sequences counts n times.

    Attributes:
        running: sequences in the batch.
        waiting: sequences in the worker's own queue.
        kv_tokens: tokens in the KV cache.
        kv_blocks_used: allocated KV blocks.
        kv_blocks_total: KV blocks there are.
        block_tokens: KV block size.
        preemptions_total: sequences preempted.
        prompt_tokens_total: prompt tokens of sequences that produced their first token.
        prefill_tokens_total: prompt tokens computed; more than the above when recomputed.
        generation_tokens_total: output tokens.
        iterations_total: iterations ended.
        finished_total: requests that ran to their end.
        aborted_total: requests that were aborted.
        prefix_queries_total: prompt tokens looked up in the prefix cache.
        prefix_hits_total: of these, found there.
    """

    running: int
    waiting: int
    kv_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    block_tokens: int
    preemptions_total: int
    prompt_tokens_total: int
    prefill_tokens_total: int
    generation_tokens_total: int
    iterations_total: int
    finished_total: int
    aborted_total: int
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
