"""Decode iterations small enough to follow with a pencil."""

from __future__ import annotations

import pytest

from service.mock.decode_model import DecodeWorker
from service.mock.decode_records import Iteration, RequestTooLargeError
from service.mock.profiles import PROFILES, DecodeProfile

UNIT = PROFILES["unit"]
ROUND_MS = DecodeProfile(
    name="round",
    base_ms=10.0,
    per_request_ms=1.0,
    per_kv_token_ms=0.1,
    prefill_ms_per_token=0.5,
    kv_capacity_tokens=1600,
    batched_tokens_limit=20,
)


def iterate(worker: DecodeWorker) -> tuple[float, Iteration]:
    duration_s = worker.begin_iteration()
    assert duration_s is not None
    return duration_s, worker.end_iteration()


def run_out(worker: DecodeWorker) -> list[Iteration]:
    iterations = []
    while worker.begin_iteration() is not None:
        iterations.append(worker.end_iteration())
    return iterations


def test_the_prefill_step_yields_the_first_token() -> None:
    worker = DecodeWorker(ROUND_MS, 4)
    worker.submit("a", 10, 3)
    # 10 + 1 x 1 + 0.1 x 10 KV + 0.5 x 10 prompt tokens; then the KV grows by one a step.
    duration_s, first = iterate(worker)
    assert duration_s == pytest.approx(17e-3)
    assert first == Iteration(started=("a",), first_tokens=("a",), tokens=1)
    assert worker.decode_tokens("a") == 1
    duration_s, second = iterate(worker)
    assert duration_s == pytest.approx(12.1e-3)
    assert second == Iteration(tokens=1)
    duration_s, third = iterate(worker)
    assert duration_s == pytest.approx(12.2e-3)
    assert third == Iteration(finished=("a",), tokens=1)
    assert worker.begin_iteration() is None
    assert worker.stats().kv_blocks_used == 0


def test_decode_only_prompts_cost_no_time_and_the_kernel_is_the_papers() -> None:
    worker = DecodeWorker(ROUND_MS, 4, prefill=False)
    worker.submit("a", 10, 2)
    durations_ms = [1e3 * iterate(worker)[0] for _ in range(2)]
    # m(theta) = s + theta + 1, [OLP] eq. (1): 11 and 12 KV tokens.
    assert durations_ms == pytest.approx([12.1, 12.2])
    assert worker.begin_iteration() is None


def test_a_request_of_one_token_ends_in_its_prefill_step() -> None:
    worker = DecodeWorker(UNIT, 1)
    worker.submit("a", 5, 1)
    assert iterate(worker)[1] == Iteration(
        started=("a",), first_tokens=("a",), finished=("a",), tokens=1
    )
    assert worker.stats().kv_blocks_used == 0


def test_the_queue_is_first_come_first_served_and_one_slot_serves_one_at_a_time() -> None:
    worker = DecodeWorker(UNIT, 1)
    for request_id, tokens in (("a", 2), ("b", 1), ("c", 2)):
        worker.submit(request_id, 1, tokens)
    starts = [iteration.started for iteration in run_out(worker)]
    assert starts == [("a",), (), ("b",), ("c",), ()]


def test_a_large_request_at_the_head_holds_up_those_behind_it() -> None:
    worker = DecodeWorker(UNIT, 4, kv_capacity_tokens=64)
    worker.submit("a", 40, 3)
    worker.submit("large", 40, 1)
    worker.submit("small", 1, 1)
    starts = [iteration.started for iteration in run_out(worker)]
    assert starts == [("a",), (), (), ("large", "small")]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    worker = DecodeWorker(ROUND_MS, 4)
    worker.submit("a", 5, 10)
    iterate(worker)
    worker.submit("long", 40, 2)
    # 20 tokens a step, one of them a's: 19 + 19 + 2 prompt tokens.
    steps = [iterate(worker) for _ in range(3)]
    prefill_ms = [0.5 * 19, 0.5 * 19, 0.5 * 2]
    kv_ms = [0.1 * (6 + 40), 0.1 * (7 + 40), 0.1 * (8 + 40)]
    expected = [12 + p + k for p, k in zip(prefill_ms, kv_ms, strict=True)]
    assert [1e3 * duration_s for duration_s, _ in steps] == pytest.approx(expected)
    assert [step.tokens for _, step in steps] == [1, 1, 2]
    assert [step.first_tokens for _, step in steps] == [(), (), ("long",)]


def test_the_newest_is_preempted_and_its_tokens_are_prefilled_again() -> None:
    # Two blocks of four: a and b hold one each; a's fifth KV token needs b's block.
    worker = DecodeWorker(UNIT, 2, kv_capacity_tokens=8, block_tokens=4)
    worker.submit("a", 3, 3)
    worker.submit("b", 2, 4)
    iterations = run_out(worker)
    assert [i.started for i in iterations] == [("a", "b"), (), (), ("b",), ()]
    assert [i.preempted for i in iterations] == [(), (), ("b",), (), ()]
    assert [i.first_tokens for i in iterations] == [("a", "b"), (), (), (), ()]
    assert [i.finished for i in iterations] == [(), (), ("a",), (), ("b",)]
    stats = worker.stats()
    assert stats.generation_tokens_total == 7
    assert stats.preemptions_total == 1
    assert stats.prompt_tokens_total == 5
    assert stats.prefill_tokens_total == 3 + 2 + (2 + 2)


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    worker = DecodeWorker(UNIT, 2, kv_capacity_tokens=8, block_tokens=4)
    worker.submit("a", 3, 3)
    worker.submit("b", 2, 4)
    worker.submit("c", 1, 1)
    for _ in range(3):
        iterate(worker)
    assert worker.waiting == ("b", "c")


def test_parallel_sequences_take_slots_and_blocks_each() -> None:
    worker = DecodeWorker(UNIT, 4, kv_capacity_tokens=6 * 16)
    worker.submit("three", 16, 2, sequences=3)
    worker.submit("two", 1, 1, sequences=2)
    _, first = iterate(worker)
    assert first == Iteration(started=("three",), first_tokens=("three",), tokens=3, waiting=2)
    assert (worker.stats().running, worker.stats().waiting) == (3, 2)
    assert worker.stats().kv_blocks_used == 3
    # The second token of each opens a block.
    worker.begin_iteration()
    assert worker.stats().kv_blocks_used == 6
    assert worker.end_iteration() == Iteration(finished=("three",), tokens=3, waiting=2)


def test_who_comes_during_an_iteration_is_not_told_as_waiting() -> None:
    """As on vLLM: two prompts sent while the first was computed read "running 1, waiting 0"."""
    worker = DecodeWorker(UNIT, 1, kv_capacity_tokens=1024)
    worker.submit("first", 8, 3)
    worker.begin_iteration()
    worker.submit("meanwhile", 8, 3)
    assert worker.end_iteration().waiting == 0
    assert worker.queued == 1
    _, second = iterate(worker)
    assert second.waiting == 1
    worker.begin_iteration()
    worker.abort("meanwhile")
    assert worker.end_iteration().waiting == 0


def test_a_request_that_can_never_run_is_refused_at_once() -> None:
    worker = DecodeWorker(UNIT, 2, kv_capacity_tokens=32)
    with pytest.raises(RequestTooLargeError, match=r"needs 3 KV blocks of 16 tokens.* has 2"):
        worker.submit("a", 30, 4)
    worker.submit("just", 30, 3)
    with pytest.raises(RequestTooLargeError, match="3 sequences, batch limit 2"):
        worker.submit("wide", 1, 1, sequences=3)
    assert worker.waiting == ("just",)


def test_an_abort_frees_the_slot_and_the_blocks_at_once() -> None:
    worker = DecodeWorker(UNIT, 1)
    worker.submit("a", 100, 100)
    worker.submit("b", 1, 1)
    worker.submit("c", 1, 1)
    iterate(worker)
    assert worker.abort("a")
    assert worker.abort("c")
    assert not worker.abort("a")
    assert worker.stats().kv_blocks_used == 0
    assert [i.finished for i in run_out(worker)] == [("b",)]


def test_an_abort_in_flight_takes_no_token() -> None:
    worker = DecodeWorker(UNIT, 2)
    worker.submit("a", 1, 5)
    worker.submit("b", 1, 5)
    worker.begin_iteration()
    assert worker.abort("b")
    assert worker.end_iteration() == Iteration(started=("a", "b"), first_tokens=("a",), tokens=1)


@pytest.mark.parametrize(
    ("prompt_tokens", "decode_tokens", "sequences"), [(-1, 1, 1), (1, 0, 1), (1, 1, 0)]
)
def test_lengths_that_make_no_sense_are_refused(
    prompt_tokens: int, decode_tokens: int, sequences: int
) -> None:
    with pytest.raises(ValueError, match="must be"):
        DecodeWorker(UNIT, 1).submit("a", prompt_tokens, decode_tokens, sequences=sequences)


def test_an_id_in_use_and_calls_out_of_turn_are_refused() -> None:
    worker = DecodeWorker(UNIT, 1)
    worker.submit("a", 1, 2)
    with pytest.raises(ValueError, match="already here"):
        worker.submit("a", 1, 2)
    with pytest.raises(RuntimeError, match="without begin_iteration"):
        worker.end_iteration()
    worker.begin_iteration()
    with pytest.raises(RuntimeError, match="twice"):
        worker.begin_iteration()
    with pytest.raises(KeyError):
        worker.decode_tokens("nobody")
