"""What a simulation is made of: workers, their failures, and how well the router sees them.

Frozen values, checked when built. The machine that uses them is simulator.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from service.control.config import ControlConfig
from service.control.events import WorkerSpec
from service.mock.decode_model import DecodeWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.trace_record import TraceRequest
    from service.mock.profiles import DecodeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorker:
    """One worker of the fleet.

    Attributes:
        worker_id: unique name.
        profile: durations of its iterations.
        batch_limit: B, its batch slots.
        kv_capacity_tokens: M; None for the profile's.
        iteration_factor: its iterations take this many times the profile's time.
        block_tokens: KV block size.
        prefill: whether it computes prompts itself, or decodes only.
        piece_tokens: prompt tokens of a piece of its prefix cache, which is the block size of the
            trace's hash_ids (Mooncake: 512); 0 for no such cache.
        iteration_guess_s: what the router is told at the start; None for what it is at full batch
            and a mean KV of KV_GUESS_TOKENS a request.
    """

    worker_id: str
    profile: DecodeProfile
    batch_limit: int
    kv_capacity_tokens: int | None = None
    iteration_factor: float = 1.0
    block_tokens: int = 16
    prefill: bool = True
    piece_tokens: int = 0
    iteration_guess_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse a pace no worker can have."""
        if not (math.isfinite(self.iteration_factor) and self.iteration_factor > 0):
            raise ValueError(f"iteration_factor must be positive, got {self.iteration_factor}")

    def machine(self) -> DecodeWorker:
        """Build the worker, empty."""
        return DecodeWorker(
            self.profile,
            self.batch_limit,
            self.kv_capacity_tokens,
            self.block_tokens,
            self.prefill,
            self.piece_tokens,
        )

    def spec(self) -> WorkerSpec:
        """Describe it as an operator would in the configuration."""
        guess_s = self.iteration_guess_s
        if guess_s is None:
            kv_tokens = KV_GUESS_TOKENS * self.batch_limit
            guess_s = self.iteration_factor * self.profile.iteration_s(
                self.batch_limit, kv_tokens, 0
            )
        capacity = self.kv_capacity_tokens
        return WorkerSpec(
            worker_id=self.worker_id,
            batch_limit=self.batch_limit,
            kv_capacity_tokens=self.profile.kv_capacity_tokens if capacity is None else capacity,
            block_tokens=self.block_tokens,
            iteration_s=guess_s,
        )


KV_GUESS_TOKENS = 256
"""KV tokens of a request in the first guess of an iteration's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A worker dies with everything it holds, and may come back empty.

    Attributes:
        worker_id: which.
        down_s: when it dies.
        up_s: when it is there again; infinity for never.
    """

    worker_id: str
    down_s: float
    up_s: float = math.inf

    def __post_init__(self) -> None:
        """Refuse an outage that ends before it starts."""
        if not 0 <= self.down_s < self.up_s:
            raise ValueError("an outage needs 0 <= down_s < up_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """How the router learns what happens on the workers.

    Attributes:
        scrape_interval_s: time between two scrapes of one worker; 0 for no scrapes.
        scrape_latency_s: from the sample at the worker to the report at the router.
        report_bias: reported iteration times are this many times the true ones.
        streams: tokens are seen as they are produced; else only ends are, and progress is guessed.
        network_s: one way between router and worker, for starts and for tokens.
        detect_s: from a worker's death or return to the router's knowledge of it.
        price_latency_s: from a price snapshot to the adoption of its solution.
    """

    scrape_interval_s: float = 0.25
    scrape_latency_s: float = 0.0
    report_bias: float = 1.0
    streams: bool = True
    network_s: float = 0.0
    detect_s: float = 0.0
    price_latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse times that run backwards."""
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{spec.name} must be finite and not negative, got {value}")
        if self.report_bias == 0:
            raise ValueError("report_bias must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Everything a simulation needs beside its requests.

    Attributes:
        workers: the fleet, in the router's order.
        control: the router's settings.
        telemetry: how well the router sees.
        outages: failures and recoveries.
        patience_s: a client that has no token after this leaves; infinity for patient ones.
        ttft_bound_s: bound on time to first token where a request brings none; for the summary.
    """

    workers: tuple[SimulatedWorker, ...]
    control: ControlConfig = field(default_factory=ControlConfig)
    telemetry: Telemetry = field(default_factory=Telemetry)
    outages: tuple[Outage, ...] = ()
    patience_s: float = math.inf
    ttft_bound_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an empty fleet, names used twice, and outages of workers that are not there."""
        names = [worker.worker_id for worker in self.workers]
        if not names or len(set(names)) != len(names):
            raise ValueError("workers needs at least one worker, each under its own name")
        for outage in self.outages:
            if outage.worker_id not in names:
                raise ValueError(f"an outage names the unknown worker {outage.worker_id!r}")
        if not self.patience_s > 0:
            raise ValueError(f"patience_s must be positive, got {self.patience_s}")


def full_batch_iteration_s(worker: SimulatedWorker, requests: Sequence[TraceRequest]) -> float:
    """Mean duration of an iteration when the batch is always full of these requests.

    Counts what a request of s prompt and o decode tokens brings in each of its o iterations: one
    slot, s + (o - 1) / 2 KV tokens on average, and s / o prompt tokens to compute (none where
    prompts are computed elsewhere). batch_limit / (mean o * this) is the worker's capacity in
    requests per second, as long as KV does not bind.
    """
    decode = sum(request.decode_tokens for request in requests)
    if not decode:
        raise ValueError("no requests to take the lengths from")
    kv = sum(r.decode_tokens * (r.prompt_tokens + (r.decode_tokens - 1) / 2) for r in requests)
    prompt = sum(r.prompt_tokens for r in requests) if worker.prefill else 0
    batch = worker.batch_limit
    kv_tokens, prefill_tokens = round(batch * kv / decode), round(batch * prompt / decode)
    return worker.iteration_factor * worker.profile.iteration_s(batch, kv_tokens, prefill_tokens)
