"""The fast worker does what the plain one does, whatever happens to it, and keeps its accounts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from service.mock.decode_model import DecodeWorker
from service.mock.decode_records import RequestTooLargeError
from service.mock.profiles import PROFILES
from tests.mock.naive_decode_worker import NaiveDecodeWorker, NaiveOutcome


class DecodeWorkerBesideThePlainOne(RuleBasedStateMachine):
    """Submits, iterations and aborts in any order, on both workers at once."""

    @initialize(
        batch_limit=st.integers(1, 6),
        blocks=st.integers(1, 12),
        block_tokens=st.integers(1, 5),
        prefill=st.booleans(),
        batched_tokens_limit=st.integers(1, 20),
    )
    def make_workers(
        self,
        batch_limit: int,
        blocks: int,
        block_tokens: int,
        prefill: bool,
        batched_tokens_limit: int,
    ) -> None:
        self.profile = replace(
            PROFILES["llama-3-8b-a100"], batched_tokens_limit=batched_tokens_limit
        )
        capacity = blocks * block_tokens + block_tokens - 1
        self.worker = DecodeWorker(self.profile, batch_limit, capacity, block_tokens, prefill)
        self.plain = NaiveDecodeWorker(
            batch_limit, blocks, block_tokens, prefill, batched_tokens_limit
        )
        self.lengths: dict[str, int] = {}
        self.entered = 0
        self.completed_tokens = 0
        self.lost_tokens = 0

    @rule(
        prompt=st.integers(0, 12), decode=st.integers(1, 12), sequences=st.sampled_from((1, 1, 2))
    )
    def submit(self, prompt: int, decode: int, sequences: int) -> None:
        request_id = f"r{self.entered}"
        try:
            self.worker.submit(request_id, prompt, decode, sequences=sequences)
        except RequestTooLargeError:
            return
        self.entered += 1
        self.lengths[request_id] = sequences * decode
        self.plain.submit(request_id, prompt, decode, sequences)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.lengths)))
        self._lose(request_id)
        assert self.worker.abort(request_id)
        self.plain.abort(request_id)

    @rule(data=st.data(), abort=st.sampled_from((False, False, False, True)))
    def iterate(self, data: st.DataObject, abort: bool) -> None:
        victim = None
        if abort and self.lengths:
            victim = data.draw(st.sampled_from(sorted(self.lengths)))
        duration_s = self.worker.begin_iteration()
        in_flight = self.worker.stats()
        if duration_s is not None and victim is not None:
            self._lose(victim)
            assert self.worker.abort(victim)
        expected = self.plain.iterate(abort_in_flight=victim)
        if duration_s is None:
            assert expected is None
            return
        assert expected is not None
        self._compare(duration_s, in_flight.kv_blocks_used, expected)

    @invariant()
    def the_two_agree_on_who_is_where(self) -> None:
        if not hasattr(self, "worker"):
            return
        assert self.worker.running == tuple(r.request_id for r in self.plain.running)
        assert self.worker.waiting == tuple(r.request_id for r in self.plain.waiting)
        assert self.worker.batch == sum(r.count for r in self.plain.running)
        assert self.worker.queued == sum(r.count for r in self.plain.waiting)
        assert self.worker.progress() == {r.request_id: r.produced for r in self.plain.running}
        for request in (*self.plain.running, *self.plain.waiting):
            assert self.worker.decode_tokens(request.request_id) == request.produced

    @invariant()
    def blocks_and_tokens_are_conserved(self) -> None:
        if not hasattr(self, "worker"):
            return
        stats = self.worker.stats()
        assert 0 <= stats.kv_blocks_used <= stats.kv_blocks_total
        assert stats.kv_blocks_used == self.plain.blocks_used()
        assert stats.generation_tokens_total == (
            self.completed_tokens + self.lost_tokens + self._tokens_so_far()
        )
        assert self.entered == stats.finished_total + stats.aborted_total + len(self.lengths)

    def teardown(self) -> None:
        """Whatever happened, the queue runs dry and every block comes back."""
        if not hasattr(self, "worker"):
            return
        while self.worker.begin_iteration() is not None:
            for request_id in self.worker.end_iteration().finished:
                self.completed_tokens += self.lengths.pop(request_id)
        stats = self.worker.stats()
        assert not self.lengths
        assert (stats.kv_blocks_used, stats.kv_tokens, stats.running) == (0, 0, 0)
        assert stats.generation_tokens_total == self.completed_tokens + self.lost_tokens

    def _compare(self, duration_s: float, blocks_in_flight: int, expected: NaiveOutcome) -> None:
        outcome = self.worker.end_iteration()
        assert outcome.started == expected.started
        assert outcome.preempted == expected.preempted
        assert set(outcome.first_tokens) == expected.first_tokens
        assert set(outcome.finished) == expected.finished
        assert outcome.tokens == expected.tokens
        assert blocks_in_flight == expected.blocks_used
        assert duration_s == self.profile.iteration_s(
            expected.batch, expected.kv_tokens, expected.prefill_tokens
        )
        for request_id in outcome.finished:
            self.completed_tokens += self.lengths.pop(request_id)

    def _lose(self, request_id: str) -> None:
        self.lost_tokens += self._produced(request_id)
        del self.lengths[request_id]

    def _tokens_so_far(self) -> int:
        return sum(self._produced(request_id) for request_id in self.lengths)

    def _produced(self, request_id: str) -> int:
        (request,) = (
            r for r in (*self.plain.running, *self.plain.waiting) if r.request_id == request_id
        )
        return request.count * request.produced


DecodeWorkerBesideThePlainOne.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestDecodeWorkerBesideThePlainOne = DecodeWorkerBesideThePlainOne.TestCase
