"""When requests arrive: seeded point processes, and recorded times at a changed rate.

Each process is a frozen value with times(rate_per_s, rng), an endless stream of arrival times in
seconds. parse_arrivals reads the text form used on the command line. workload.py puts the times
on a trace's requests.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

RECORDED = "recorded"
ARRIVALS_HELP = (
    "poisson | gamma:CV | piecewise:0=0.8,15=1.2 (from second 15 the rate is 1.2 times the asked "
    "one) | diurnal:AMPLITUDE,PERIOD_S | recorded (the trace's own times, scaled to the asked rate)"
)


class ArrivalProcess(Protocol):
    """A way to place arrivals in time."""

    def times(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times, seconds from 0, never falling, without end."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent exponential gaps."""

    def times(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times at a mean rate of rate_per_s."""
        now_s = 0.0
        while True:
            now_s += rng.exponential(1.0 / rate_per_s)
            yield now_s


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma gaps; cv is their standard deviation over their mean, 1 is Poisson."""

    cv: float

    def __post_init__(self) -> None:
        """Refuse a coefficient of variation that no gamma law has."""
        if not (math.isfinite(self.cv) and self.cv > 0):
            raise ValueError(f"gamma: the coefficient of variation must be positive, got {self.cv}")

    def times(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times at a mean rate of rate_per_s; shape 1 / cv^2."""
        shape = 1.0 / self.cv**2
        scale = 1.0 / (rate_per_s * shape)
        now_s = 0.0
        while True:
            now_s += rng.gamma(shape, scale)
            yield now_s


@dataclass(frozen=True, slots=True)
class Piecewise:
    """Poisson arrivals whose rate is a step function of time.

    Attributes:
        starts_s: where each step begins, seconds; the first is 0; strictly rising.
        factors: the rate inside each step over the asked rate; the last is positive.
    """

    starts_s: tuple[float, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse steps that are not in order or that end the arrivals for good."""
        steps = self.starts_s
        if not steps or len(steps) != len(self.factors) or steps[0] != 0:
            raise ValueError("piecewise: needs steps time=factor, the first at time 0")
        if any(late <= early for early, late in itertools.pairwise(steps)):
            raise ValueError("piecewise: the times of the steps must rise")
        if min(self.factors) < 0 or not self.factors[-1] > 0:
            raise ValueError("piecewise: factors must not be negative and the last must be > 0")

    def times(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times: unit-rate arrivals mapped back through the summed rate."""
        ends_s = (*self.starts_s[1:], math.inf)
        now_s, step = 0.0, 0
        while True:
            work = rng.exponential(1.0)
            while True:
                rate = self.factors[step] * rate_per_s
                until_s = now_s + work / rate if rate > 0 else math.inf
                if until_s <= ends_s[step] and math.isfinite(until_s):
                    now_s = until_s
                    break
                work -= rate * (ends_s[step] - now_s)
                now_s = ends_s[step]
                step += 1
            yield now_s


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Poisson arrivals at rate (1 + amplitude sin(2 pi t / period_s)) times the asked one."""

    amplitude: float
    period_s: float

    def __post_init__(self) -> None:
        """Refuse a rate that would go below zero."""
        if not 0 <= self.amplitude <= 1 or not self.period_s > 0:
            raise ValueError("diurnal: needs 0 <= amplitude <= 1 and period_s > 0")

    def times(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times by thinning a Poisson process at the peak rate."""
        peak = 1.0 + self.amplitude
        for now_s in Poisson().times(rate_per_s * peak, rng):
            phase = 2.0 * math.pi * now_s / self.period_s
            if rng.random() * peak <= 1.0 + self.amplitude * math.sin(phase):
                yield now_s


def parse_arrivals(text: str) -> ArrivalProcess | None:
    """Read the command-line form of an arrival process; None stands for recorded times.

    Raises:
        ValueError: for anything else than ARRIVALS_HELP describes.
    """
    name, _, rest = text.partition(":")
    try:
        match name:
            case "recorded" if not rest:
                return None
            case "poisson" if not rest:
                return Poisson()
            case "gamma":
                return Gamma(cv=float(rest))
            case "piecewise":
                steps = [part.split("=") for part in rest.split(",")]
                return Piecewise(
                    starts_s=tuple(float(start) for start, _ in steps),
                    factors=tuple(float(factor) for _, factor in steps),
                )
            case "diurnal":
                amplitude, period_s = rest.split(",")
                return Diurnal(amplitude=float(amplitude), period_s=float(period_s))
            case _:
                pass
    except ValueError as error:
        raise ValueError(f"arrivals {text!r}: {error}") from error
    raise ValueError(f"arrivals {text!r}: expected {ARRIVALS_HELP}")


def load_to_rate(
    load: float, mean_decode_tokens: float, workers: int, batch_limit: int, iteration_s: float
) -> float:
    """Turn an offered load into an arrival rate.

    Load 1 offers exactly the decode iterations that the full batches of all workers provide:
    load = rate * mean_decode_tokens * iteration_s / (workers * batch_limit). Prefill and queueing
    are left out, so the real capacity lies somewhat below load 1.

    Args:
        load: offered decode work over batch capacity, > 0.
        mean_decode_tokens: mean length of an answer, tokens.
        workers: number of equal workers.
        batch_limit: requests in one worker's batch.
        iteration_s: seconds of one decode iteration at full batch.

    Returns:
        Requests per second.
    """
    if not (load > 0 and mean_decode_tokens > 0 and workers > 0 and batch_limit > 0):
        raise ValueError("load, mean_decode_tokens, workers and batch_limit must be positive")
    if not iteration_s > 0:
        raise ValueError(f"iteration_s must be positive, got {iteration_s}")
    return load * workers * batch_limit / (mean_decode_tokens * iteration_s)
