"""The requests of an experiment: a trace at a rate or at an exact load, or tiers side by side.

A few hundred lengths miss their mean by a tenth, which near capacity decides everything. So where
a load is asked, arrival times are stretched until this very sample offers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from loadgen.arrivals import RECORDED, parse_arrivals
from loadgen.lmsys_like import lengths_stream
from loadgen.shared_prefixes import conversations, hot_system_prompt, nothing_shared
from loadgen.simulation_config import full_batch_iteration_s
from loadgen.trace_errors import TraceError
from loadgen.trace_record import TraceRequest
from loadgen.traces import LMSYS_LIKE, Trace, open_trace
from loadgen.workload import Prediction, WorkloadSpec, build_workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.simulation_config import SimulatedWorker

RATIO_PREFIX = "ratio:"
RATIO_TOKENS = (64, 448)
"""Prompt plus answer of a synthetic request: uniform between these, 256 on average."""
LONG_ANSWERS = "long-answers"
LONG_TOKENS = (200, 1000)
"""Answer of a request of the batch tier: uniform between these."""
LONG_PROMPT_TOKENS = 256
SHORT_ANSWERS = "short-answers"
CONVERSATIONS = "conversations"
HOT_SYSTEM_PROMPT = "hot-system-prompt"
NOTHING_SHARED = "nothing-shared"
SHORTENED = 10
"""Answers of this trace are LMSYS-like ones over this: instances small enough to be solved."""
SLICES = 8
"""Parts of a recorded trace that seeds may see; seed 9 sees the part of seed 1 again."""
SAMPLE_REQUESTS = 2000
"""Requests whose mean length turns a tier's load into a number of requests."""
TIER_SEED_STEP = 7919
"""Tiers draw from seeds this far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One class of traffic.

    Attributes:
        name: becomes the requests' tenant.
        trace: where lengths come from.
        load: offered decode work over the batch capacity of the fleet.
        value: multiplies the reward of its requests.
        ttft_bound_s: bound on time to first token of its requests, or None.
    """

    name: str
    trace: str
    load: float
    value: float = 1.0
    ttft_bound_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent.

    Attributes:
        trace: of loadgen.traces, "ratio:P:D" (synthetic prompt to answer ratio), "long-answers",
            "short-answers", or one of loadgen.shared_prefixes.
        arrivals: of loadgen.arrivals.
        rate_per_s: mean arrival rate; or
        load: offered decode work over batch capacity, met exactly by stretching time.
        kv_load: the same for KV memory: offered token-iterations over capacity.
        requests: how many.
        prediction: how well lengths are known. noise_width: w of a noisy forecast.
        tiers: classes of traffic instead of one trace; then duration_s says how long.
        grid_s: arrival times are rounded up to multiples of this; 0 leaves them.
        seed: of lengths, arrivals and noise.
    """

    trace: str = LMSYS_LIKE
    arrivals: str = "poisson"
    rate_per_s: float | None = None
    load: float | None = None
    kv_load: float | None = None
    requests: int = 1000
    prediction: Prediction = Prediction.EXACT
    noise_width: float = 0.2
    tiers: tuple[Tier, ...] = ()
    duration_s: float = 30.0
    grid_s: float = 0.0
    seed: int = 0


def build_requests(load: Load, workers: Sequence[SimulatedWorker]) -> list[TraceRequest]:
    """Make the requests in order of arrival.

    Raises:
        TraceError: for a trace that is not there or malformed.
    """
    requests = _built(load, workers)
    if not load.grid_s:
        return requests
    return [
        replace(request, arrival_s=math.ceil(request.arrival_s / load.grid_s) * load.grid_s)
        for request in requests
    ]


def _built(load: Load, workers: Sequence[SimulatedWorker]) -> list[TraceRequest]:
    if load.tiers:
        return _merged(load, workers)
    requests = _drawn(load, load.rate_per_s if load.load is load.kv_load is None else 1.0)
    if load.load is not None:
        return _stretched(requests, offered_load(requests, workers) / load.load)
    if load.kv_load is not None:
        return _stretched(requests, offered_kv_load(requests, workers) / load.kv_load)
    return requests


def offered_load(requests: Sequence[TraceRequest], workers: Sequence[SimulatedWorker]) -> float:
    """Decode tokens asked over those that all full batches give until the last arrival."""
    tokens = sum(request.decode_tokens for request in requests)
    capacity_per_s = sum(w.batch_limit / full_batch_iteration_s(w, requests) for w in workers)
    return tokens / (_span_s(requests) * capacity_per_s)


def offered_kv_load(requests: Sequence[TraceRequest], workers: Sequence[SimulatedWorker]) -> float:
    """KV token-iterations asked over those that all workers have until the last arrival."""
    asked = sum(kv_iterations(request) for request in requests)
    capacity_per_s = sum(
        worker.machine().kv_capacity_tokens / full_batch_iteration_s(worker, requests)
        for worker in workers
    )
    return asked / (_span_s(requests) * capacity_per_s)


def gap_variation(requests: Sequence[TraceRequest]) -> float:
    """Standard deviation of the gaps between arrivals over their mean: 1 for Poisson, 0 even."""
    gaps_s = np.diff([request.arrival_s for request in requests])
    mean_s = float(gaps_s.mean()) if gaps_s.size else 0.0
    return float(gaps_s.std()) / mean_s if mean_s > 0 else 0.0


def kv_iterations(request: TraceRequest) -> float:
    """KV tokens that a request holds, summed over its decode iterations ([OLP] eq. (1))."""
    return request.decode_tokens * (request.prompt_tokens + (request.decode_tokens + 1) / 2)


def open_load_trace(name: str) -> Trace:
    """Open a trace by name, the synthetic ones of this module included."""
    if name.startswith(RATIO_PREFIX):
        prompt, decode = (int(part) for part in name.removeprefix(RATIO_PREFIX).split(":"))
        return Trace(name, False, True, lambda seed: _ratio_lengths(prompt, decode, seed))
    made_up = {
        LONG_ANSWERS: _long_answers,
        SHORT_ANSWERS: _short_answers,
        CONVERSATIONS: conversations,
        HOT_SYSTEM_PROMPT: hot_system_prompt,
        NOTHING_SHARED: nothing_shared,
    }
    if name in made_up:
        return Trace(name, False, True, made_up[name])
    return open_trace(name)


def _ratio_lengths(prompt: int, decode: int, seed: int) -> Iterator[TraceRequest]:
    rng = np.random.default_rng(seed)
    while True:
        total = int(rng.integers(*RATIO_TOKENS, endpoint=True))
        answer = max(1, round(total * decode / (prompt + decode)))
        yield TraceRequest(0.0, max(1, total - answer), answer)


def _long_answers(seed: int) -> Iterator[TraceRequest]:
    rng = np.random.default_rng(seed)
    while True:
        answer = int(rng.integers(*LONG_TOKENS, endpoint=True))
        yield TraceRequest(0.0, LONG_PROMPT_TOKENS, answer)


def _short_answers(seed: int) -> Iterator[TraceRequest]:
    for prompt, answer in lengths_stream(seed):
        yield TraceRequest(0.0, prompt, max(1, round(answer / SHORTENED)))


def _drawn(load: Load, rate_per_s: float | None) -> list[TraceRequest]:
    trace = open_load_trace(load.trace)
    if load.arrivals == RECORDED:
        trace = _slice(trace, load)
    return build_workload(
        WorkloadSpec(
            trace=trace,
            arrivals=parse_arrivals(load.arrivals),
            rate_per_s=rate_per_s,
            requests=load.requests,
            prediction=load.prediction,
            noise_width=load.noise_width,
            seed=load.seed,
        )
    )


def _slice(trace: Trace, load: Load) -> Trace:
    """Let every seed see another part of a recorded trace."""
    skip = max(0, load.seed - 1) % SLICES * load.requests
    return replace(trace, read=lambda seed: islice(trace.read(seed), skip, skip + load.requests))


def _span_s(requests: Sequence[TraceRequest]) -> float:
    """Seconds until the last arrival.

    Raises:
        TraceError: when all arrive at once, so that there is no load to speak of.
    """
    if not requests[-1].arrival_s > 0:
        raise TraceError(f"all {len(requests)} requests arrive at once: take more of the trace")
    return requests[-1].arrival_s


def _stretched(requests: Sequence[TraceRequest], stretch: float) -> list[TraceRequest]:
    return [replace(request, arrival_s=request.arrival_s * stretch) for request in requests]


def _merged(load: Load, workers: Sequence[SimulatedWorker]) -> list[TraceRequest]:
    """Draw every tier at its own load over the same time and put them in order of arrival."""
    merged: list[TraceRequest] = []
    for number, tier in enumerate(load.tiers):
        sample = replace(load, trace=tier.trace, tiers=(), seed=load.seed + number * TIER_SEED_STEP)
        requests = _tier_requests(sample, tier, workers)
        merged += [
            replace(
                request,
                tenant=tier.name,
                group=tier.name,
                value=tier.value,
                ttft_bound_s=tier.ttft_bound_s,
            )
            for request in requests
        ]
    return sorted(merged, key=lambda request: request.arrival_s)


def _tier_requests(
    load: Load, tier: Tier, workers: Sequence[SimulatedWorker]
) -> list[TraceRequest]:
    """As many requests as offer the tier's load over the duration, their times stretched to it."""
    sample = _drawn(replace(load, requests=SAMPLE_REQUESTS), 1.0)
    mean_tokens = sum(request.decode_tokens for request in sample) / len(sample)
    capacity_per_s = sum(w.batch_limit / full_batch_iteration_s(w, sample) for w in workers)
    count = max(1, round(tier.load * capacity_per_s * load.duration_s / mean_tokens))
    requests = _drawn(replace(load, requests=count), 1.0)
    return _stretched(requests, offered_load(requests, workers) / tier.load)
