"""One decode worker as a pure machine: continuous batching, KV blocks, preemption by recompute.

No clock and no I/O: the caller alternates begin_iteration (how long will it take?) and
end_iteration (what came out?). The work per iteration does not grow with the batch: all running
requests advance by the same step, so ends are looked up by step number and KV growth is counted
in kv_blocks.py; what is held of a request is in decode_books.py. Durations come from profiles.py.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from service.mock.decode_books import Sequences, Step, Totals
from service.mock.decode_records import DecodeWorkerStats, Iteration, RequestTooLargeError
from service.mock.kv_blocks import KvBlocks
from service.mock.prefix_blocks import PrefixBlocks

if TYPE_CHECKING:
    from service.mock.profiles import DecodeProfile


class DecodeWorker:
    """A worker that decodes one token per running sequence and iteration.

    With prefill, as in vLLM, the iteration that finishes a prompt also yields the first output
    token, so a request of o tokens takes o iterations and holds s + theta KV tokens in iteration
    theta = 0..o-1. (Differs from [OLP] appendix A, whose mixed kernel counts 1 + o steps.)
    Without prefill prompts cost neither time nor iterations, and iteration theta holds
    s + theta + 1 KV tokens, [OLP] eq. (1).

    A request of n sequences takes n batch slots and n times the KV, and its sequences start,
    advance and end together. A prompt's blocks are all allocated when its request is admitted,
    even when it is prefilled in chunks.

    Args:
        profile: durations and the limit on tokens per iteration.
        batch_limit: B, most sequences in the batch.
        kv_capacity_tokens: M; None for the profile's. Rounded down to whole blocks.
        block_tokens: KV block size.
        prefill: whether prompts are computed here, or elsewhere (decode-only).
        piece_tokens: prompt tokens of a piece of the prefix cache; 0 for no such cache.
    """

    def __init__(
        self,
        profile: DecodeProfile,
        batch_limit: int,
        kv_capacity_tokens: int | None = None,
        block_tokens: int = 16,
        prefill: bool = True,
        piece_tokens: int = 0,
    ) -> None:
        if batch_limit < 1:
            raise ValueError("batch_limit must be at least 1")
        capacity = profile.kv_capacity_tokens if kv_capacity_tokens is None else kv_capacity_tokens
        self._profile = profile
        self._batch_limit = batch_limit
        self._prefill = prefill
        # Memory that is kept for another worker is taken from here and given back by its keeper.
        self.kv = KvBlocks(capacity, block_tokens)
        self._prefixes = PrefixBlocks(piece_tokens)
        self._waiting: OrderedDict[str, Sequences] = OrderedDict()
        self._running: dict[str, Sequences] = {}
        self._prefilling: dict[str, Sequences] = {}
        self._ends: dict[int, dict[str, Sequences]] = {}
        self._batch = 0
        self._queued = 0
        self._step_number = 0
        self._step: Step | None = None
        self._totals = Totals()

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests in the batch, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the requests in the worker's own queue, next first."""
        return tuple(self._waiting)

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self._batch

    @property
    def queued(self) -> int:
        """Sequences in the worker's own queue."""
        return self._queued

    @property
    def kv_tokens_used(self) -> int:
        """Tokens that the allocated KV blocks have room for."""
        return self.kv.used * self.kv.block_tokens

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that all KV blocks have room for."""
        return self.kv.total * self.kv.block_tokens

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is held here, running or waiting."""
        return request_id in self._running or request_id in self._waiting

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        sequences: int = 1,
        prefilled: bool = False,
        pieces: tuple[int, ...] = (),
    ) -> None:
        """Append a request to the worker's own queue; decode_tokens is the length it will have.

        With prefilled its prompt was computed elsewhere; by its pieces it is known again.

        Raises:
            RequestTooLargeError: it could not run even if it were alone.
            ValueError: the id is in use or a length makes no sense.
        """
        if request_id in self:
            raise ValueError(f"request {request_id} is already here")
        if prompt_tokens < 0 or decode_tokens < 1 or sequences < 1:
            raise ValueError("prompt_tokens must be >= 0, decode_tokens and sequences >= 1")
        if sequences > self._batch_limit:
            raise RequestTooLargeError(
                f"request {request_id} has {sequences} sequences, batch limit {self._batch_limit}"
            )
        prefilled = prefilled or not self._prefill
        peak_tokens = prompt_tokens + decode_tokens - (0 if prefilled else 1)
        blocks = sequences * self.kv.blocks(peak_tokens)
        if blocks > self.kv.total:
            raise RequestTooLargeError(
                f"request {request_id} needs {blocks} KV blocks of {self.kv.block_tokens} tokens, "
                f"the worker has {self.kv.total}"
            )
        self._waiting[request_id] = Sequences(
            request_id, prompt_tokens, decode_tokens, sequences, prefilled=prefilled, pieces=pieces
        )
        self._queued += sequences

    def abort(self, request_id: str) -> bool:
        """Drop a request, waiting or running, and free its blocks; False when it is not here.

        Aborted while an iteration is in flight it takes no token from that iteration.
        """
        sequences = self._waiting.pop(request_id, None)
        if sequences is not None:
            self._queued -= sequences.count
        else:
            sequences = self._running.get(request_id)
            if sequences is None:
                return False
            self._release(sequences)
            if self._step is not None:
                self._step.first_tokens.pop(request_id, None)
                self._step.prefilled.pop(request_id, None)
        self._totals.aborted += 1
        return True

    def decode_tokens(self, request_id: str) -> int:
        """Output tokens of each of the request's sequences so far; KeyError when not here."""
        return self._produced(self._running.get(request_id) or self._waiting[request_id])

    def progress(self) -> dict[str, int]:
        """Output tokens of each sequence so far, for every request in the batch."""
        steps = self._step_number - (self._step is not None) + 1
        return {
            request_id: (
                held.produced
                if held.first_step is None
                else held.produced + steps - held.first_step
            )
            for request_id, held in self._running.items()
        }

    def begin_iteration(self) -> float | None:
        """Preempt if blocks run out, grow, admit; answer the iteration's duration in seconds.

        None when there is nothing to do. As in vLLM nobody is admitted in an iteration that had
        to preempt, and running prefills get the token budget before new ones.
        """
        if self._step is not None:
            raise RuntimeError("begin_iteration called twice without end_iteration")
        if not self._running and not self._waiting:
            return None
        step = Step()
        self._preempt(step)
        self._step = step
        self._step_number += 1
        self.kv.grow(self._step_number)
        for sequences in tuple(self._prefilling.values()):
            self._compute_prompt(sequences, step)
        if not step.preempted:
            self._admit(step)
        step.waiting = self._queued
        return self._profile.iteration_s(self._batch, self.kv.tokens, step.prefill_tokens)

    def end_iteration(self) -> Iteration:
        """Produce the iteration's tokens; requests that got their last one leave."""
        step = self._step
        if step is None:
            raise RuntimeError("end_iteration called without begin_iteration")
        self._step = None
        tokens = self.kv.growing
        finished = list(self._ends.pop(self._step_number, {}).values())
        for sequences in step.prefilled.values():
            sequences.produced += 1
            tokens += sequences.count
            if sequences.produced == sequences.decode_tokens:
                finished.append(sequences)
            else:
                self._join(sequences, self._step_number + 1)
        for sequences in finished:
            self._release(sequences)
        self._totals.count(step, tokens, len(finished))
        return Iteration(
            started=tuple(step.started),
            preempted=tuple(step.preempted),
            first_tokens=tuple(step.first_tokens),
            finished=tuple(sequences.request_id for sequences in finished),
            tokens=tokens,
            waiting=min(step.waiting, self._queued),
            cached_tokens=step.cached_tokens,
        )

    def stats(self) -> DecodeWorkerStats:
        """Return gauges and counters now."""
        return self._totals.stats(self._batch, self._queued, self.kv, self._prefixes)

    def _preempt(self, step: Step) -> None:
        """Send the newest back to the queue until the others' next tokens have blocks."""
        while not self.kv.suffices_for(self._step_number + 1):
            victim = self._running[next(reversed(self._running))]
            self._release(victim)
            victim.prefilled = not self._prefill
            self._waiting[victim.request_id] = victim
            self._waiting.move_to_end(victim.request_id, last=False)
            self._queued += victim.count
            self._totals.preemptions += victim.count
            step.preempted.append(victim.request_id)

    def _admit(self, step: Step) -> None:
        """Move requests from the queue into the batch, in order, while everything fits."""
        while self._waiting and self._budget(step) > 0:
            sequences = next(iter(self._waiting.values()))
            kv_tokens = self._kv_at_next_token(sequences)
            if self._batch + sequences.count > self._batch_limit:
                break
            if not self.kv.fits(sequences.count, kv_tokens):
                break
            del self._waiting[sequences.request_id]
            self._running[sequences.request_id] = sequences
            self._queued -= sequences.count
            self._batch += sequences.count
            self.kv.take(sequences.count, kv_tokens)
            sequences.kv_tokens = kv_tokens
            step.started.append(sequences.request_id)
            if not sequences.prefilled:
                found = self._prefixes.enter(sequences.pieces, kv_tokens, self.kv.free_tokens)
                if found:
                    step.cached_tokens[sequences.request_id] = found
                sequences.prefill_left = sequences.count * (kv_tokens - found)
                self._prefilling[sequences.request_id] = sequences
                self._compute_prompt(sequences, step)
            else:
                self._announce(sequences, step)
                self._join(sequences, self._step_number)

    def _budget(self, step: Step) -> int:
        """Tokens this iteration can still compute."""
        limit = self._profile.batched_tokens_limit
        if limit is None:
            return 1 << 62
        return max(0, limit - self.kv.growing - step.prefill_tokens)

    def _compute_prompt(self, sequences: Sequences, step: Step) -> None:
        """Compute as much of a prompt as the budget allows."""
        chunk = min(sequences.prefill_left, self._budget(step))
        sequences.prefill_left -= chunk
        step.prefill_tokens += chunk
        if sequences.prefill_left == 0:
            del self._prefilling[sequences.request_id]
            step.prefilled[sequences.request_id] = sequences
            self._announce(sequences, step)

    def _announce(self, sequences: Sequences, step: Step) -> None:
        """Note that this iteration yields the request's first token, unless it had one before."""
        if sequences.produced == 0:
            step.first_tokens[sequences.request_id] = sequences

    def _join(self, sequences: Sequences, first_step: int) -> None:
        """Let a request whose prompt is in the KV cache decode from the given step on."""
        sequences.first_step = first_step
        sequences.kv_tokens = self._kv_at_next_token(sequences)
        self.kv.start_growing(sequences.count, first_step, sequences.kv_tokens)
        last_step = first_step + sequences.decode_tokens - sequences.produced - 1
        self._ends.setdefault(last_step, {})[sequences.request_id] = sequences

    def _release(self, sequences: Sequences) -> None:
        """Take a running request out of the batch and free its blocks."""
        first_step = sequences.first_step
        kv_tokens = sequences.kv_tokens
        if first_step is None:
            self._prefilling.pop(sequences.request_id, None)
        else:
            self.kv.stop_growing(sequences.count, first_step, kv_tokens)
            kv_tokens += self._step_number - first_step
            last_step = first_step + sequences.decode_tokens - sequences.produced - 1
            self._ends.get(last_step, {}).pop(sequences.request_id, None)
            sequences.produced = self._produced(sequences)
            sequences.first_step = None
        self.kv.give(sequences.count, kv_tokens)
        if not sequences.prefilled:
            self._prefixes.leave(sequences.pieces, self.kv.free_tokens)
        self._batch -= sequences.count
        del self._running[sequences.request_id]

    def _produced(self, sequences: Sequences) -> int:
        """Output tokens of each sequence, those of the iteration in flight not counted."""
        if sequences.first_step is None:
            return sequences.produced
        steps_ended = self._step_number - (self._step is not None)
        return sequences.produced + steps_ended - sequences.first_step + 1

    def _kv_at_next_token(self, sequences: Sequences) -> int:
        """KV tokens of each sequence in the iteration that yields its next token."""
        return sequences.prompt_tokens + sequences.produced + (1 if sequences.prefilled else 0)
