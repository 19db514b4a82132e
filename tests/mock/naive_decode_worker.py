"""The decode worker's rules written as slowly and plainly as possible: the oracle of its tests.

Every sequence is visited in every iteration, in vLLM's scheduling order: running requests first,
each taking what its next token needs and evicting the newest when there is nothing left; then the
queue. Nothing is counted incrementally.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class NaiveRequest:
    """One request; computed counts tokens of all its sequences."""

    request_id: str
    prompt_tokens: int
    decode_tokens: int
    count: int
    produced: int = 0
    computed: int = 0
    kv_tokens: int = 0


@dataclass
class NaiveOutcome:
    """What one iteration did and what it held."""

    started: tuple[str, ...]
    preempted: tuple[str, ...]
    first_tokens: frozenset[str]
    finished: frozenset[str]
    tokens: int
    prefill_tokens: int
    batch: int
    kv_tokens: int
    blocks_used: int


class NaiveDecodeWorker:
    """The worker, one visit per sequence and iteration."""

    def __init__(
        self,
        batch_limit: int,
        blocks_total: int,
        block_tokens: int,
        prefill: bool,
        batched_tokens_limit: int,
    ) -> None:
        self.batch_limit = batch_limit
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        self.prefill = prefill
        self.batched_tokens_limit = batched_tokens_limit
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []

    def submit(
        self, request_id: str, prompt_tokens: int, decode_tokens: int, sequences: int
    ) -> None:
        self.waiting.append(NaiveRequest(request_id, prompt_tokens, decode_tokens, sequences))

    def abort(self, request_id: str) -> None:
        self.waiting = [r for r in self.waiting if r.request_id != request_id]
        self.running = [r for r in self.running if r.request_id != request_id]

    def blocks_of(self, request: NaiveRequest) -> int:
        whole, rest = divmod(request.kv_tokens, self.block_tokens)
        return request.count * (whole + (1 if rest else 0))

    def blocks_used(self) -> int:
        return sum(self.blocks_of(request) for request in self.running)

    def iterate(self, abort_in_flight: str | None = None) -> NaiveOutcome | None:
        if not self.running and not self.waiting:
            return None
        preempted = self._grow()
        decoders = [r for r in self.running if self._prompt_done(r)]
        budget = self.batched_tokens_limit - sum(r.count for r in decoders)
        prefill_tokens = 0
        started: list[str] = []
        for request in [r for r in self.running if r not in decoders]:
            prefill_tokens += self._prefill(request, budget - prefill_tokens)
        if not preempted:
            while self.waiting and budget - prefill_tokens > 0:
                request = self.waiting[0]
                if not self._fits(request):
                    break
                self.waiting.pop(0)
                self.running.append(request)
                started.append(request.request_id)
                if self.prefill:
                    prefill_tokens += self._prefill(request, budget - prefill_tokens)
                else:
                    request.computed = request.count * request.kv_tokens
                    budget -= request.count
        batch, kv_tokens = sum(r.count for r in self.running), self._kv_tokens()
        blocks_used = self.blocks_used()
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
        first, finished, tokens = self._produce()
        return NaiveOutcome(
            started=tuple(started),
            preempted=tuple(preempted),
            first_tokens=frozenset(first),
            finished=frozenset(finished),
            tokens=tokens,
            prefill_tokens=prefill_tokens,
            batch=batch,
            kv_tokens=kv_tokens,
            blocks_used=blocks_used,
        )

    def _prompt_done(self, request: NaiveRequest) -> bool:
        return request.computed == request.count * request.kv_tokens

    def _kv_tokens(self) -> int:
        return sum(r.count * r.kv_tokens for r in self.running)

    def _grow(self) -> list[str]:
        preempted: list[str] = []
        grown: list[NaiveRequest] = []
        for request in list(self.running):
            if request not in self.running:
                continue
            if not self._prompt_done(request):
                continue
            while request in self.running:
                request.kv_tokens += 1
                request.computed += request.count
                if self.blocks_used() <= self.blocks_total:
                    grown.append(request)
                    break
                request.kv_tokens -= 1
                request.computed -= request.count
                victim = self.running.pop()
                victim.computed = 0
                victim.kv_tokens = 0
                self.waiting.insert(0, victim)
                preempted.append(victim.request_id)
        return preempted

    def _fits(self, request: NaiveRequest) -> bool:
        in_batch = sum(r.count for r in self.running)
        request.kv_tokens = request.prompt_tokens + request.produced + (not self.prefill)
        fits = (
            in_batch + request.count <= self.batch_limit
            and self.blocks_used() + self.blocks_of(request) <= self.blocks_total
        )
        if not fits:
            request.kv_tokens = 0
        return fits

    def _prefill(self, request: NaiveRequest, budget: int) -> int:
        missing = request.count * request.kv_tokens - request.computed
        chunk = max(0, min(missing, budget))
        request.computed += chunk
        return chunk

    def _produce(self) -> tuple[list[str], list[str], int]:
        first: list[str] = []
        finished: list[str] = []
        tokens = 0
        for request in list(self.running):
            if not self._prompt_done(request):
                continue
            request.produced += 1
            tokens += request.count
            if request.produced == 1:
                first.append(request.request_id)
            if request.produced == request.decode_tokens:
                finished.append(request.request_id)
                self.running.remove(request)
        return first, finished, tokens
