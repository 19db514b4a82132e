"""KV blocks of one decode worker, counted without touching the sequences that grow.

All growing sequences gain one token per step, so a sequence opens a new block in every step that
is congruent to one number modulo the block size: a count per residue tells what a step needs.
"""

from __future__ import annotations


class KvBlocks:
    """Allocated blocks and the tokens in them; never more than there are.

    Args:
        capacity_tokens: M; rounded down to whole blocks.
        block_tokens: block size.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        if block_tokens < 1 or capacity_tokens < block_tokens:
            raise ValueError("block_tokens and the KV capacity in blocks must be at least 1")
        self.block_tokens = block_tokens
        self.total = capacity_tokens // block_tokens
        self.used = 0
        self.tokens = 0
        self.growing = 0
        self._opening = [0] * block_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that the free blocks have room for."""
        return (self.total - self.used) * self.block_tokens

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens of one sequence."""
        return -(-tokens // self.block_tokens)

    def fits(self, sequences: int, tokens: int) -> bool:
        """Whether so many sequences of so many tokens each can be allocated now."""
        return self.used + sequences * self.blocks(tokens) <= self.total

    def take(self, sequences: int, tokens: int) -> None:
        """Allocate for so many sequences of so many tokens each."""
        self.used += sequences * self.blocks(tokens)
        self.tokens += sequences * tokens

    def give(self, sequences: int, tokens: int) -> None:
        """Free what so many sequences of so many tokens each hold."""
        self.used -= sequences * self.blocks(tokens)
        self.tokens -= sequences * tokens

    def start_growing(self, sequences: int, step: int, tokens: int) -> None:
        """Let sequences grow by a token a step; in the given step they hold so many each."""
        self.growing += sequences
        self._opening[(1 - tokens + step) % self.block_tokens] += sequences

    def stop_growing(self, sequences: int, step: int, tokens: int) -> None:
        """Undo start_growing, with the same arguments."""
        self.growing -= sequences
        self._opening[(1 - tokens + step) % self.block_tokens] -= sequences

    def suffices_for(self, step: int) -> bool:
        """Whether every growing sequence can have its token of this step."""
        return self.used + self._opening[step % self.block_tokens] <= self.total

    def grow(self, step: int) -> None:
        """Give every growing sequence its token of this step."""
        self.used += self._opening[step % self.block_tokens]
        self.tokens += self.growing
