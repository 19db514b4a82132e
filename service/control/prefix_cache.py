"""3 controller, one worker's prefix cache as guessed from outside: which prompts' heads it holds.

Least recently used chunks go first, and a chunk never outlives the ones before it: a chain is
touched from its end to its head. So what is held of a chain is always a head of it, and the length
of that head is found by bisection. Bounded by the worker's KV capacity and by CHUNKS_MAX.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.control.events import Prefix

CHUNKS_MAX = 65_536
"""Chunks remembered of one worker, about 10 MB; a worker whose memory holds more is guessed low."""
TOKENS_UNKNOWN = 262_144
"""Assumed KV memory of a worker that has not told its own."""


class PrefixCache:
    """Chunks of prompts in the order in which the engine would evict them.

    Attributes:
        tokens: prompt tokens in the chunks.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._answers: dict[int, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def held_chunks(self, prefix: Prefix) -> int:
        """How many chunks from the head of a prompt are held."""
        low, high = 0, len(prefix.hashes)
        while low < high:
            middle = (low + high) // 2
            if prefix.hashes[middle] in self._kept:
                low = middle + 1
            else:
                high = middle
        return low

    def held_tokens(self, prefix: Prefix) -> int:
        """Tokens of a prompt that are held: its chunks, and an answer that it repeats.

        A prompt that goes on where an earlier one of the worker ended is taken for the next turn
        of that conversation, and the answer between them for a part of it. A prompt that cannot be
        told by its text is known by its session, or not at all.
        """
        chunks = self.held_chunks(prefix)
        if chunks:
            goes_on = chunks < len(prefix.hashes)
            answer = self._answers.get(prefix.hashes[chunks - 1], 0) if goes_on else 0
            return prefix.ends[chunks - 1] + answer
        if prefix.session and not prefix.hashes and prefix.session in self._kept:
            return self._kept[prefix.session] + self._answers.get(prefix.session, 0)
        return 0

    def hold(self, prefix: Prefix, prompt_tokens: int, capacity_tokens: float) -> None:
        """A prompt is computed, or found: its chunks are the newest now."""
        if prefix.session and not prefix.hashes:
            self._touch(prefix.session, prompt_tokens)
        for place in range(len(prefix.hashes) - 1, -1, -1):
            before = prefix.ends[place - 1] if place else 0
            self._touch(prefix.hashes[place], prefix.ends[place] - before)
        room = capacity_tokens if capacity_tokens < float("inf") else TOKENS_UNKNOWN
        while self._kept and (self.tokens > room or len(self._kept) > CHUNKS_MAX):
            gone, tokens = self._kept.popitem(last=False)
            self.tokens -= tokens
            self._answers.pop(gone, None)

    def answered(self, prefix: Prefix, decode_tokens: int) -> None:
        """A prompt got its answer, whose memory stays behind it."""
        end = prefix.hashes[-1] if prefix.hashes else prefix.session
        if end in self._kept:
            self._answers[end] = decode_tokens

    def _touch(self, chunk: int, tokens: int) -> None:
        known = self._kept.pop(chunk, 0)
        self.tokens += tokens - known
        self._kept[chunk] = tokens
