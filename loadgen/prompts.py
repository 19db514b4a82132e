"""Prompts of an exact length, as token ids or as text; equal block ids give equal prefixes."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from loadgen.trace_record import TraceRequest

    IntArray = npt.NDArray[np.int64]

FIRST_TOKEN_ID = 1000
TOKEN_IDS = 20_000
VOCABULARY_TOKENS = FIRST_TOKEN_ID + TOKEN_IDS
"""Ids are drawn from [FIRST_TOKEN_ID, VOCABULARY_TOKENS): inside every current vocabulary, clear
of the special ones at its start. A smaller vocabulary folds them into what it has above."""
WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be")


class PromptForm(StrEnum):
    """How prompts are sent: token ids are exact; text has one short word per token."""

    TOKEN_IDS = "token-ids"
    TEXT = "text"


def make_prompt(
    request: TraceRequest,
    index: int,
    form: PromptForm,
    block_tokens: int,
    vocabulary_tokens: int = VOCABULARY_TOKENS,
) -> list[int] | str:
    """Make a prompt of request.prompt_tokens tokens.

    Args:
        request: gives the length and the ids of its prefix blocks.
        index: of the request; prompts without block ids differ from each other by it.
        form: token ids or text.
        block_tokens: tokens that one block id stands for.
        vocabulary_tokens: token ids stay below it; more than FIRST_TOKEN_ID.
    """
    ids = _token_ids(request, index, block_tokens)
    if form is PromptForm.TOKEN_IDS:
        tokens: list[int] = (ids % (vocabulary_tokens - FIRST_TOKEN_ID) + FIRST_TOKEN_ID).tolist()
        return tokens
    return " ".join(WORDS[token % len(WORDS)] for token in ids)


def _token_ids(request: TraceRequest, index: int, block_tokens: int) -> IntArray:
    length = request.prompt_tokens
    blocks = [_block(hash_id, block_tokens) for hash_id in request.hash_ids]
    covered = np.concatenate(blocks)[:length] if blocks else np.empty(0, dtype=np.int64)
    rest = np.random.default_rng([index, length]).integers(0, TOKEN_IDS, length - len(covered))
    ids: IntArray = np.concatenate([covered, rest])
    return ids


def _block(hash_id: int, block_tokens: int) -> IntArray:
    return np.random.default_rng([abs(hash_id), 1]).integers(0, TOKEN_IDS, block_tokens)
