"""The embedded table has the published means, keeps the joint dependence, and is seeded."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from loadgen.lmsys_like import (
    ANSWER_PROBABILITIES,
    PROMPT_ROWS,
    SAMPLE_BLOCK,
    lengths_stream,
    sample_lengths,
)


def test_the_table_is_a_distribution() -> None:
    assert sum(row[0] for row in PROMPT_ROWS) == pytest.approx(1.0, abs=1e-3)
    for (_, low, high, answers), later in zip(PROMPT_ROWS, [*PROMPT_ROWS[1:], None], strict=True):
        assert low < high
        assert later is None or later[1] == high
        assert len(answers) == len(ANSWER_PROBABILITIES)
        assert list(answers) == sorted(answers)


def test_samples_have_the_published_means() -> None:
    prompt, decode = sample_lengths(np.random.default_rng(1), 100_000).T
    assert prompt.mean() == pytest.approx(92.2, rel=0.03)
    assert decode.mean() == pytest.approx(210, rel=0.02)
    assert decode.std() == pytest.approx(190, rel=0.03)
    assert prompt.min() == decode.min() == 1


def test_short_prompts_have_short_answers() -> None:
    prompt, decode = sample_lengths(np.random.default_rng(2), 50_000).T
    assert decode[prompt <= 2].mean() < 60
    assert decode[(prompt > 24) & (prompt < 61)].mean() > 225


def test_one_seed_is_one_stream_however_it_is_read() -> None:
    long = list(islice(lengths_stream(7), 2 * SAMPLE_BLOCK))
    assert list(islice(lengths_stream(7), 10)) == long[:10]
    assert list(islice(lengths_stream(8), 10)) != long[:10]
