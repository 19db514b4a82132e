"""`bidgate-load bench proxy`: what a proxied request costs, and its page."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from loadgen.bench_proxy import DEFAULT, DIRECT, Part, ProxySpec, as_json, measure
from loadgen.cpu import processors
from loadgen.live import command_line, run
from loadgen.plain_worker import EVENTS, PACE_S
from loadgen.summary import SUMMARY_FILE, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue

LAG_GOAL_MS: Final = 20.0
HEAD: Final = """# What a proxied request costs

`{command}`

On {processors} processors, which the load generator, the workers and the router share. Workers are
one process that answers at once; the client only counts bytes. **CPU** is that of the router's
process, scrapes and decisions included. **Lag** is the time of an answer to `/health` asked every
20 ms beside the load: what waits there waits for the event loop (and, on a machine this small, for
the load generator's turn). Each variant is a router of its own, started in turn in every round;
medians over {rounds} rounds. Prompts have 2 KB with a common beginning; every request is read,
queued, priced and counted.
"""
COLUMNS: Final = (
    "load",
    "way",
    "answered",
    "lost",
    "a second",
    "p50, ms",
    "p99, ms",
    "lag p50, ms",
    "lag p99, ms",
    "CPU a request, ms",
    "of one processor",
)


def proxy(
    *,
    out: Path = Path("out/bench/proxy"),
    docs: Path | None = None,
    workers: int = 64,
    streams: int = 16,
    rate: float = 2000.0,
    seconds: float = 3.0,
    rounds: int = 2,
) -> int:
    """Measure the router's processor time, lag and added time; exit 1 if a request is lost.

    Parameters
    ----------
    out
        Directory for summary.json and logs.
    docs
        Page to write.
    workers
        Workers of the streams; small requests go to a sixteenth of them.
    streams
        At once on each worker.
    rate
        Small requests a second in the open loop, straight to a worker and through the router.
    seconds
        How long each part lasts.
    rounds
        Of the variants: affinity, a key with limits, tracing, each on and off.
    """
    spec = ProxySpec(
        workers=workers,
        streams=streams,
        rate_per_s=rate,
        seconds=seconds,
        rounds=rounds,
        log_dir=out / "logs",
    )
    console = Console()
    with console.status("proxy") as status:
        parts = run(measure(spec, status.update))
    text = page(parts, rounds, command_line())
    summary: dict[str, JsonValue] = {
        "command": command_line(),
        "processors": processors(),
        "rounds": rounds,
        "parts": as_json(parts),
    }
    write_json(summary, out / SUMMARY_FILE)
    if docs is not None:
        docs.write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 1 if any(part.lost for part in parts) else 0


def page(parts: Sequence[Part], rounds: int, command: str) -> str:
    """The page: every load by its way, ratios, and what each feature adds."""
    merged = _merged(parts)
    head = "| " + " | ".join(COLUMNS) + " |"
    rule = "|---|---|" + "---:|" * (len(COLUMNS) - 2)
    words = HEAD.format(command=command, processors=processors(), rounds=rounds)
    return "\n".join([words, head, rule, *map(_row, merged), "", *_verdicts(merged), ""])


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Medians over the rounds, in the order of the first."""
    keys = dict.fromkeys((part.load, part.way) for part in parts)
    return [_median([part for part in parts if (part.load, part.way) == key]) for key in keys]


def _median(parts: Sequence[Part]) -> Part:
    def middle(name: str) -> float | None:
        known = [value for value in (getattr(part, name) for part in parts) if value is not None]
        return statistics.median(known) if known else None

    first = parts[0]
    return Part(
        load=first.load,
        way=first.way,
        answered=sum(part.answered for part in parts),
        lost=sum(part.lost for part in parts),
        per_s=middle("per_s") or 0.0,
        p50_ms=middle("p50_ms"),
        p99_ms=middle("p99_ms"),
        lag_p50_ms=middle("lag_p50_ms"),
        lag_p99_ms=middle("lag_p99_ms"),
        cpu_ms=middle("cpu_ms"),
        cpu_share=middle("cpu_share"),
    )


def _row(part: Part) -> str:
    times = (part.p50_ms, part.p99_ms, part.lag_p50_ms, part.lag_p99_ms)
    cells = [part.load, part.way, f"{part.answered}", f"{part.lost}", f"{part.per_s:.0f}"]
    cells += [_number(value, "{:.2f}") for value in times]
    cells += [_number(part.cpu_ms, "{:.3f}"), _number(part.cpu_share, "{:.0%}")]
    return "| " + " | ".join(cells) + " |"


def _verdicts(parts: Sequence[Part]) -> list[str]:
    """Ratios of routed to direct, the streams' cost for an event, and what features add."""
    by_way = {(part.load, part.way): part for part in parts}
    loads = [part.load for part in parts if part.way == DIRECT]
    lines = [_beside(by_way[load, DIRECT], by_way[load, DEFAULT]) for load in loads]
    streams = next((part for part in parts if "streams" in part.load and part.cpu_ms), None)
    if streams is not None:
        lines.append(_of_streams(streams))
    base = next((part for part in parts if part.way == DEFAULT), None)
    for part in parts:
        if base is not None and base.cpu_ms and part.load == base.load and part.cpu_ms:
            ratio = part.cpu_ms / base.cpu_ms
            lines.append(f"- {part.load}, {part.way}: {ratio:.2f} of the CPU as shipped.")
    return lines


def _beside(direct: Part, routed: Part) -> str:
    if not (direct.p50_ms and routed.p50_ms and direct.per_s):
        return f"- {direct.load}: too few answers for a comparison."
    ratio, added_ms = routed.p50_ms / direct.p50_ms, routed.p50_ms - direct.p50_ms
    return (
        f"- {direct.load}, routed over direct: {ratio:.2f} of the median time (+{added_ms:.2f} ms),"
        f" {routed.per_s / direct.per_s:.2f} of the answers a second,"
        f" {routed.lost} of {routed.answered + routed.lost} lost."
    )


def _of_streams(streams: Part) -> str:
    lag_ms = streams.lag_p99_ms or float("inf")
    met = "met" if lag_ms < LAG_GOAL_MS else "**not met**"
    return (
        f"- Streams, one event every {PACE_S:g} s each: {1e3 * (streams.cpu_ms or 0) / EVENTS:.0f}"
        f" µs of CPU an event; lag p99 {lag_ms:.1f} ms, goal {LAG_GOAL_MS:g} ms {met}."
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
