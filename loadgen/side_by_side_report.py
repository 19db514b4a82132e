"""Routers side by side: pooled latencies, throughput, the engines' own counters, ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.comparison import seconds_text, value_at
from loadgen.engine_watch import (
    GAP_COUNT,
    GAP_SUM,
    PREEMPTIONS,
    QUEUE_COUNT,
    QUEUE_SUM,
    RUNNING,
    TOKENS,
    WAITING,
)
from loadgen.outcomes import End
from loadgen.side_by_side import OURS
from loadgen.summary import RunContext, policy_summary, stats

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadgen.side_by_side import Run, SideBySideSpec
    from loadgen.summary import JsonValue

AIM_TTFT = 0.5
AIM_THROUGHPUT = 0.98
AIM_P99 = 1.0
NOTHING = "-"
MEASURES = (
    ("ttft_mean", "mean TTFT", ("ttft_s", "mean"), AIM_TTFT, True),
    ("ttft_p99", "p99 of TTFT", ("ttft_s", "p99"), AIM_P99, True),
    (
        "output_tokens_per_s",
        "output tokens/s, to the last answer",
        ("output_tokens_per_s",),
        AIM_THROUGHPUT,
        False,
    ),
    (
        "arriving_tokens_per_s",
        "output tokens/s, while requests arrive",
        ("engines", "arriving_tokens_per_s"),
        AIM_THROUGHPUT,
        False,
    ),
)
"""Key, title, place in a summary, aim of ours over the best other, whether less is better."""
COLUMNS = (
    ("TTFT mean", ("ttft_s", "mean"), "s"),
    ("TTFT p50", ("ttft_s", "p50"), "s"),
    ("TTFT p99", ("ttft_s", "p99"), "s"),
    ("end-to-end mean", ("e2e_s", "mean"), "s"),
    ("end-to-end p99", ("e2e_s", "p99"), "s"),
    ("output tokens/s, to the last answer", ("output_tokens_per_s",), "n"),
    ("output tokens/s, while requests arrive", ("engines", "arriving_tokens_per_s"), "n"),
    ("completed of sent", (), "ends"),
    ("engine queue, mean wait", ("engines", "queue_s_mean"), "s"),
    ("engine queue, mean length", ("engines", "waiting_mean"), "1"),
    ("engine queue, longest", ("engines", "waiting_max"), "n"),
    ("engine batch, mean", ("engines", "running_mean"), "1"),
    ("engine preemptions", ("engines", "preemptions"), "n"),
    ("engine iteration", ("engines", "iteration_s_mean"), "s"),
    ("tokens in one event", ("tokens_per_event",), "2"),
)


def side_by_side_summary(
    spec: SideBySideSpec, capacity_tokens_per_s: float, runs: Sequence[Run], command: str
) -> dict[str, JsonValue]:
    """Make the content of summary.json."""
    contenders: dict[str, JsonValue] = {
        name: _pooled([run for run in runs if run.contender == name]) for name in spec.contenders
    }
    rounds: list[JsonValue] = [
        {run.contender: _pooled([run]) for run in runs if run.repetition == repetition}
        for repetition in range(spec.repetitions)
    ]
    return {
        "command": command,
        "setting": {
            "engines": len(spec.workers),
            "batch_limit": spec.batch_limit,
            "trace": spec.trace.name,
            "decode_tokens_max": spec.decode_tokens_max,
            "load": spec.load,
            "capacity_tokens_per_s": capacity_tokens_per_s,
            "duration_s": spec.duration_s,
            "repetitions": spec.repetitions,
            "seed": spec.seed,
        },
        "contenders": contenders,
        "verdict": verdict(contenders, rounds),
        "runs": [_one(run) for run in runs],
    }


def verdict(contenders: dict[str, JsonValue], rounds: Sequence[JsonValue]) -> JsonValue:
    """Compare ours with the best that any router of others reached, measure by measure.

    The best TTFT, the best p99 and the best throughput may be three different routers'.

    Args:
        contenders: what each came to over all its repetitions.
        rounds: the same for each repetition alone: they tell how far chance goes.
    """
    ratios = _ratios(contenders)
    if ratios is None:
        return None
    each = [found for one in rounds if isinstance(one, dict) and (found := _ratios(one))]
    met = {
        key: (ratio := ratios[key]) is not None and (ratio <= aim if less else ratio >= aim)
        for key, _, _, aim, less in MEASURES
    }
    return {
        "ratio_to_best_of_others": {**ratios},
        "in_each_repetition": {key: [found[key] for found in each] for key in ratios},
        "aim_met": {**met},
    }


def _ratios(contenders: dict[str, JsonValue]) -> dict[str, float | None] | None:
    others = [each for name, each in contenders.items() if not name.startswith("bidgate")]
    ours = contenders.get(OURS)
    if ours is None or not others:
        return None
    return {key: _over(ours, others, path, smallest=less) for key, _, path, _, less in MEASURES}


def markdown(summary: dict[str, JsonValue]) -> str:
    """Write the comparison as Markdown: setting, table, ratios; nothing is left out."""
    setting, contenders = summary["setting"], summary["contenders"]
    assert isinstance(setting, dict)
    assert isinstance(contenders, dict)
    lines = [
        f"`{summary['command']}`",
        "",
        f"{setting['engines']} engines, batch {setting['batch_limit']}, {setting['trace']} lengths "
        f"cut at {setting['decode_tokens_max']} tokens, load {setting['load']} of the "
        f"{_text(value_at(setting, ('capacity_tokens_per_s',)), 'n')} output tokens/s that the "
        f"saturated engines made, arrivals for {setting['duration_s']} s, {setting['repetitions']} "
        f"runs each, seed {setting['seed']}.",
        "",
        "| | " + " | ".join(contenders) + " |",
        "|---|" + "---:|" * len(contenders),
    ]
    for title, path, unit in COLUMNS:
        cells = [_cell(each, path, unit) for each in contenders.values()]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_verdict_lines(summary["verdict"])]) + "\n"


def fill(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of `name` in a page.

    Raises:
        ValueError: the page has no such markers.
    """
    begin, end = f"<!-- {name}: written by make bench-vllm -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{path} has no place for {name}: it needs the lines {begin} and {end}")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def _pooled(runs: Sequence[Run]) -> JsonValue:
    """All runs of one contender: latencies of all requests, tokens over the sum of the spans."""
    parts = [policy_summary(run.records, run.sent, RunContext()) for run in runs]
    completed = [
        record for run in runs for record in run.records if record.outcome is End.COMPLETED
    ]
    spans_s = sum(value_at(part, ("span_s",)) or 0.0 for part in parts)
    tokens = sum(record.output_tokens for run in runs for record in run.records)
    events = sum(record.output_events for run in runs for record in run.records)
    return {
        "sent": sum(run.sent for run in runs),
        "completed": len(completed),
        "ttft_s": stats([record.ttft_s for record in completed if record.ttft_s is not None]),
        "e2e_s": stats([record.e2e_s for record in completed]),
        "output_tokens_per_s": tokens / spans_s if spans_s > 0 else None,
        "tokens_per_event": tokens / events if events else None,
        "answers_of_wrong_length": sum(
            record.output_tokens != record.decode_tokens for record in completed
        ),
        "send_lateness_s": stats([r.sent_s - r.arrival_s for run in runs for r in run.records]),
        "engines": _engines(runs),
    }


def _engines(runs: Sequence[Run]) -> JsonValue:
    """The engines' own counters, summed or averaged over the runs."""
    queued = sum(run.engines.grown(QUEUE_COUNT) for run in runs)
    gaps = sum(run.engines.grown(GAP_COUNT) for run in runs)
    waited_s = sum(run.engines.grown(QUEUE_SUM) for run in runs)
    gaps_s = sum(run.engines.grown(GAP_SUM) for run in runs)
    waiting = [run.engines.mean(WAITING, run.arrivals_end_s) for run in runs]
    running = [run.engines.mean(RUNNING, run.arrivals_end_s) for run in runs]
    rates = [run.engines.rate_per_s(TOKENS, run.arrivals_end_s) for run in runs]
    known = [rate for rate in rates if rate is not None]
    return {
        "arriving_tokens_per_s": sum(known) / len(known) if known else None,
        "queue_s_mean": waited_s / queued if queued else None,
        "iteration_s_mean": gaps_s / gaps if gaps else None,
        "waiting_mean": sum(waiting) / len(waiting),
        "waiting_max": max(run.engines.most(WAITING) for run in runs),
        "running_mean": sum(running) / len(running),
        "preemptions": sum(run.engines.grown(PREEMPTIONS) for run in runs),
    }


def _one(run: Run) -> JsonValue:
    return {
        "contender": run.contender,
        "repetition": run.repetition,
        **policy_summary(run.records, run.sent, RunContext()),
        "engines": _engines([run]),
    }


def _over(
    ours: JsonValue, others: Sequence[JsonValue], path: tuple[str, ...], *, smallest: bool
) -> float | None:
    mine = value_at(ours, path)
    theirs = [value for each in others if (value := value_at(each, path)) is not None]
    if mine is None or not theirs:
        return None
    best = min(theirs) if smallest else max(theirs)
    return mine / best if best else None


def _verdict_lines(found: JsonValue) -> list[str]:
    if not isinstance(found, dict):
        return []
    lines = [
        f"`{OURS}` over the best of the routers that are not bidgate, each measure by itself (in "
        "brackets the same in each repetition alone):"
    ]
    each = found["in_each_repetition"]
    assert isinstance(each, dict)
    for key, title, _, aim, less in MEASURES:
        ratio = value_at(found, ("ratio_to_best_of_others", key))
        met = value_at(found, ("aim_met", key))
        told = f"aim at {'most' if less else 'least'} {aim:g}: {'met' if met else 'missed'}"
        alone = each[key]
        assert isinstance(alone, list)
        lines.append(f"- {title}: {_ratio(ratio)} ({', '.join(map(_ratio, alone))}; {told})")
    return lines


def _ratio(value: JsonValue) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else NOTHING


def _cell(contender: JsonValue, path: tuple[str, ...], unit: str) -> str:
    if unit == "ends":
        completed, sent = (value_at(contender, (key,)) or 0.0 for key in ("completed", "sent"))
        return f"{completed:.0f} of {sent:.0f}"
    return _text(value_at(contender, path), unit)


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return NOTHING
    match unit:
        case "s":
            return seconds_text(value)
        case "1" | "2":
            return f"{value:.{unit}f}"
        case _:
            return f"{value:,.0f}"
