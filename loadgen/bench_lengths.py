"""`bidgate-load bench lengths`: how well answer lengths are predicted, in order of arrival."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from loadgen.live import command_line
from loadgen.summary import SUMMARY_FILE, write_json
from loadgen.traces import LMSYS_LIKE, open_trace
from service.control.config import ControlConfig
from service.control.events import Request
from service.control.lengths import LengthPredictor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadgen.summary import JsonValue
    from loadgen.trace_record import TraceRequest

LEVELS = (0.5, 0.9, 0.99)
LEARNT_BY = 0.1
"""This part of the trace is only learnt from."""
PREDICTORS: dict[str, Callable[[Request], Request]] = {
    "one number (the default)": lambda request: request,
    "one distribution": lambda request: replace(request, prompt_tokens=1, group="", fingerprint=""),
    "by prompt length": lambda request: request,
}


def lengths(
    *, out: Path = Path("out/bench/lengths"), trace: str = LMSYS_LIKE, requests: int = 10_000
) -> int:
    """Measure length predictors by pinball loss: each request is predicted, then learnt from.

    Parameters
    ----------
    out
        Directory for summary.json.
    trace
        As for simulate.
    requests
        Most requests to read.
    """
    if requests < 1:
        raise ValueError(f"requests must be at least 1, got {requests}")
    source = open_trace(trace)
    read = list(islice(source.read(0), requests))
    if source.timed:
        read.sort(key=lambda request: request.arrival_s)
    found = {name: pinball(name, read) for name in PREDICTORS}
    losses: dict[str, JsonValue] = {name: dict(loss) for name, loss in found.items()}
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, JsonValue] = {
        "command": command_line(),
        "trace": source.name,
        "requests": len(read),
        "pinball_loss_tokens": losses,
    }
    write_json(summary, out / SUMMARY_FILE)
    table = Table(title=f"{source.name}: pinball loss, tokens; smaller is better")
    for title in ("predictor", *(f"q{level:g}" for level in LEVELS), "mean"):
        table.add_column(title, justify="left" if title == "predictor" else "right")
    for name, loss in found.items():
        table.add_row(name, *(f"{value:.1f}" for value in loss.values()))
    Console().print(table)
    return 0


def pinball(name: str, trace: Sequence[TraceRequest]) -> dict[str, float]:
    """Mean pinball loss in tokens at each level, and their mean.

    The loss at level q of a forecast f for a length o is (q - [o < f]) (o - f); its expectation is
    smallest where f is the q quantile.
    """
    default = ControlConfig().decode_tokens_default
    predictor, total = LengthPredictor(default), np.zeros(len(LEVELS))
    first = int(len(trace) * LEARNT_BY)
    learns = name != next(iter(PREDICTORS))
    for place, one in enumerate(trace):
        request = PREDICTORS[name](
            Request(
                request_id="r",
                arrival_s=0.0,
                prompt_tokens=one.prompt_tokens,
                group=one.group,
                fingerprint=str(one.hash_ids[0]) if one.hash_ids else "",
            )
        )
        if place >= first:
            for at, level in enumerate(LEVELS):
                guess = predictor.quantile(request, level) if learns else float(default)
                over = one.decode_tokens - guess
                total[at] += max(level * over, (level - 1.0) * over)
        if learns:
            predictor.observe(request, one.decode_tokens)
    losses = (total / max(len(trace) - first, 1)).tolist()
    named = dict(zip([f"q{level:g}" for level in LEVELS], losses, strict=True))
    return named | {"mean": sum(losses) / len(losses)}
