"""The cache-aware rule of other routers, which ours is measured against, and the traffic for it."""

from __future__ import annotations

import gzip
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from loadgen.cache_aware import STICKY, CacheAware, CacheRule
from loadgen.rebuilt_heads import Heads
from loadgen.shared_prefixes import (
    PIECE_TOKENS,
    SYSTEM_TOKENS,
    conversations,
    hot_system_prompt,
    nothing_shared,
)
from loadgen.traces import open_trace
from service.control.events import (
    Arrived,
    Left,
    Outcome,
    Prefix,
    Refusal,
    Refuse,
    Request,
    Start,
    WorkerChanged,
    WorkerJoined,
    WorkerSpec,
    WorkerState,
)

if TYPE_CHECKING:
    from pathlib import Path

PIECE = 64


def router(rule: CacheRule, workers: int = 3) -> CacheAware:
    made = CacheAware(rule)
    for number in range(workers):
        made.handle(WorkerJoined(WorkerSpec(worker_id=f"w{number}", batch_limit=8)), 0.0)
    return made


def send(made: CacheAware, name: str, *pieces: int) -> str:
    """Let a prompt of these pieces come; where it was sent."""
    prefix = Prefix(pieces, tuple(PIECE * (n + 1) for n in range(len(pieces)))) if pieces else None
    tokens = PIECE * max(1, len(pieces))
    made.handle(
        Arrived(Request(request_id=name, arrival_s=0.0, prompt_tokens=tokens, prefix=prefix)), 0.0
    )
    (command,) = made.tick(0.0)
    assert isinstance(command, Start)
    return command.worker_id


def test_sticky_follows_the_longest_beginning_whatever_the_load() -> None:
    made = router(STICKY)
    home = send(made, "first", 1, 2)
    assert [send(made, f"r{n}", 1, 2, 3) for n in range(20)] == [home] * 20
    assert send(made, "other", 9) != home


def test_uneven_loads_go_before_the_cache_only_beyond_both_thresholds() -> None:
    made = router(CacheRule(load_gap=2, load_ratio=1.5))
    home = send(made, "first", 1, 2)
    assert [send(made, f"r{n}", 1, 2) for n in range(2)] == [home] * 2
    # Three against none is more than two more, and more than 1.5 times as many.
    assert send(made, "next", 1, 2) != home
    many = router(CacheRule(load_gap=2, load_ratio=100.0), workers=2)
    home = send(many, "first", 1, 2)
    other = send(many, "other", 8)
    assert home != other
    assert [send(many, f"r{n}", 1, 2) for n in range(9)] == [home] * 9


def test_a_short_match_is_no_match() -> None:
    made = router(CacheRule())
    home = send(made, "first", 1)
    assert send(made, "half", 1, 2) == home
    assert send(made, "little", 1, 5, 6, 7) != home


def test_load_falls_when_requests_end_and_the_dead_hold_nothing() -> None:
    made = router(STICKY, workers=2)
    home = send(made, "first", 1, 2)
    made.handle(Left("first", Outcome.COMPLETED, 3), 1.0)
    assert send(made, "cold") == home
    made.handle(WorkerChanged(home, WorkerState.DOWN), 2.0)
    assert send(made, "again", 1, 2) != home
    made.handle(WorkerChanged(home, WorkerState.UP), 3.0)
    assert send(made, "third", 1, 2, 3) != home
    for worker_id in ("w0", "w1"):
        made.handle(WorkerChanged(worker_id, WorkerState.DOWN), 4.0)
    made.handle(Arrived(Request(request_id="late", arrival_s=4.0, prompt_tokens=1)), 4.0)
    (refused,) = made.tick(4.0)
    assert isinstance(refused, Refuse)
    assert refused.reason is Refusal.NO_WORKER


def test_turns_of_a_conversation_repeat_what_was_said() -> None:
    turns = list(islice(conversations(7), 600))
    assert turns == list(islice(conversations(7), 600))
    latest: dict[int, tuple[int, ...]] = {}
    again = 0
    for turn in turns:
        assert len(turn.hash_ids) == turn.prompt_tokens // PIECE_TOKENS
        before = latest.get(turn.hash_ids[0])
        if before is not None:
            again += 1
            assert turn.hash_ids[: len(before)] == before
        latest[turn.hash_ids[0]] = turn.hash_ids
    assert again > 300


def test_half_of_all_prompts_begin_with_the_hot_one_and_none_where_nothing_is_shared() -> None:
    hot = list(islice(hot_system_prompt(3), 1000))
    pieces = SYSTEM_TOKENS // PIECE_TOKENS
    assert sum(r.hash_ids[:pieces] == tuple(range(pieces)) for r in hot) == pytest.approx(500, 0.1)
    own = list(islice(nothing_shared(3), 1000))
    assert [r.prompt_tokens for r in own] == [r.prompt_tokens for r in hot]
    ids = [one for r in own for one in r.hash_ids]
    assert len(set(ids)) == len(ids)


def test_block_ids_are_rebuilt_with_as_many_known_ones_as_the_trace_tells() -> None:
    heads = Heads()
    first = heads.ids(1100, 3, 0)
    second = heads.ids(700, 2, 1)
    # Two whole blocks were seen: the next turn of the first prompt, whose third block was partial.
    third = heads.ids(2600, 6, 2)
    fourth = heads.ids(2100, 5, 2)
    assert second[0] == first[0]
    assert third[:2] == first[:2]
    assert fourth[:2] == third[:2]
    assert len(set(first + second[1:] + third[2:] + fourth[2:])) == 3 + 1 + 4 + 3


def test_mooncake_kept_as_csv_is_told_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.csv.gz"
    rows = ["arrival_s,prompt_tokens,output_tokens,blocks512,prefix_blocks_seen"]
    rows += ["0.0,1100,500,3,0", "1.5,1700,0,4,2"]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    trace = open_trace(str(path))
    assert trace.timed
    first, second = trace.read(0)
    assert (second.arrival_s, second.prompt_tokens, second.decode_tokens) == (1.5, 1700, 1)
    assert second.hash_ids[:2] == first.hash_ids[:2]
    assert second.hash_ids[2] not in first.hash_ids
