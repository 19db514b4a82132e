"""A finite, seeded list of requests to send: a trace's lengths, arrival times, forecasts.

The same seed gives the same list, whatever policy or server it is sent to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np

from loadgen.arrivals import ArrivalProcess, Poisson
from loadgen.trace_errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadgen.trace_record import TraceRequest
    from loadgen.traces import Trace

REQUESTS_MAX = 2_000_000
LENGTH_STREAM, ARRIVAL_STREAM, NOISE_STREAM, TENANT_STREAM, BIAS_STREAM = range(5)
"""Separate random streams, so that a change of noise does not move the arrivals."""


class Prediction(StrEnum):
    """How well the decode length is known beforehand."""

    EXACT = "exact"
    NOISY = "noisy"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """How to make the list.

    Attributes:
        trace: where lengths come from.
        arrivals: the arrival process, or None for the trace's own times.
        rate_per_s: mean arrival rate; None leaves recorded times as they are.
        requests: most requests to take, or None.
        duration_s: no arrival at or after this time, or None.
        prediction: whether and how well requests carry a forecast.
        noise_width: w of a noisy forecast, uniform in [(1 - w) o, (1 + w) o].
        forecast_bias: a share of the forecasts, forecast_bias_share, is this many times as long.
        decode_tokens_max: longer answers are cut to this, or None.
        tenants: shares of the requests by tenant; none leaves the trace's own.
        values: reward multipliers by tenant; others keep the trace's own.
        seed: of lengths, arrivals, noise and tenants.
    """

    trace: Trace
    arrivals: ArrivalProcess | None = field(default_factory=Poisson)
    rate_per_s: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    prediction: Prediction = Prediction.NOISY
    noise_width: float = 0.2
    forecast_bias: float = 1.0
    forecast_bias_share: float = 1.0
    decode_tokens_max: int | None = None
    tenants: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be made or would never end."""
        if self.requests is None and self.duration_s is None and self.trace.endless:
            raise ValueError(f"the trace {self.trace.name} never ends: give requests or duration_s")
        if self.arrivals is None and not self.trace.timed:
            raise ValueError(f"the trace {self.trace.name} has no recorded arrival times")
        if self.arrivals is not None and self.rate_per_s is None:
            raise ValueError("an arrival process needs a rate")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ValueError(f"the rate must be positive, got {self.rate_per_s}")
        if not 0 <= self.noise_width < 1:
            raise ValueError(f"noise_width must lie in [0, 1), got {self.noise_width}")
        if not 0 < self.forecast_bias < math.inf:
            raise ValueError(f"forecast_bias must be positive, got {self.forecast_bias}")
        if not 0 <= self.forecast_bias_share <= 1:
            raise ValueError(
                f"forecast_bias_share must lie in [0, 1], got {self.forecast_bias_share}"
            )


def build_workload(spec: WorkloadSpec) -> list[TraceRequest]:
    """Make the requests in order of arrival; times start at 0 or at the process's first arrival.

    Raises:
        TraceError: when the trace is empty or malformed. Never more than REQUESTS_MAX are taken.
    """
    source = spec.trace.read(_seed_of(spec.seed, LENGTH_STREAM))
    if spec.arrivals is None:
        requests = _recorded(spec, source)
    else:
        requests = _synthetic(spec, source, spec.arrivals)
    if not requests:
        raise TraceError(f"the trace {spec.trace.name} gave no request")
    return with_prediction(_cut(with_tenants(requests, spec), spec.decode_tokens_max), spec)


def mean_lengths(
    trace: Trace, seed: int, requests: int = 20_000, decode_tokens_max: int | None = None
) -> tuple[float, float]:
    """Mean prompt and answer length of a trace's first requests, tokens, long answers cut."""
    lengths = [
        (request.prompt_tokens, min(request.decode_tokens, decode_tokens_max or math.inf))
        for request in islice(trace.read(_seed_of(seed, LENGTH_STREAM)), requests)
    ]
    if not lengths:
        raise TraceError(f"the trace {trace.name} gave no request")
    prompt_tokens, decode_tokens = np.mean(lengths, axis=0)
    return float(prompt_tokens), float(decode_tokens)


def mean_decode_tokens(
    trace: Trace, seed: int, requests: int = 20_000, decode_tokens_max: int | None = None
) -> float:
    """Mean answer length of a trace's first requests, in tokens, after cutting long answers."""
    return mean_lengths(trace, seed, requests, decode_tokens_max)[1]


def with_prediction(requests: Sequence[TraceRequest], spec: WorkloadSpec) -> list[TraceRequest]:
    """Put forecasts on requests: the length itself, the length with noise, or none.

    A forecast that the trace itself carries is kept unless none is asked for.
    """
    rng = np.random.default_rng(_seed_of(spec.seed, NOISE_STREAM))
    noise = rng.uniform(1.0 - spec.noise_width, 1.0 + spec.noise_width, len(requests))
    match spec.prediction:
        case Prediction.NONE:
            return [replace(request, decode_tokens_hint=None) for request in requests]
        case Prediction.EXACT:
            noise = np.ones(len(requests))
        case Prediction.NOISY:
            pass
    biased = np.random.default_rng(_seed_of(spec.seed, BIAS_STREAM)).random(len(requests))
    noise *= np.where(biased < spec.forecast_bias_share, spec.forecast_bias, 1.0)
    return [
        request
        if request.decode_tokens_hint is not None
        else replace(request, decode_tokens_hint=max(1, round(request.decode_tokens * factor)))
        for request, factor in zip(requests, noise.tolist(), strict=True)
    ]


def with_tenants(requests: list[TraceRequest], spec: WorkloadSpec) -> list[TraceRequest]:
    """Draw a tenant for every request, and give each tenant's requests its value."""
    if spec.tenants:
        names, shares = list(spec.tenants), np.array(list(spec.tenants.values()))
        rng = np.random.default_rng(_seed_of(spec.seed, TENANT_STREAM))
        drawn = rng.choice(len(names), size=len(requests), p=shares / shares.sum())
        requests = [
            replace(request, tenant=names[place])
            for request, place in zip(requests, drawn.tolist(), strict=True)
        ]
    if not spec.values:
        return requests
    return [
        replace(request, value=spec.values.get(request.tenant, request.value))
        for request in requests
    ]


def _seed_of(seed: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, stream]).generate_state(1)[0])


def _synthetic(
    spec: WorkloadSpec, source: Iterator[TraceRequest], process: ArrivalProcess
) -> list[TraceRequest]:
    rate_per_s = spec.rate_per_s or 0.0
    rng = np.random.default_rng(_seed_of(spec.seed, ARRIVAL_STREAM))
    until_s = math.inf if spec.duration_s is None else spec.duration_s
    times = takewhile(lambda time_s: time_s < until_s, process.times(rate_per_s, rng))
    limit = REQUESTS_MAX if spec.requests is None else spec.requests
    placed = (
        replace(request, arrival_s=time_s) for time_s, request in zip(times, source, strict=False)
    )
    return list(islice(placed, min(limit, REQUESTS_MAX)))


def _recorded(spec: WorkloadSpec, source: Iterator[TraceRequest]) -> list[TraceRequest]:
    """Take recorded times, from 0 on, stretched so that the mean rate is the asked one."""
    limit = REQUESTS_MAX if spec.requests is None else spec.requests
    requests = sorted(islice(source, min(limit, REQUESTS_MAX)), key=lambda item: item.arrival_s)
    if not requests:
        return []
    first_s, span_s = requests[0].arrival_s, requests[-1].arrival_s - requests[0].arrival_s
    stretch = 1.0
    if spec.rate_per_s is not None and span_s > 0:
        stretch = len(requests) / (spec.rate_per_s * span_s)
    until_s = math.inf if spec.duration_s is None else spec.duration_s
    shifted = [
        replace(request, arrival_s=(request.arrival_s - first_s) * stretch) for request in requests
    ]
    return [request for request in shifted if request.arrival_s < until_s]


def _cut(requests: list[TraceRequest], decode_tokens_max: int | None) -> list[TraceRequest]:
    if decode_tokens_max is None:
        return requests
    return [
        replace(request, decode_tokens=min(request.decode_tokens, decode_tokens_max))
        for request in requests
    ]
