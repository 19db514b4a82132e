"""A plain comparison: the same load under a list of rules, one table and one picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.experiments.document import Chart, Panel, Series
from loadgen.experiments.judge import number
from loadgen.experiments.lines import Line, Results, TableSpec, lines_under, pick, tabulate
from loadgen.experiments.rules import FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.cases import Case
    from loadgen.experiments.document import Column, Table
    from loadgen.experiments.experiment import Scale
    from loadgen.experiments.rules import Rule

KEYS = ("ttft_mean_s", "ttft_p95_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s", "tokens_per_s")
NAMES = ("TTFT mean", "TTFT p95", "TTFT p99", "E2E mean", "E2E p99", "tokens/s")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load under several rules; the first line is the one that ratios refer to.

    Attributes:
        title: the load in words.
        lines: one a rule.
    """

    title: str
    lines: tuple[Line, ...]

    def table(self, columns: tuple[Column, ...], results: Results) -> Table:
        """Tabulate against the first line."""
        return tabulate(self.lines, TableSpec(self.title, columns, self.lines[0].label), results)

    def panel(self, results: Results) -> Panel:
        """Draw every rule's measures over those of the first."""
        return Panel(
            kind="bars",
            title=self.title,
            x_label="measure",
            y_label=f"ratio to {self.lines[0].label} (log)",
            series=tuple(self._bars(item, results) for item in self.lines[1:]),
            log_y=True,
            reference=1.0,
        )

    def answer(self, results: Results, subject: str = FORWARD) -> str:
        """Say how one rule did against the best of the others, mean and p99 of TTFT."""
        mine = pick(self.lines, subject)
        told = []
        for key, name in (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99")):
            others = {
                item.label: item.mean(key, results)
                for item in self.lines
                if item.label != subject
                and item.spread(key, results) is not None
                and "bound" not in item.label
            }
            best = min(others, key=lambda label: others[label])
            told.append(
                f"{name} TTFT {number(mine.mean(key, results))} s against "
                f"{number(others[best])} s of {best}, the best of the others"
            )
        return f"{self.title}: {subject} has {'; '.join(told)}."

    def _bars(self, item: Line, results: Results) -> Series:
        y = []
        for key in KEYS:
            mine, base = item.spread(key, results), self.lines[0].spread(key, results)
            known = mine is not None and base is not None and base.mean > 0
            y.append(round(mine.mean / base.mean, 4) if known and mine and base else None)
        return Series(item.label, NAMES, tuple(y))


def compare_rules(title: str, case: Case, rules: Sequence[Rule], scale: Scale) -> Comparison:
    """Put rules under one load; round robin should come first."""
    return Comparison(title, lines_under(case, rules, scale.seeds))


def ratio_chart(
    name: str, title: str, comparisons: Sequence[Comparison], results: Results
) -> Chart:
    """One panel a comparison."""
    return Chart(name, title, tuple(item.panel(results) for item in comparisons))
