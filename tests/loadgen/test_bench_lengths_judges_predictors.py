"""The pinball loss: smaller for whoever knows more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from loadgen.bench_lengths import LEVELS, lengths, pinball
from loadgen.trace_record import TraceRequest


def test_what_depends_on_the_prompt_is_predicted_better_by_its_length() -> None:
    rng = np.random.default_rng(1)
    trace = [
        TraceRequest(
            arrival_s=float(at),
            prompt_tokens=prompt,
            decode_tokens=max(1, int(prompt * rng.uniform(0.8, 1.2))),
        )
        for at, prompt in enumerate(rng.choice([16, 1024], 600).tolist())
    ]
    number = pinball("one number (the default)", trace)
    whole, by_length = pinball("one distribution", trace), pinball("by prompt length", trace)
    assert by_length["mean"] < 0.6 * whole["mean"] < whole["mean"] < number["mean"]
    assert set(whole) == {*(f"q{level:g}" for level in LEVELS), "mean"}


def test_the_loss_of_a_constant_is_the_textbooks() -> None:
    trace = [TraceRequest(arrival_s=0.0, prompt_tokens=4, decode_tokens=356)] * 20
    # The default is 256: 100 too few costs the level times 100.
    found = pinball("one number (the default)", trace)
    assert [found[f"q{level:g}"] for level in LEVELS] == pytest.approx([50, 90, 99])


def test_the_command_writes_its_summary(tmp_path: Path) -> None:
    lengths(out=tmp_path, requests=200)
    summary = orjson.loads((tmp_path / "summary.json").read_bytes())
    assert summary["requests"] == 200
    assert set(summary["pinball_loss_tokens"]) == {
        "one number (the default)",
        "one distribution",
        "by prompt length",
    }
