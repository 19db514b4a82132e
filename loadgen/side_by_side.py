"""Routers side by side on the same real engines: same requests, same times, interleaved runs.

The engines stay up all the time; each run gets a fresh router before them, or none: then the
client itself sends to one engine after the other. Read side_by_side_report.py for what is made of
the runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.arrivals import Poisson
from loadgen.cluster import bidgate_command, until_ready
from loadgen.demo import warm_up_workload
from loadgen.engine_watch import EngineWatch, until_idle, watching
from loadgen.processes import LOOPBACK, ClusterError, free_ports, start, stopping
from loadgen.replay import Replay, ReplaySettings
from loadgen.workload import Prediction, WorkloadSpec, build_workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from loadgen.outcomes import OutcomeRecord
    from loadgen.trace_record import TraceRequest
    from loadgen.traces import Trace

DIRECT = "direct round_robin"
VLLM_ROUTER_POLICIES = ("round_robin", "power_of_two", "cache_aware")
BIDGATE_POLICIES = ("least_outstanding", "online_lp")
OURS = "bidgate online_lp"
CONTENDERS = (
    DIRECT,
    *(f"vllm-router {policy}" for policy in VLLM_ROUTER_POLICIES),
    *(f"bidgate {policy}" for policy in BIDGATE_POLICIES),
)
CALIBRATION_ROUNDS = 3
"""Requests of the calibration, in batches of the whole fleet."""
CALIBRATION_DRAIN_S = 120.0
SETTLE_WITHIN_S = 60.0
PAUSE_S = 1.0
SALT_STEP = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySideSpec:
    """One measurement.

    Attributes:
        workers: base URLs of engines that run already.
        batch_limit: their --max-num-seqs.
        contenders: names out of CONTENDERS, in the order of the first round.
        trace: where lengths come from.
        load: offered output tokens over what the engines make when they are saturated.
        duration_s: how long requests arrive, in each run.
        repetitions: runs of each contender; each has a seed of its own, the same for all.
        drain_s: how long answers are waited for after the last arrival.
        decode_tokens_max: longer answers are cut to this.
        vocabulary_tokens: of the model: prompts are token ids below it.
        seed: of the first repetition; the next ones count on.
        vllm_router: the command, in its own environment.
        log_dir: where the routers' output goes.
    """

    workers: tuple[str, ...]
    batch_limit: int
    contenders: tuple[str, ...]
    trace: Trace
    load: float
    duration_s: float
    repetitions: int
    drain_s: float
    decode_tokens_max: int
    vocabulary_tokens: int
    seed: int
    vllm_router: Path
    log_dir: Path

    def __post_init__(self) -> None:
        """Refuse measurements that cannot be made."""
        if not self.workers:
            raise ValueError("no engines: give --workers URL...")
        unknown = [name for name in self.contenders if name not in CONTENDERS]
        if unknown or not self.contenders:
            raise ValueError(f"contenders are {', '.join(CONTENDERS)}; got {unknown}")
        if self.batch_limit < 1 or self.repetitions < 1:
            raise ValueError("max_num_seqs and repetitions must be at least 1")
        if not (self.load > 0 and self.duration_s > 0 and self.drain_s > 0):
            raise ValueError("load, duration_s and drain_s must be positive")
        wants_router = any(name.startswith("vllm-router") for name in self.contenders)
        if wants_router and not self.vllm_router.exists():
            raise ValueError(f"{self.vllm_router} is missing: run scripts/vllm-router-env first")

    def requests(self, capacity_tokens_per_s: float, repetition: int) -> list[TraceRequest]:
        """The requests of one repetition: the same for every contender.

        Args:
            capacity_tokens_per_s: what the engines make when they are saturated.
            repetition: from 0; it shifts the seed.
        """
        rate_per_s = self.load * capacity_tokens_per_s
        made = build_workload(
            WorkloadSpec(
                trace=self.trace,
                arrivals=Poisson(),
                # A first guess of one request for every 100 tokens; the stretch makes it exact.
                rate_per_s=rate_per_s / 100,
                requests=max(1, round(self.duration_s * rate_per_s / self._mean_tokens())),
                prediction=Prediction.NOISY,
                decode_tokens_max=self.decode_tokens_max,
                seed=self.seed + repetition,
            )
        )
        return stretched(made, rate_per_s)

    def _mean_tokens(self) -> float:
        sample = self._sample(2000)
        return sum(request.decode_tokens for request in sample) / len(sample)

    def calibration(self) -> list[TraceRequest]:
        """A burst that keeps every batch full for a while."""
        count = CALIBRATION_ROUNDS * self.batch_limit * len(self.workers)
        return [replace(request, arrival_s=0.0) for request in self._sample(count)]

    def _sample(self, count: int) -> list[TraceRequest]:
        return build_workload(
            WorkloadSpec(
                trace=self.trace,
                rate_per_s=1.0,
                requests=count,
                decode_tokens_max=self.decode_tokens_max,
                seed=self.seed,
            )
        )

    def settings(self, contender: str, url: str, run: int) -> ReplaySettings:
        """How the client sends in one run; no two runs share a prompt, so that none is cached."""
        return ReplaySettings(
            url=url,
            spread=self.workers if contender == DIRECT else (),
            policy=contender,
            drain_s=self.drain_s,
            vocabulary_tokens=self.vocabulary_tokens,
            prompt_salt=(run + 1) * SALT_STEP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One contender once: what the client saw and what the engines say.

    Attributes:
        contender: its name.
        repetition: from 0.
        records: one a request.
        sent: requests sent.
        engines: their counters.
        arrivals_end_s: when the last request was sent, on the engines' clock of looks.
    """

    contender: str
    repetition: int
    records: list[OutcomeRecord]
    sent: int
    engines: EngineWatch
    arrivals_end_s: float


def stretched(requests: Sequence[TraceRequest], tokens_per_s: float) -> list[TraceRequest]:
    """Stretch the arrival times until this very sample offers so many output tokens per second."""
    last_s = requests[-1].arrival_s
    wanted_s = sum(request.decode_tokens for request in requests) / tokens_per_s
    factor = wanted_s / last_s if last_s > 0 else 1.0
    return [replace(request, arrival_s=request.arrival_s * factor) for request in requests]


def schedule(spec: SideBySideSpec) -> list[tuple[int, str]]:
    """(repetition, contender) in the order of the runs: to and fro, so that no one is always first.

    A machine that grows slower or faster over the measurement thus touches all alike.
    """
    forth = list(spec.contenders)
    return [
        (repetition, contender)
        for repetition in range(spec.repetitions)
        for contender in (forth if repetition % 2 == 0 else forth[::-1])
    ]


async def measure_capacity(spec: SideBySideSpec) -> float:
    """Output tokens per second of the saturated engines, sent to by the client alone.

    Raises:
        ClusterError: they were never all saturated.
    """
    await until_idle(spec.workers, SETTLE_WITHIN_S)
    settings = replace(
        spec.settings(DIRECT, spec.workers[0], -1), prompt_salt=0, drain_s=CALIBRATION_DRAIN_S
    )
    # Twice: the first burst finds code unloaded and memory untouched.
    await Replay(warm_up_workload(), settings).run()
    async with watching(spec.workers) as watch:
        await Replay(spec.calibration(), settings).run()
    capacity = watch.saturated_tokens_per_s()
    if capacity is None or capacity <= 0:
        raise ClusterError("the engines never had requests waiting: is max_num_seqs theirs?")
    return capacity


async def measure(
    spec: SideBySideSpec, capacity_tokens_per_s: float, tell: Callable[[str], None]
) -> list[Run]:
    """Run the whole schedule.

    Raises:
        ClusterError: a router does not start.
        TimeoutError: an engine does not become idle between two runs.
    """
    runs: list[Run] = []
    for number, (repetition, contender) in enumerate(schedule(spec)):
        tell(f"run {number + 1} of {len(schedule(spec))}: {contender}")
        requests = spec.requests(capacity_tokens_per_s, repetition)
        await until_idle(spec.workers, SETTLE_WITHIN_S)
        async with router_of(spec, contender) as url:
            runs.append(await _run(spec, (number, repetition, contender), url, requests))
        await asyncio.sleep(PAUSE_S)
    return runs


async def _run(
    spec: SideBySideSpec, which: tuple[int, int, str], url: str, requests: Sequence[TraceRequest]
) -> Run:
    number, repetition, contender = which
    settings = spec.settings(contender, url, number)
    await Replay(warm_up_workload(), settings).run()
    await until_idle(spec.workers, SETTLE_WITHIN_S)
    async with watching(spec.workers) as watch:
        began_s = asyncio.get_running_loop().time()
        replay = Replay(requests, settings)
        records = await replay.run()
    return Run(
        contender=contender,
        repetition=repetition,
        records=records,
        sent=replay.sent,
        engines=watch,
        arrivals_end_s=began_s + requests[-1].arrival_s,
    )


@contextlib.asynccontextmanager
async def router_of(spec: SideBySideSpec, contender: str) -> AsyncIterator[str]:
    """Start a contender's router; yields where it answers."""
    if contender == DIRECT:
        yield spec.workers[0]
        return
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_ports(2)
    url = f"http://{LOOPBACK}:{port}"
    kind, policy = contender.split()
    if kind == "bidgate":
        command, ready = _bidgate(spec, policy, port), "/ready"
    else:
        command, ready = _vllm_router(spec, policy, port, metrics_port), "/health"
    with stopping([]) as children:
        log = spec.log_dir / f"{contender.replace(' ', '-')}.log"
        children.append(start(contender, command, log))
        await until_ready(children[0], url + ready)
        yield url


def _bidgate(spec: SideBySideSpec, policy: str, port: int) -> list[str]:
    return [
        *bidgate_command(),
        "serve",
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--policy", policy),
        *("--max-num-seqs", str(spec.batch_limit)),
        *("--log-level", "warning"),
        "--workers",
        *spec.workers,
    ]


def _vllm_router(spec: SideBySideSpec, policy: str, port: int, metrics_port: int) -> list[str]:
    return [
        str(spec.vllm_router),
        *("--host", LOOPBACK),
        *("--port", str(port)),
        *("--policy", policy),
        *("--prometheus-port", str(metrics_port)),
        *("--log-level", "error"),
        *("--worker-startup-check-interval", "1"),
        "--worker-urls",
        *spec.workers,
    ]
