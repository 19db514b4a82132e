"""Made-up prompts with common beginnings, as ids of their pieces of PIECE_TOKENS tokens.

Conversations whose turns repeat all that was said before; one system prompt that is hot; and, to
compare with, prompts as long that have nothing in common. Questions and answers are LMSYS-like.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from loadgen.lmsys_like import lengths_stream
from loadgen.trace_record import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_TOKENS = 64
CONVERSATIONS = 64
"""Conversations that go on at a time: at a few turns a second, some ten seconds between turns."""
OPENING_TOKENS = (256, 1536)
"""What comes before the first question: uniform between these."""
ENDS = 1 / 6
"""Chance that a turn is the last of its conversation."""
CONTEXT_TOKENS_MAX = 8192
"""A conversation that would be longer ends."""
SYSTEM_TOKENS = 1024
HOT_SHARE = 0.5


@dataclass(slots=True)
class _Talk:
    """One conversation: ids of its pieces and how many tokens were said."""

    ids: list[int]
    said: int


def conversations(seed: int) -> Iterator[TraceRequest]:
    """Turns of many conversations, mixed; the one that speaks next is of the half longest silent.

    A turn's prompt is all that was said before, its answer included, and a question.
    """
    rng = np.random.default_rng([seed, 1])
    lengths, ids = lengths_stream(seed), count(1)
    talks = deque(_opened(rng) for _ in range(CONVERSATIONS))
    while True:
        place = int(rng.integers(CONVERSATIONS // 2))
        talk = talks[place]
        del talks[place]
        question, answer = next(lengths)
        prompt = talk.said + question
        while len(talk.ids) < prompt // PIECE_TOKENS:
            talk.ids.append(next(ids))
        yield TraceRequest(0.0, prompt, answer, hash_ids=tuple(talk.ids))
        talk.said = prompt + answer
        over = rng.random() < ENDS or talk.said > CONTEXT_TOKENS_MAX
        talks.append(_opened(rng) if over else talk)


def _opened(rng: np.random.Generator) -> _Talk:
    return _Talk([], int(rng.integers(*OPENING_TOKENS, endpoint=True)))


def hot_system_prompt(seed: int, share: float = HOT_SHARE) -> Iterator[TraceRequest]:
    """Single questions behind SYSTEM_TOKENS tokens, which are the same for a share of them."""
    rng = np.random.default_rng([seed, 2])
    hot = tuple(range(SYSTEM_TOKENS // PIECE_TOKENS))
    ids = count(len(hot))
    for question, answer in lengths_stream(seed):
        prompt = SYSTEM_TOKENS + question
        head = hot if rng.random() < share else ()
        own = prompt // PIECE_TOKENS - len(head)
        yield TraceRequest(0.0, prompt, answer, hash_ids=(*head, *(next(ids) for _ in range(own))))


def nothing_shared(seed: int) -> Iterator[TraceRequest]:
    """The same lengths, every prompt of its own."""
    return hot_system_prompt(seed, share=0.0)
