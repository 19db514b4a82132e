"""The picture of a comparison: how many requests had their first token by when, and the tails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loadgen.comparison import value_at
from loadgen.outcomes import End

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from loadgen.outcomes import OutcomeRecord
    from loadgen.summary import JsonValue

COLOURS = ("#7f8c9b", "#d98c2b", "#1f5fa8", "#3a8f5c", "#a2476b", "#6b57a5", "#4b4b4b")
"""Told apart with every common colour blindness; the first is the grey of the reference."""
DPI = 150
STATISTICS = ("mean", "p95", "p99")


def draw_comparison(
    records: Sequence[OutcomeRecord], summary: Mapping[str, JsonValue], path: Path
) -> None:
    """Draw the share of requests against TTFT, and bars of TTFT and end-to-end time, to a PNG."""
    # Built without pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = summary["policies"]
    names = list(policies) if isinstance(policies, dict) else []
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    figure = Figure(figsize=(13.0, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.5, 1.0, 1.0))
    bound_s = value_at(summary.get("ttft_bound_s"), ()) or 0.0
    _draw_distribution(left, _ttft_by_policy(records, names), colours, bound_s)
    _draw_bars(middle, policies, "ttft_s", colours)
    middle.set_title("Time to first token", loc="left", fontsize=10)
    _draw_bars(right, policies, "e2e_s", colours)
    right.set_title("End-to-end time", loc="left", fontsize=10)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _ttft_by_policy(
    records: Sequence[OutcomeRecord], names: Sequence[str]
) -> dict[str, tuple[list[float], int]]:
    """Group TTFTs of completed requests; with each the number of all requests of the policy."""
    found: dict[str, tuple[list[float], int]] = {name: ([], 0) for name in names}
    for record in records:
        times, entered = found[record.policy]
        if record.outcome is End.COMPLETED and record.ttft_s is not None:
            times.append(record.ttft_s)
        found[record.policy] = (times, entered + 1)
    return found


def _draw_distribution(
    axes: Axes,
    ttft_by_policy: Mapping[str, tuple[list[float], int]],
    colours: Mapping[str, str],
    bound_s: float,
) -> None:
    for name, (times, entered) in ttft_by_policy.items():
        if times:
            ordered = np.sort(times)
            share = np.arange(1, len(ordered) + 1) / entered
            axes.step(ordered, share, where="post", color=colours[name], label=name, lw=1.8)
    if bound_s > 0:
        axes.axvline(bound_s, color="#444444", lw=0.8, ls=":")
        axes.annotate(
            f" bound {bound_s:g} s", (bound_s, 0.02), fontsize=8, color="#444444", va="bottom"
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("time to first token, seconds (log scale)")
    axes.set_ylabel("share of all requests sent")
    axes.set_title("First token seen within …", loc="left", fontsize=10)
    axes.grid(visible=True, which="major", color="#e4e4e4", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="upper left")


def _draw_bars(axes: Axes, policies: JsonValue, measure: str, colours: Mapping[str, str]) -> None:
    width = 0.8 / max(1, len(colours))
    for position, (name, colour) in enumerate(colours.items()):
        policy = policies.get(name) if isinstance(policies, dict) else None
        heights = [value_at(policy, (measure, statistic)) or 0.0 for statistic in STATISTICS]
        places = np.arange(len(STATISTICS)) + (position - (len(colours) - 1) / 2) * width
        bars = axes.bar(places, heights, width * 0.92, color=colour, label=name)
        labels = [
            f"{height:#.2g}".rstrip(".") if height < 100 else f"{height:.0f}" for height in heights
        ]
        axes.bar_label(bars, labels=labels, fontsize=7.5, padding=1)
    axes.set_xticks(np.arange(len(STATISTICS)), STATISTICS)
    axes.set_ylabel("seconds")
    axes.margins(y=0.14)
    axes.grid(visible=True, axis="y", color="#e4e4e4", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
