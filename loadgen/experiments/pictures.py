"""PNGs from the charts of a document; nothing here knows what an experiment is."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from loadgen.experiments.document import Chart, Panel, Series

COLOURS = {
    "round_robin": "#9aa3ad",
    "random": "#c9ced4",
    "least_outstanding": "#6b7683",
    "power_of_two": "#b79b6c",
    "central_fcfs": "#8fbfe0",
    "central_shortest_first": "#2f7fb8",
    "published, zero prices": "#f0b27a",
    "online_lp published": "#d9772b",
    "online_lp forward (shipped)": "#2e8b57",
    "true_jsq (true lengths)": "#8a6fb0",
    "hindsight bound (LP)": "#000000",
}
"""The policies keep their colours in every picture."""
OTHERS = ("#1f5fa8", "#d98c2b", "#3a8f5c", "#a2476b", "#6b57a5", "#4b4b4b", "#8c6d31", "#17becf")
DPI = 80
PANEL_INCHES = (6.4, 4.0)
LEGEND_INCHES = 0.55
GRID = "#e4e4e4"
LOG_LABELS = (1.0, 2.0, 5.0)
NARROW_LOG = 4.0
"""A log axis that spans less than this factor is labelled as evenly as a plain one."""
NARROW_LABELS = 6
NAME_CHARACTERS = 13
"""Width of a group's name under bars; longer ones are broken."""
LEGEND_CHARACTERS = 95
"""Of labels and handles that fit beside each other below one panel."""
HANDLE_CHARACTERS = 8
LEGEND_COLUMNS_MAX = 5


def draw_chart(chart: Chart, folder: Path) -> Path:
    """Draw a chart to NAME.png in a folder."""
    # Built without pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(chart.panels)
    rows, across = (count + 1) // 2, min(count, 2)
    size = (PANEL_INCHES[0] * across, PANEL_INCHES[1] * rows + LEGEND_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(chart.title, fontsize=11)
    axes = figure.subplots(rows, across, squeeze=False).ravel()
    for each, panel in zip(axes, chart.panels, strict=False):
        _draw_panel(each, panel)
    for spare in axes[count:]:
        spare.set_axis_off()
    handles: dict[str, Artist] = {}
    for each in axes[:count]:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=_legend_columns(list(handles), across),
            fontsize=8,
            frameon=False,
        )
    path = folder / f"{chart.name}.png"
    figure.savefig(path, dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return path


def _legend_columns(labels: list[str], panels_across: int) -> int:
    """As many as fit the width of the picture."""
    widest = max(len(label) for label in labels) + HANDLE_CHARACTERS
    return max(1, min(len(labels), LEGEND_COLUMNS_MAX, LEGEND_CHARACTERS * panels_across // widest))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    draw = {"bars": _draw_bars, "lines": _draw_lines, "points": _draw_points}[panel.kind]
    draw(axes, panel)
    if panel.reference is not None:
        axes.axhline(panel.reference, color="#444444", lw=0.8)
    axes.set_title(panel.title, loc="left", fontsize=9)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    for axis, log in ((axes.xaxis, panel.log_x), (axes.yaxis, panel.log_y)):
        if log:
            label_log(axis)
    axes.grid(visible=True, axis="both" if panel.kind != "bars" else "y", color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_log(axis: Axis) -> None:
    """Label 1, 2, 5 of every decade, or evenly where fewer than two of these are in sight."""
    low, high = axis.get_view_interval()
    if high / low < NARROW_LOG:
        between = MaxNLocator(NARROW_LABELS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        axis.set_major_locator(FixedLocator([tick for tick in between if low <= tick <= high]))
    else:
        axis.set_major_locator(LogLocator(subs=LOG_LABELS))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _draw_bars(axes: Axes, panel: Panel) -> None:
    """Groups of bars; on a log axis they grow from the reference."""
    width = 0.84 / max(1, len(panel.series))
    names = panel.series[0].x if panel.series else ()
    base = panel.reference if panel.log_y and panel.reference is not None else 0.0
    for position, item in enumerate(panel.series):
        heights = np.array([np.nan if value is None else value for value in item.y])
        places = np.arange(len(item.x)) + (position - (len(panel.series) - 1) / 2) * width
        axes.bar(
            places,
            heights - base,
            width * 0.94,
            bottom=base,
            color=_colour(item, position),
            label=item.label,
        )
    broken = [textwrap.fill(str(name), NAME_CHARACTERS) for name in names]
    axes.set_xticks(np.arange(len(names)), broken)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for position, item in enumerate(panel.series):
        x, y, low, high = _numbers(item)
        colour = _colour(item, position)
        axes.plot(x, y, marker="o", ms=3.5, lw=1.5, color=colour, label=item.label)
        if low.size:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    if any(isinstance(value, str) for item in panel.series for value in item.x):
        names = max((item.x for item in panel.series), key=len)
        axes.set_xticks(np.arange(len(names)), [str(name) for name in names])


def _draw_points(axes: Axes, panel: Panel) -> None:
    """Curves through points with a spread on the y axis; one point is a marker alone."""
    for position, item in enumerate(panel.series):
        x, y, low, high = _numbers(item)
        errors = np.vstack([y - low, high - y]) if low.size else None
        axes.errorbar(
            x,
            y,
            yerr=errors,
            fmt="o-" if x.size > 1 else "s",
            ms=4.5,
            lw=1.0,
            elinewidth=0.7,
            color=_colour(item, position),
            label=item.label,
        )


def _numbers(item: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    named = any(isinstance(value, str) for value in item.x)
    x = np.arange(len(item.x)) if named else np.array(item.x, dtype=float)
    y, low, high = (
        np.array([np.nan if value is None else value for value in values], dtype=float)
        for values in (item.y, item.low, item.high)
    )
    return x, y, low, high


def _colour(item: Series, position: int) -> str:
    return COLOURS.get(item.label, OTHERS[position % len(OTHERS)])
