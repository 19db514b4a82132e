"""Flags of `bidgate-load simulate`, and what they make: fleet, workload, router settings.

What does not fit together is a ValueError with one sentence for the person who typed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cyclopts import Parameter

from loadgen.arrivals import RECORDED, load_to_rate, parse_arrivals
from loadgen.simulation_config import (
    Outage,
    SimulatedWorker,
    Telemetry,
    full_batch_iteration_s,
)
from loadgen.traces import LMSYS_LIKE, open_trace
from loadgen.true_jsq import TRUE_JSQ
from loadgen.workload import Prediction, WorkloadSpec, build_workload
from service.control.config import (
    ControlConfig,
    Kernel,
    PolicyName,
    PriceConfig,
    RateConfig,
    TenantConfig,
    Variant,
    Weights,
)
from service.mock.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.trace_record import TraceRequest

DEFAULT_LOAD = 1.06
SAMPLE_REQUESTS = 20_000
"""Requests of the trace whose lengths turn a load into a rate."""
WEIGHT_NAMES = ("throughput", "e2e", "ttft", "queries", "tail_e2e", "tail_ttft")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Flags of the workers.

    Attributes:
        workers: how many.
        batch_limit: batch slots of each.
        kv_tokens: KV capacity of each, tokens; the profile's when left out.
        profile: llama-3-8b-a100, llama-2-7b-a100, or unit (10 ms an iteration, whatever it holds).
        iteration_factors: as 1,1,1,2: each worker's iterations over the profile's.
        decode_only: prompts are computed elsewhere and cost nothing here.
        piece_tokens: prompts stay in a prefix cache in pieces of so many tokens, each with an id of
            the trace's hash_ids (Mooncake: 512); 0 for no such cache.
        outage: as w1:10-20: worker w1 dies at second 10 and is back, empty, at 20; w1:10- for
            good. May be given more than once.
        iteration_error: the router is told iteration times this many times the true ones.
    """

    workers: int = 4
    batch_limit: int = 32
    kv_tokens: int | None = None
    profile: str = "llama-3-8b-a100"
    iteration_factors: str = ""
    decode_only: bool = False
    piece_tokens: int = 0
    outage: tuple[str, ...] = ()
    iteration_error: float = 1.0

    def fleet(self, lengths: Sequence[TraceRequest]) -> tuple[SimulatedWorker, ...]:
        """Make the workers; the router's first guess of their pace is that of full batches."""
        if self.profile not in PROFILES:
            raise ValueError(f"no profile {self.profile!r}; there are {', '.join(PROFILES)}")
        factors = [1.0] * self.workers
        if self.iteration_factors:
            factors = _numbers("iteration-factors", self.iteration_factors, self.workers)
        return tuple(
            self._worker(f"w{number}", factor, lengths) for number, factor in enumerate(factors)
        )

    def _worker(
        self, worker_id: str, factor: float, lengths: Sequence[TraceRequest]
    ) -> SimulatedWorker:
        worker = SimulatedWorker(
            worker_id=worker_id,
            profile=PROFILES[self.profile],
            batch_limit=self.batch_limit,
            kv_capacity_tokens=self.kv_tokens,
            iteration_factor=factor,
            prefill=not self.decode_only,
            piece_tokens=self.piece_tokens,
        )
        guess_s = self.iteration_error * full_batch_iteration_s(worker, lengths)
        return replace(worker, iteration_guess_s=guess_s)

    def outages(self) -> tuple[Outage, ...]:
        """Read the outages."""
        return tuple(_outage(text) for text in self.outage)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Flags of the requests.

    Attributes:
        trace: lmsys-like, fixed:PROMPTxDECODE, a file, or FORMAT:FILE as for replay.
        arrivals: poisson, gamma:CV, piecewise:0=0.8,15=1.2, diurnal:AMPLITUDE,PERIOD_S, recorded.
        load: offered decode work over the batch capacity of the fleet; 1.06 unless a rate is given
            or recorded arrivals are kept as they are.
        rate: requests per second instead of a load.
        requests: how many; all of a trace that ends when 0.
        prediction: whether a forecast of the answer's length goes with each request.
        noise_width: w of a noisy forecast, uniform in 1 - w to 1 + w times the length.
        forecast_bias: forecasts are this many times as long as they would be.
        forecast_bias_share: so many of them, drawn at random; the others are not.
        decode_tokens_max: cut longer answers to this.
        tenants: as heavy=9,light=1: each request gets a tenant, drawn with these shares.
        values: as heavy=1,light=4: reward multiplier of each tenant's requests.
        seed: of lengths, arrivals and noise, and of the policy.
    """

    trace: str = LMSYS_LIKE
    arrivals: str = "poisson"
    load: float | None = None
    rate: float | None = None
    requests: int = 3400
    prediction: Prediction = Prediction.EXACT
    noise_width: float = 0.2
    forecast_bias: float = 1.0
    forecast_bias_share: float = 1.0
    decode_tokens_max: int | None = None
    tenants: str = ""
    values: str = ""
    seed: int = 0

    def lengths(self) -> list[TraceRequest]:
        """Requests of the trace without their times, to know how long they are."""
        return build_workload(
            WorkloadSpec(
                trace=open_trace(self.trace),
                rate_per_s=1.0,
                requests=SAMPLE_REQUESTS,
                prediction=Prediction.NONE,
                decode_tokens_max=self.decode_tokens_max,
                seed=self.seed,
            )
        )

    def rate_per_s(
        self, fleet: Sequence[SimulatedWorker], lengths: Sequence[TraceRequest]
    ) -> float | None:
        """Requests per second; None leaves recorded times as they are."""
        if self.rate is not None and self.load is not None:
            raise ValueError("say --load or --rate, not both")
        if self.rate is not None or (self.load is None and self.arrivals == RECORDED):
            return self.rate
        load = DEFAULT_LOAD if self.load is None else self.load
        mean = sum(request.decode_tokens for request in lengths) / len(lengths)
        return math.fsum(
            load_to_rate(load, mean, 1, w.batch_limit, full_batch_iteration_s(w, lengths))
            for w in fleet
        )

    def workload(self, rate_per_s: float | None) -> list[TraceRequest]:
        """Make the requests."""
        return build_workload(
            WorkloadSpec(
                trace=open_trace(self.trace),
                arrivals=parse_arrivals(self.arrivals),
                rate_per_s=rate_per_s,
                requests=self.requests or None,
                prediction=self.prediction,
                noise_width=self.noise_width,
                forecast_bias=self.forecast_bias,
                forecast_bias_share=self.forecast_bias_share,
                decode_tokens_max=self.decode_tokens_max,
                tenants=TenantConfig(weights=self.tenants).parsed(),
                values=TenantConfig(weights=self.values).parsed(),
                seed=self.seed,
            )
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Flags of the decision.

    Attributes:
        policy: online_lp, round_robin, least_outstanding, random, power_of_two, central_fcfs,
            central_shortest_first, or true_jsq (join the shortest queue with true lengths).
        weights: alpha,beta,gamma,sigma,zeta1,zeta2: throughput, end-to-end, first token, queries,
            tail end-to-end, tail first token.
        variant: of online_lp: forward, or published as in the paper.
        zero_prices: force every price to zero.
        inline_prices: refresh prices inside every decision, as the paper does.
        price_refresh_s: shortest time between two refreshes of the prices.
        horizon_iterations: look-ahead.
        bucket_iterations: iterations in one bucket of the look-ahead.
        ttft_bound_s: bound on time to first token, of the tail weight and of the report.
        e2e_bound_s: end-to-end bound of the tail weight.
        tenant_weights: as heavy=1,*=2: shares of what is scarce; left out, tenants do not matter.
        decode_quantile: of the length distribution that is set aside; 0 for the mean.
        rate_significance: of the watch over the arrival rate; 0 switches it off.
        age_bound_s: whoever waited this long goes first; 0 switches it off.
        max_wait_s: longest wait in the central queue.
        queue_max: most requests that may wait there.
    """

    policy: str = PolicyName.ONLINE_LP.value
    weights: str = "0,1,1,0,0,0"
    variant: Variant = Variant.FORWARD
    zero_prices: bool = False
    inline_prices: bool = False
    price_refresh_s: float = PriceConfig().refresh_s
    horizon_iterations: int = ControlConfig().horizon_iterations
    bucket_iterations: int = ControlConfig().bucket_iterations
    ttft_bound_s: float = Weights().ttft_bound_s
    e2e_bound_s: float = Weights().e2e_bound_s
    tenant_weights: str = ""
    decode_quantile: float = ControlConfig().decode_quantile
    rate_significance: float = RateConfig().significance
    age_bound_s: float = ControlConfig().age_bound_s
    max_wait_s: float = ControlConfig().max_wait_s
    queue_max: int = ControlConfig().queue_max

    def control(self, *, decode_only: bool, seed: int) -> ControlConfig:
        """Make the router's settings; true_jsq is no policy of the router and leaves its default.

        Raises:
            ValueError: for an unknown policy or weights that are not six numbers.
        """
        policy = PolicyName.ONLINE_LP
        if self.policy != TRUE_JSQ:
            names = [name.value for name in PolicyName]
            if self.policy not in names:
                raise ValueError(
                    f"no policy {self.policy!r}; there are {', '.join([*names, TRUE_JSQ])}"
                )
            policy = PolicyName(self.policy)
        weights = _numbers("weights", self.weights, len(WEIGHT_NAMES))
        return ControlConfig(
            policy=policy,
            kernel=Kernel.DECODE_ONLY if decode_only else Kernel.MIXED,
            weights=Weights(
                **dict(zip(WEIGHT_NAMES, weights, strict=True)),
                ttft_bound_s=self.ttft_bound_s,
                e2e_bound_s=self.e2e_bound_s,
            ),
            prices=PriceConfig(
                variant=self.variant,
                zero=self.zero_prices,
                inline=self.inline_prices,
                refresh_s=self.price_refresh_s,
            ),
            decode_quantile=self.decode_quantile,
            tenants=TenantConfig(weights=self.tenant_weights),
            rate=RateConfig(significance=self.rate_significance),
            horizon_iterations=self.horizon_iterations,
            bucket_iterations=self.bucket_iterations,
            age_bound_s=self.age_bound_s,
            max_wait_s=self.max_wait_s,
            queue_max=self.queue_max,
            seed=seed,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SightOptions:
    """Flags of what the router sees, and when.

    Attributes:
        scrape_interval_s: time between two scrapes of one worker; 0 for none.
        scrape_latency_s: age of a scrape when it reaches the router.
        network_s: one way between router and worker.
        detect_s: until the router knows that a worker died or came back.
        price_latency_s: until new prices are adopted.
        streams: answers are streamed; otherwise the router sees only their ends.
        patience_s: clients leave when they have no token after this; 0 for patient ones.
    """

    scrape_interval_s: float = Telemetry().scrape_interval_s
    scrape_latency_s: float = 0.0
    network_s: float = 0.0
    detect_s: float = 0.0
    price_latency_s: float = 0.0
    streams: bool = True
    patience_s: float = 0.0

    def telemetry(self, iteration_error: float) -> Telemetry:
        """Make the telemetry."""
        return Telemetry(
            scrape_interval_s=self.scrape_interval_s,
            scrape_latency_s=self.scrape_latency_s,
            report_bias=iteration_error,
            streams=self.streams,
            network_s=self.network_s,
            detect_s=self.detect_s,
            price_latency_s=self.price_latency_s,
        )


def _numbers(flag: str, text: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--{flag} {text}: {error}") from error
    if len(numbers) != count:
        raise ValueError(f"--{flag} {text}: expected {count} numbers, got {len(numbers)}")
    return numbers


def _outage(text: str) -> Outage:
    worker_id, colon, times = text.partition(":")
    down, dash, up = times.partition("-")
    try:
        if not colon or not dash:
            raise ValueError("expected WORKER:DOWN-UP in seconds, as w1:10-20 or w1:10-")
        up_s = float(up) if up else math.inf
        return Outage(worker_id=worker_id, down_s=float(down), up_s=up_s)
    except ValueError as error:
        raise ValueError(f"--outage {text}: {error}") from error
