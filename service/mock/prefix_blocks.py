"""The prefix cache of one decode worker: which pieces of prompts are still in its KV memory.

As in vLLM a piece is found from the moment at which its request is admitted, what running requests
use stays, and what nobody uses is evicted least recently used first, the ends of prompts before
their heads, when its memory is wanted. Differs: memory that requests share is counted for each of
them, so the batch holds no more than without the cache; answers are not kept.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PrefixBlocks:
    """Pieces of prompts by id; equal ids mean equal prompts up to there.

    Args:
        piece_tokens: prompt tokens of a piece; 0 keeps nothing.

    Attributes:
        queries: prompt tokens looked up. hits: of these, found.
    """

    def __init__(self, piece_tokens: int) -> None:
        if piece_tokens < 0:
            raise ValueError("piece_tokens must not be negative")
        self._piece_tokens = piece_tokens
        self._used: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.queries = 0
        self.hits = 0

    def enter(self, ids: Sequence[int], prompt_tokens: int, free_tokens: int) -> int:
        """A prompt is admitted; answers how many of its tokens need not be computed.

        At least one token of every prompt is computed, for the first token of its answer.
        """
        if not self._piece_tokens:
            return 0
        found = 0
        for piece in ids:
            if piece not in self._used and piece not in self._idle:
                break
            found += 1
        for piece in ids:
            self._used[piece] += 1
            self._idle.pop(piece, None)
        self._evict(free_tokens)
        hits = max(0, min(found * self._piece_tokens, prompt_tokens - 1))
        self.queries += prompt_tokens
        self.hits += hits
        return hits

    def leave(self, ids: Sequence[int], free_tokens: int) -> None:
        """A request that was admitted holds its memory no more."""
        if not self._piece_tokens:
            return
        for piece in reversed(ids):
            self._used[piece] -= 1
            if not self._used[piece]:
                del self._used[piece]
                self._idle[piece] = None
        self._evict(free_tokens)

    def _evict(self, free_tokens: int) -> None:
        while len(self._idle) * self._piece_tokens > free_tokens:
            self._idle.popitem(last=False)
