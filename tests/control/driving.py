"""Small configurations of every policy, and short hands for the events that drive a router."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from service.control import (
    Arrived,
    Command,
    ControlConfig,
    Event,
    Kernel,
    Left,
    Outcome,
    PolicyName,
    PriceConfig,
    Progressed,
    Refuse,
    Request,
    Router,
    Start,
    Variant,
    WorkerJoined,
    WorkerSpec,
    WorkerState,
)

SMALL = ControlConfig(
    horizon_iterations=64,
    bucket_iterations=4,
    age_bound_s=2.0,
    age_factor=0.0,
    queue_max=6,
    max_wait_s=20.0,
    no_worker_hold_s=5.0,
    decode_tokens_default=8,
    prices=PriceConfig(history_max=32, batch=8, steps=2, refresh_s=0.0),
)
"""Short look-ahead, short queue, short waits: every bound is met soon."""


def with_prices(config: ControlConfig, **changes: object) -> ControlConfig:
    """The same with other price settings."""
    return replace(config, prices=replace(config.prices, **changes))


PUBLISHED = with_prices(SMALL, variant=Variant.PUBLISHED)
POLICIES: dict[str, ControlConfig] = {
    "forward": SMALL,
    "forward, zero prices": with_prices(SMALL, zero=True),
    "published": PUBLISHED,
    "published, inline": with_prices(PUBLISHED, inline=True),
    "published, inline, fixed horizon": replace(
        with_prices(PUBLISHED, inline=True), fixed_horizon=True, horizon_iterations=400
    ),
    **{
        name.value: replace(SMALL, policy=name)
        for name in PolicyName
        if name is not PolicyName.ONLINE_LP
    },
}
"""Every decision rule by a readable name."""
PUSHING = ("round_robin", "least_outstanding", "random", "power_of_two")
CENTRAL = tuple(name for name in POLICIES if name not in PUSHING)


def spec(
    worker_id: str = "w0",
    batch_limit: int = 4,
    kv: int | None = 1000,
    block: int = 1,
    iteration_s: float = 0.02,
    models: frozenset[str] | None = None,
) -> WorkerSpec:
    """A worker."""
    return WorkerSpec(
        worker_id=worker_id,
        batch_limit=batch_limit,
        kv_capacity_tokens=kv,
        block_tokens=block,
        iteration_s=iteration_s,
        models=models,
    )


def router_with(config: ControlConfig, *specs: WorkerSpec) -> Router:
    """A router whose workers are up at time 0."""
    router = Router(config)
    for one in specs:
        assert router.handle(WorkerJoined(one), 0.0) == []
    return router


def ask(request_id: str, now_s: float = 0.0, prompt: int = 10, **fields: object) -> Arrived:
    """An arrival."""
    return Arrived(
        Request(request_id=request_id, arrival_s=now_s, prompt_tokens=prompt, **fields)  # type: ignore[arg-type]
    )


def starts(commands: list[Command]) -> list[tuple[str, str]]:
    """(request, worker) of the starts among some commands, in order."""
    return [(c.request_id, c.worker_id) for c in commands if isinstance(c, Start)]


def refusals(commands: list[Command]) -> list[tuple[str, str]]:
    """(request, reason) of the refusals among some commands."""
    return [(c.request_id, c.reason.value) for c in commands if isinstance(c, Refuse)]


def accounted(router: Router, now_s: float) -> bool:
    """Whether entered == waiting + running + ended + refused."""
    stats = router.stats(now_s)
    gone = sum(stats.ended.values()) + sum(stats.refused.values())
    return stats.entered == stats.waiting + stats.running + gone


@dataclass
class Decoding:
    """A request inside a worker of the test's own."""

    worker_id: str
    prompt: int
    length: int
    sequences: int = 1
    steps: int = 0


@dataclass
class PlainFleet:
    """Engines in a loop: every started request makes one token per iteration, whatever it holds.

    There is no admission inside: if a router starts too much, `peak_kv` and `peak_batch` show it.
    """

    router: Router
    iteration_s: float
    kernel: Kernel = Kernel.MIXED
    now_s: float = 0.0
    lengths: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    decoding: dict[str, Decoding] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    peak_kv: dict[str, int] = field(default_factory=dict)
    peak_batch: dict[str, int] = field(default_factory=dict)

    def send(self, event: Event) -> None:
        """Let something happen now."""
        self._obey(self.router.handle(event, self.now_s))

    def arrive(self, request: Request, length: int) -> None:
        """A request that will decode `length` tokens comes in now."""
        self.lengths[request.request_id] = (request.prompt_tokens, length, request.sequences)
        self.send(Arrived(request))

    def tick(self) -> None:
        """Decide now, and refresh prices if that is wanted."""
        self._obey(self.router.tick(self.now_s))
        self._measure()
        problem = self.router.price_problem(self.now_s)
        if problem is not None:
            self.router.adopt(problem.solve(), self.now_s)

    def iterate(self) -> None:
        """Let one iteration pass on every worker."""
        self.now_s += self.iteration_s
        seen: dict[str, int] = {}
        for request_id, one in list(self.decoding.items()):
            one.steps += 1
            prefill = 1 if self.kernel is Kernel.MIXED else 0
            if one.steps == one.length + prefill:
                del self.decoding[request_id]
                self.send(Left(request_id, Outcome.COMPLETED, one.length))
            elif one.steps > prefill:
                seen[request_id] = one.steps - prefill
        if seen:
            self.send(Progressed(seen))
        self._measure()

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Refuse):
                self.refused[command.request_id] = command.reason.value
                continue
            prompt, length, sequences = self.lengths[command.request_id]
            self.decoding[command.request_id] = Decoding(
                command.worker_id, prompt, length, sequences
            )
            self.started_s[command.request_id] = self.now_s
            self.order.append((command.request_id, command.worker_id))

    def _measure(self) -> None:
        kv, batch = dict[str, int](), dict[str, int]()
        for one in self.decoding.values():
            tokens = one.prompt + one.steps + (0 if self.kernel is Kernel.MIXED else 1)
            kv[one.worker_id] = kv.get(one.worker_id, 0) + one.sequences * tokens
            batch[one.worker_id] = batch.get(one.worker_id, 0) + one.sequences
        for peak, used in ((self.peak_kv, kv), (self.peak_batch, batch)):
            for worker_id, amount in used.items():
                peak[worker_id] = max(peak.get(worker_id, 0), amount)


UP = WorkerState.UP
DOWN = WorkerState.DOWN
