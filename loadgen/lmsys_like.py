"""The embedded default length distribution, "lmsys-like": a small table and its sampler.

How the table was made, from aggregate figures about LMSYS-Chat-1M only (Zheng et al., 2023), no
row of the data set: (1) a 37 x 41 histogram of whitespace words per conversation, user words by
assistant words, over the 908,430 conversations with fewer than 500 and 600 words; (2) the
published mean token counts of a first turn, 92.2 in the prompt and 207.4 in the answer. The
prompt axis is scaled by 92.2 / 59.45 = 1.551 tokens per word and the answer axis by 207.4 /
159.90 = 1.297, so that both means are the published ones. The histogram's prompt bins are merged
to twelve rows; each row keeps its share and 13 quantiles of the answer given that prompt length,
read off the row's own histogram with linear interpolation inside bins. That keeps the joint
dependence: answers to one-word prompts average 43 tokens, to prompts of 24 to 61 tokens about
240.

What a sample has: mean prompt about 92 tokens, mean answer about 210 (the straight lines between
the quantiles add 1 %), standard deviation of the answer about 190, longest prompt 775, longest
answer 778 tokens. What it leaves out: the 9 % of conversations outside the box, later turns and
their history.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

ANSWER_PROBABILITIES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

# share of requests, prompt tokens from, to, answer tokens at ANSWER_PROBABILITIES
PROMPT_ROWS = (
    (0.0513, 1, 2, (1, 1, 1, 2, 3, 8, 9, 10, 25, 42, 115, 182, 593)),
    (0.0628, 2, 7, (1, 2, 4, 11, 22, 37, 56, 83, 121, 186, 274, 342, 778)),
    (0.0806, 7, 12, (1, 8, 16, 39, 67, 95, 127, 173, 222, 274, 344, 403, 778)),
    (0.0772, 12, 16, (1, 12, 24, 58, 91, 127, 170, 215, 260, 311, 386, 451, 778)),
    (0.1185, 16, 24, (1, 17, 35, 81, 131, 189, 245, 300, 361, 437, 543, 621, 778)),
    (0.1554, 24, 38, (1, 12, 19, 43, 74, 122, 195, 264, 321, 390, 508, 607, 778)),
    (0.1049, 38, 61, (1, 13, 27, 55, 99, 163, 232, 293, 353, 436, 562, 659, 778)),
    (0.1331, 61, 111, (1, 1, 2, 35, 78, 138, 201, 253, 308, 390, 522, 636, 778)),
    (0.0733, 111, 202, (1, 3, 12, 40, 80, 120, 169, 233, 310, 405, 540, 650, 778)),
    (0.0770, 202, 367, (1, 3, 11, 28, 58, 95, 138, 191, 257, 348, 481, 596, 778)),
    (0.0469, 367, 575, (1, 6, 12, 29, 69, 109, 155, 213, 284, 367, 495, 610, 778)),
    (0.0191, 575, 775, (1, 13, 26, 69, 110, 163, 216, 278, 349, 438, 545, 655, 778)),
)

SAMPLE_BLOCK = 1024
"""Lengths are drawn this many at a time, so that a stream does not depend on how it is read."""


def sample_lengths(rng: np.random.Generator, requests: int) -> IntArray:
    """Draw prompt and answer lengths from the table.

    Args:
        rng: source of all randomness.
        requests: how many to draw.

    Returns:
        (requests, 2) integers: prompt tokens, decode tokens; all >= 1. The prompt is log-uniform
        inside its row; the answer follows the row's quantiles, straight lines between them.
    """
    shares = np.array([row[0] for row in PROMPT_ROWS])
    low = np.array([row[1] for row in PROMPT_ROWS], dtype=float)
    high = np.array([row[2] for row in PROMPT_ROWS], dtype=float)
    row_of = np.searchsorted(np.cumsum(shares / shares.sum()), rng.random(requests), side="right")
    row_of = np.minimum(row_of, len(PROMPT_ROWS) - 1)
    inside, rank = rng.random(requests), rng.random(requests)
    prompt = low[row_of] * (high[row_of] / low[row_of]) ** inside
    answer = np.empty(requests)
    for index, row in enumerate(PROMPT_ROWS):
        chosen = row_of == index
        answer[chosen] = np.interp(rank[chosen], ANSWER_PROBABILITIES, row[3])
    lengths = np.maximum(np.rint(np.stack([prompt, answer], axis=1)), 1.0)
    whole: IntArray = lengths.astype(np.int64)
    return whole


def lengths_stream(seed: int) -> Iterator[tuple[int, int]]:
    """Yield (prompt tokens, decode tokens) without end; one seed gives one stream."""
    rng = np.random.default_rng(seed)
    for _ in itertools.count():
        for prompt_tokens, decode_tokens in sample_lengths(rng, SAMPLE_BLOCK):
            yield int(prompt_tokens), int(decode_tokens)
