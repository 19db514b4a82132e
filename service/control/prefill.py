"""3 controller, prefill workers: who computes a prompt, how long that takes, what memory it pins.

They stay outside the linear program, which prices the decode workers' future. A prefill is short
and its pool is bounded plainly: by the tokens sent to a worker and not answered, by its batch limit
and by its KV memory. That memory is held until the decode worker has fetched it; where that never
happens the engine keeps it for its lease, and so does this account. Read handoff.py next.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from service.control.config import HandoffConfig
from service.control.events import (
    Request,
    Role,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReport,
    WorkerReported,
    WorkerSpec,
    WorkerState,
)
from service.control.stats import PrefillStats

REPORT_TRUST_S = 2.0
"""A report of a worker's KV memory older than this counts no more."""
PACE_MEMORY = 0.95
"""Weight of everything known before, at each new prefill."""
PACE_GUESS_TOKENS = 1000.0
"""Size of the imagined prefill that stands for the first guess."""

WorkerEvent: TypeAlias = WorkerJoined | WorkerChanged | WorkerReported | WorkerGone


class PrefillPace:
    """Seconds of a prefill as base + tokens / rate, by least squares that forget.

    Args:
        tokens_per_s: first guess of the rate; the base is learned.
    """

    def __init__(self, tokens_per_s: float) -> None:
        guess_s = PACE_GUESS_TOKENS / tokens_per_s
        self._weight = 2.0
        self._tokens, self._seconds = PACE_GUESS_TOKENS, guess_s
        self._squares, self._products = PACE_GUESS_TOKENS**2, PACE_GUESS_TOKENS * guess_s

    def observe(self, tokens: float, elapsed_s: float) -> None:
        """Learn from one prefill: tokens that were ahead of it, its own included."""
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", tokens),
            ("_seconds", elapsed_s),
            ("_squares", tokens * tokens),
            ("_products", tokens * elapsed_s),
        ):
            setattr(self, name, PACE_MEMORY * getattr(self, name) + value)

    def predict_s(self, tokens: float) -> float:
        """Seconds until so many tokens are computed; never negative."""
        base_s, per_token_s = self._line()
        return base_s + per_token_s * tokens

    @property
    def tokens_per_s(self) -> float:
        """The rate, without the base; infinite when size seems not to matter."""
        per_token_s = self._line()[1]
        return 1.0 / per_token_s if per_token_s > 0 else math.inf

    def _line(self) -> tuple[float, float]:
        """(base in seconds, seconds per token), neither of them negative."""
        spread = self._weight * self._squares - self._tokens**2
        if spread <= 1e-9 * self._weight * self._squares:
            return 0.0, self._seconds / max(1.0, self._tokens)
        per_token_s = (self._weight * self._products - self._tokens * self._seconds) / spread
        base_s = (self._seconds - per_token_s * self._tokens) / self._weight
        if per_token_s < 0:
            return self._seconds / self._weight, 0.0
        if base_s < 0:
            return 0.0, self._products / self._squares
        return base_s, per_token_s


@dataclass(slots=True, eq=False)
class _Charge:
    """KV memory that one request holds on a prefill worker.

    Attributes:
        request_id: whose. tokens: of its prompt. kv_tokens: the same in whole blocks.
        ahead: tokens sent to the worker when it was sent, its own included. began_s: when that was.
        prefilled: whether the worker has answered. orphaned: nobody will fetch the memory.
        until_s: when the charge ends by itself; infinite while the request's events end it.
        ended: it is not counted any more.
    """

    request_id: str
    worker: _Prefiller
    tokens: int
    kv_tokens: int
    ahead: int
    began_s: float
    prefilled: bool = False
    orphaned: bool = False
    until_s: float = math.inf
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Prefiller:
    """One prefill worker; mutable, owned by the pool."""

    spec: WorkerSpec
    state: WorkerState
    pace: PrefillPace
    kv_capacity_tokens: float
    block_tokens: int
    models: frozenset[str] | None
    legs: int = 0
    leg_tokens: int = 0
    kv_tokens: int = 0
    orphaned_tokens: int = 0
    reported_kv: float = 0.0
    booked_since: int = 0
    reported_at_s: float = -math.inf
    left_up_s: float = -math.inf

    def serves(self, model: str) -> bool:
        """Whether it is up and serves a model, or may: unknown lists and "" match everything."""
        known = not model or self.models is None or model in self.models
        return known and self.state is WorkerState.UP

    def in_blocks(self, tokens: int) -> int:
        """Tokens in whole KV blocks."""
        return math.ceil(tokens / self.block_tokens) * self.block_tokens

    def has_room(self, config: HandoffConfig, tokens: int, now_s: float) -> bool:
        """Whether one more prompt may be sent: an empty worker takes any."""
        if not self.legs and not self.kv_tokens:
            return True
        if self.legs >= self.spec.batch_limit or self.leg_tokens >= config.prefill_tokens_max:
            return False
        used = float(self.kv_tokens)
        if now_s - self.reported_at_s <= REPORT_TRUST_S:
            used = max(used, self.reported_kv + self.booked_since)
        return used + self.in_blocks(tokens) <= self.kv_capacity_tokens


class PrefillPool:
    """All prefill workers and what they were given.

    Attributes:
        version: grows whenever it changes which of them are up and what they serve.
    """

    def __init__(self, config: HandoffConfig) -> None:
        self.version = 0
        self._config = config
        self._workers: dict[str, _Prefiller] = {}
        self._charges: dict[str, _Charge] = {}
        self._ends: list[tuple[float, int, _Charge]] = []
        self._count = itertools.count()

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._workers

    def follow(self, event: WorkerEvent, now_s: float) -> bool:
        """Book an event of a worker if it is a prefill worker; answers whether it is."""
        match event:
            case WorkerJoined(spec, state):
                if spec.role is not Role.PREFILL:
                    return False
                self._join(spec, state)
            case WorkerChanged(worker_id, state):
                if worker_id not in self._workers:
                    return False
                worker = self._workers[worker_id]
                if worker.state is WorkerState.UP and state is not WorkerState.UP:
                    worker.left_up_s = now_s
                worker.state = state
                self.version += 1
            case WorkerReported(worker_id, report, reported_at_s):
                if worker_id not in self._workers:
                    return False
                self._report(self._workers[worker_id], report, reported_at_s)
            case WorkerGone(worker_id):
                if self._workers.pop(worker_id, None) is None:
                    return False
                self.version += 1
        return True

    def serves(self, model: str, avoid: frozenset[str] = frozenset()) -> bool:
        """Whether a worker that is up and not avoided serves a model."""
        return any(
            worker.serves(model) for name, worker in self._workers.items() if name not in avoid
        )

    def left_up_s(self) -> float:
        """When a prefill worker last ceased to be up; -inf when none did."""
        return max((worker.left_up_s for worker in self._workers.values()), default=-math.inf)

    def is_open(self, now_s: float) -> bool:
        """Whether any worker would take a prompt of one token."""
        return any(True for _ in self._open_ones("", 1, now_s))

    def lead_s(self, tokens: int, now_s: float) -> float:
        """Shortest predicted time until a prompt of so many tokens, sent now, is computed."""
        waits_s = (
            worker.pace.predict_s(worker.leg_tokens + tokens)
            for worker in self._open_ones("", tokens, now_s)
        )
        return min(waits_s, default=0.0)

    def choose(self, request: Request, avoid: set[str], now_s: float) -> str | None:
        """The worker that would be done with a request's prompt first; None when none has room."""
        tokens = request.prompt_tokens
        able = [
            worker
            for worker in self._open_ones(request.model, tokens, now_s)
            if worker.spec.worker_id not in avoid
        ]
        best = min(
            able, key=lambda worker: worker.pace.predict_s(worker.leg_tokens + tokens), default=None
        )
        return None if best is None else best.spec.worker_id

    def book(self, request: Request, worker_id: str, now_s: float) -> float:
        """Charge a prompt to a worker; returns when it should be computed, in seconds."""
        worker, tokens = self._workers[worker_id], request.prompt_tokens
        worker.legs += 1
        worker.leg_tokens += tokens
        kv_tokens = worker.in_blocks(tokens)
        worker.kv_tokens += kv_tokens
        worker.booked_since += kv_tokens
        self._charges[request.request_id] = _Charge(
            request.request_id, worker, tokens, kv_tokens, worker.leg_tokens, now_s
        )
        return now_s + worker.pace.predict_s(worker.leg_tokens)

    def prefilled(self, request_id: str, now_s: float) -> None:
        """A prompt is computed; its memory is held until it is fetched.

        Raises:
            KeyError: no prefill of the request is booked.
        """
        charge = self._charges[request_id]
        self._answered(charge)
        charge.worker.pace.observe(charge.ahead, now_s - charge.began_s)

    def hand_over(self, request: Request, now_s: float) -> None:
        """The decode worker fetches the memory now; one that does not stream is not seen to."""
        charge = self._charges.get(request.request_id)
        if charge is not None and not request.streams:
            self._end_later(charge, now_s + self._config.transfer_s)

    def fetched(self, request_id: str) -> None:
        """The decode worker has the memory."""
        charge = self._charges.pop(request_id, None)
        if charge is not None:
            self._release(charge)

    def leave(self, request_id: str, now_s: float, *, kept: bool = False) -> None:
        """A request has no use for its prefill any more.

        Args:
            request_id: whose.
            now_s: the time.
            kept: the engine may hold the memory although it did not answer. What is computed and
                was not fetched it always holds, until its lease ends.
        """
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return
        if not (charge.prefilled or kept):
            self._release(charge)
            return
        self._answered(charge)
        charge.orphaned = True
        charge.worker.orphaned_tokens += charge.kv_tokens
        self._end_later(charge, now_s + self._config.lease_s)

    def expire(self, now_s: float) -> None:
        """End the charges whose time is over."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, _, charge = heapq.heappop(self._ends)
            if charge.until_s == until_s and not charge.ended:
                if not charge.orphaned:
                    del self._charges[charge.request_id]
                self._release(charge)

    def stats(self) -> tuple[PrefillStats, ...]:
        """Every worker, for metrics and tests."""
        return tuple(
            PrefillStats(
                worker_id=name,
                state=worker.state,
                legs=worker.legs,
                leg_tokens=worker.leg_tokens,
                kv_tokens=worker.kv_tokens,
                orphaned_kv_tokens=worker.orphaned_tokens,
                kv_capacity_tokens=(
                    int(worker.kv_capacity_tokens)
                    if math.isfinite(worker.kv_capacity_tokens)
                    else None
                ),
                tokens_per_s=worker.pace.tokens_per_s,
            )
            for name, worker in self._workers.items()
        )

    def _open_ones(self, model: str, tokens: int, now_s: float) -> Iterator[_Prefiller]:
        """Workers that would take a prompt of so many tokens now."""
        for worker in self._workers.values():
            if worker.serves(model) and worker.has_room(self._config, tokens, now_s):
                yield worker

    def _answered(self, charge: _Charge) -> None:
        """The worker has nothing more to do for the request."""
        if not charge.prefilled:
            charge.prefilled = True
            charge.worker.legs -= 1
            charge.worker.leg_tokens -= charge.tokens

    def _release(self, charge: _Charge) -> None:
        """The memory is free again; once, however many find out."""
        if charge.ended:
            return
        charge.ended = True
        self._answered(charge)
        charge.worker.kv_tokens -= charge.kv_tokens
        if charge.orphaned:
            charge.worker.orphaned_tokens -= charge.kv_tokens

    def _end_later(self, charge: _Charge, until_s: float) -> None:
        charge.until_s = until_s
        heapq.heappush(self._ends, (until_s, next(self._count), charge))

    def _join(self, spec: WorkerSpec, state: WorkerState) -> None:
        """Add a worker, or take its new specification."""
        capacity = math.inf if spec.kv_capacity_tokens is None else float(spec.kv_capacity_tokens)
        pace = PrefillPace(self._config.prefill_tokens_per_s)
        known = self._workers.get(spec.worker_id)
        if known is None:
            self._workers[spec.worker_id] = _Prefiller(
                spec, state, pace, capacity, spec.block_tokens, spec.models
            )
        else:
            known.spec, known.state, known.models = spec, state, spec.models
            known.kv_capacity_tokens, known.block_tokens = capacity, spec.block_tokens
        self.version += 1

    def _report(self, worker: _Prefiller, report: WorkerReport, at_s: float) -> None:
        """Correct a worker by what its engine said; unknown values change nothing."""
        if report.restarted:
            for _, _, charge in self._ends:
                if charge.worker is worker and charge.orphaned:
                    self._release(charge)
        if report.kv_capacity_tokens is not None and worker.spec.kv_capacity_tokens is None:
            worker.kv_capacity_tokens = float(report.kv_capacity_tokens)
        if report.block_tokens is not None:
            worker.block_tokens = report.block_tokens
        if report.models is not None and report.models != worker.models:
            worker.models = report.models
            self.version += 1
        if report.kv_tokens_used is not None:
            worker.reported_kv, worker.reported_at_s = float(report.kv_tokens_used), at_s
            worker.booked_since = sum(
                charge.kv_tokens
                for charge in self._charges.values()
                if charge.worker is worker and charge.began_s >= at_s
            )
