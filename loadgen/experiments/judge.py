"""Judging the paper's claims by numbers: is a policy better than its rivals, and always?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.experiments.document import Verdict
from loadgen.experiments.lines import Line, Results

TIE = 0.01
"""Two numbers within one per cent are called equal."""


@dataclass(frozen=True, slots=True)
class Target:
    """A measure that a weight vector is meant to improve.

    Attributes:
        key: among the measured values.
        title: for people.
        unit: written behind numbers.
        factor: shown = measured times this.
        better: -1 when less is better, 1 when more is.
    """

    key: str
    title: str
    unit: str = ""
    factor: float = 1.0
    better: int = -1


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy against the best of its rivals on one measure.

    Attributes:
        target: the measure.
        mine: mean over the seeds.
        rival: label of the best rival by mean. best: its mean.
        gains: by seed, how much better than that seed's best rival; 0.1 is ten per cent.
    """

    target: Target
    mine: float
    rival: str
    best: float
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Mean gain over the best rival by mean."""
        return _gain(self.mine, self.best, self.target.better)

    @property
    def wins(self) -> bool:
        """Better on average, and worse under no seed."""
        return self.gain > TIE and min(self.gains) > -TIE

    @property
    def loses(self) -> bool:
        """Worse on average."""
        return self.gain < -TIE

    def sentence(self) -> str:
        """Write the comparison down."""
        target = self.target
        word = "equal to" if abs(self.gain) <= TIE else "against"
        return (
            f"{target.title} {_number(self.mine * target.factor)}{target.unit} {word} "
            f"{_number(self.best * target.factor)} of {self.rival}"
        )


def compare(subject: Line, rivals: Sequence[Line], target: Target, results: Results) -> Comparison:
    """Compare a line with the best of others, on average and seed by seed."""
    mine = subject.values(target.key, results)
    means = {rival.label: rival.mean(target.key, results) for rival in rivals}
    best = min(means, key=lambda label: -target.better * means[label])
    gains = []
    for number, value in enumerate(mine):
        others = [rival.values(target.key, results)[number] for rival in rivals]
        known = [other for other in others if other is not None]
        if value is not None and known:
            gains.append(max(_worst_gain(value, known, target.better), -1e9))
    return Comparison(target, subject.mean(target.key, results), best, means[best], tuple(gains))


def verdict(comparisons: Sequence[Comparison]) -> Verdict:
    """All better: confirmed. None worse, or at least half better: with conditions. Else not."""
    if all(item.wins for item in comparisons):
        return Verdict.CONFIRMED
    won = sum(item.gain > TIE for item in comparisons)
    if won and (not any(item.loses for item in comparisons) or 2 * won >= len(comparisons)):
        return Verdict.CONDITIONS
    return Verdict.NOT_REPRODUCED


def percent(value: float) -> str:
    """Write a share as a signed per cent."""
    return f"{100 * value:+.0f} %"


def number(value: float) -> str:
    """Write a number with three significant digits."""
    return _number(value)


def _worst_gain(value: float, others: Sequence[float], better: int) -> float:
    return min(_gain(value, other, better) for other in others)


def _gain(mine: float, other: float, better: int) -> float:
    if other == 0:
        return 0.0 if mine == 0 else float(better) * (1.0 if mine > 0 else -1.0)
    return better * (mine - other) / abs(other)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
