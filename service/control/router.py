"""3 controller: the sans-I/O state machine. Events in, commands out, time as a parameter.

Holds the waiting requests, the ledger of started ones and the fleet; asks a policy at every tick.
Read view.py for what a policy sees, forward.py and published.py for the decision itself.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from service.control.baselines import CentralFcfs
from service.control.columns import FloatArray, Horizon, IntArray, Usage
from service.control.config import ControlConfig, PolicyName
from service.control.events import (
    Arrived,
    Command,
    Event,
    FirstToken,
    Left,
    Outcome,
    Progressed,
    Refusal,
    Refuse,
    Request,
    Returned,
    Start,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReported,
    WorkerState,
)
from service.control.fleet_state import FleetState
from service.control.ledger import Ledger
from service.control.lengths import LengthPredictor
from service.control.policies import make_policy
from service.control.prices import PriceProblem, PriceSolution
from service.control.rate import RateMonitor
from service.control.stats import Counters, RouterStats
from service.control.view import FleetView, Pair, View
from service.control.waiting import Entry, WaitingRoom, fit_to_fleet
from service.control.worker_stats import worker_stats

TICK_MIN_S = 0.001
IDLE_REFRESH_S = 1.0
"""Time between two price refreshes while no request waits."""
RETURNS_MAX = 8
"""Workers that may turn one request away before it is refused."""


class Router:
    """Holds every waiting and started request; decides which waiting request starts where."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._policy = make_policy(config)
        self._fallback = CentralFcfs()
        self._predictor = LengthPredictor(config.decode_tokens_default)
        self._fleet = FleetState()
        self._waiting = WaitingRoom()
        self._ledger = Ledger(config.kernel, self._predictor)
        buckets = max(1, config.horizon_iterations // config.bucket_iterations)
        self._horizon = Horizon(buckets, config.bucket_iterations)
        self._rate = RateMonitor(config.rate)
        self._nobody_up_since_s = -np.inf
        self._counters = Counters()
        self._adopted_s: float | None = None
        self._asked_s = -np.inf
        self._natural: tuple[FloatArray, FloatArray] | None = None

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Book one event; answers only refusals that need no decision (queue full, too large).

        Raises:
            KeyError: the event names a request or worker that the router does not hold.
        """
        match event:
            case Arrived(request):
                return self._arrive(request)
            case FirstToken(request_id):
                self._ledger.progress({request_id: 1})
            case Progressed(decode_tokens):
                self._ledger.progress(decode_tokens)
            case Returned(request_id):
                return self._return(request_id, now_s)
            case Left(request_id, outcome, decode_tokens):
                self._leave(request_id, outcome, decode_tokens, now_s)
            case WorkerJoined() | WorkerChanged() | WorkerReported() | WorkerGone():
                self._follow_worker(event, now_s)
            case _:
                assert_never(event)
        return []

    def tick(self, now_s: float) -> list[Command]:
        """Decide: refusals of those who waited too long, then starts in order of admission.

        Requests that will not wait at all are refused after the starts.
        """
        self._counters.ticks += 1
        shift = self._rate.look(now_s)
        if shift is not None and shift.rose:
            self._policy.follow_rise(shift)
        commands = self._refuse_expired(now_s, patient=True)
        commands += self._refuse_unreachable(now_s)
        # Prices that move inside the decision move in every period, whoever waits.
        if (len(self._waiting) or self._config.prices.inline) and self._fleet.up().any():
            commands += self._start(self._decide(now_s), now_s)
        return commands + self._refuse_expired(now_s, patient=False)

    def next_tick_s(self, now_s: float) -> float | None:
        """When the next timer tick is wanted; None while only an event can change anything."""
        if not len(self._waiting):
            return None
        due_s = self._waiting.next_expiry_s()
        up = self._fleet.up()
        if not up.any():
            since_s = max(self._nobody_up_since_s, self._waiting.oldest_arrival_s())
            due_s = min(due_s, since_s + self._config.no_worker_hold_s)
        elif self._has_free_slot().any():
            due_s = min(due_s, now_s + float(self._fleet.array("iteration_s")[up].min()))
        return max(due_s, now_s + TICK_MIN_S)

    def price_problem(self, now_s: float) -> PriceProblem | None:
        """Return an immutable snapshot to solve, when a price refresh is due; else None."""
        settings = self._config.prices
        # With nobody waiting nothing is scarce: prices only have to fade, and an arrival at an
        # idle fleet must not compete with their refresh.
        pause_s = settings.refresh_s if len(self._waiting) else IDLE_REFRESH_S
        if settings.inline or now_s - self._asked_s < pause_s:
            return None
        if self._config.policy is not PolicyName.ONLINE_LP or not len(self._fleet):
            return None
        self._asked_s = now_s
        return self._policy.price_problem(self._view(now_s))

    def adopt(self, solution: PriceSolution, now_s: float) -> None:
        """Take new prices; ones that are not finite or for another fleet are dropped, counted."""
        ids = self._fleet.worker_ids
        if not solution.is_finite() or solution.worker_ids != ids:
            self._counters.prices_dropped += 1
            return
        self._policy.adopt(solution)
        self._natural = None
        self._counters.price_refreshes += 1
        self._adopted_s = now_s

    @property
    def fallbacks(self) -> tuple[int, str]:
        """Ticks decided by the fallback so far, and the fault behind the last of them."""
        return self._counters.fallback_ticks, self._counters.last_fault

    def stats(self, now_s: float) -> RouterStats:
        """Counters and gauges for metrics and tests."""
        counters = self._counters
        oldest_s = self._waiting.oldest_arrival_s()
        return RouterStats(
            entered=counters.entered,
            waiting=len(self._waiting),
            running=len(self._ledger),
            oldest_wait_s=max(0.0, now_s - oldest_s) if np.isfinite(oldest_s) else 0.0,
            ended=dict(counters.ended),
            refused=dict(counters.refused),
            starts=counters.starts,
            returns=counters.returns,
            ticks=counters.ticks,
            fallback_ticks=counters.fallback_ticks,
            last_fault=counters.last_fault,
            price_refreshes=counters.price_refreshes,
            prices_dropped=counters.prices_dropped,
            price_age_s=0.0 if self._adopted_s is None else now_s - self._adopted_s,
            arrivals_per_s=self._rate.per_s(now_s),
            rate_rises=self._rate.rises,
            rate_falls=self._rate.falls,
            workers=worker_stats(
                self._fleet,
                self._ledger,
                self._policy,
                self._has_free_slot() & self._fleet.engine_queue_empty(now_s),
            ),
        )

    @property
    def waiting(self) -> int:
        """Requests that wait for a start."""
        return len(self._waiting)

    def prices_of(self, worker_id: str) -> tuple[float, float]:
        """Mean price of a batch slot and of a KV token on a worker, for one iteration."""
        if self._natural is None:
            self._natural = self._policy.natural_prices(self._fleet.worker_ids)
        g = self._fleet.index.get(worker_id)
        if g is None or g >= self._natural[0].size:
            return 0.0, 0.0
        return float(self._natural[0][g]), float(self._natural[1][g])

    def _arrive(self, request: Request) -> list[Command]:
        if request.request_id in self._waiting or request.request_id in self._ledger:
            raise KeyError(f"request {request.request_id!r} is held already")
        self._counters.entered += 1
        self._rate.arrive(request.arrival_s)
        wait_s = self._config.max_wait_s
        if request.max_wait_s is not None:
            wait_s = min(wait_s, request.max_wait_s)
        entry = Entry(
            request,
            self._predictor.forecast(request),
            self._counters.entered,
            request.arrival_s + wait_s,
            request.arrival_s,
        )
        fit_to_fleet(entry, self._fleet)
        self._waiting.add(entry)
        turned_away = self._turn_away(entry)
        return [] if turned_away is None else [self._refuse(request.request_id, *turned_away)]

    def _turn_away(self, entry: Entry) -> tuple[Refusal, str] | None:
        """Reasons to refuse at once, before any wait."""
        if len(self._waiting) > self._config.queue_max:
            return Refusal.QUEUE_FULL, f"{self._config.queue_max} requests are waiting already"
        if not len(self._fleet):
            return None
        model = entry.request.model
        if not self._fleet.serves(model).any():
            return Refusal.UNKNOWN_MODEL, f"no worker serves the model {model!r}"
        return self._too_large(entry) if entry.too_large else None

    def _too_large(self, entry: Entry) -> tuple[Refusal, str]:
        request = entry.request
        room = max(limits.room for limits in self._fleet.shapes(request.model).serving)
        return Refusal.TOO_LARGE, (
            f"the prompt's {request.prompt_tokens} tokens exceed the KV cache of every worker "
            f"that serves it (at most {room:.0f} tokens)"
        )

    def _return(self, request_id: str, now_s: float) -> list[Command]:
        entry, worker, _ = self._ledger.end(request_id)
        if worker >= 0:
            entry.avoid.add(self._fleet.workers[worker].spec.worker_id)
            self._fleet.own_end(worker, entry.sequences, now_s)
        self._counters.returns += 1
        entry.entered_s = now_s
        fit_to_fleet(entry, self._fleet)
        self._waiting.add(entry)
        if len(entry.avoid) > RETURNS_MAX:
            detail = f"{len(entry.avoid)} workers in a row did not take the request"
            return [self._refuse(request_id, Refusal.NO_WORKER, detail)]
        return []

    def _leave(
        self, request_id: str, outcome: Outcome, decode_tokens: int | None, now_s: float
    ) -> None:
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        else:
            entry, worker, seen = self._ledger.end(request_id)
            if worker >= 0:
                self._fleet.own_end(worker, entry.sequences, now_s)
            if outcome is Outcome.COMPLETED:
                tokens = seen if decode_tokens is None else decode_tokens
                self._predictor.observe(entry.request, tokens)
        self._counters.ended[outcome] += 1

    def _follow_worker(
        self, event: WorkerJoined | WorkerChanged | WorkerReported | WorkerGone, now_s: float
    ) -> None:
        was_up, version = self._fleet.up().any(), self._fleet.version
        match event:
            case WorkerJoined(spec, state):
                self._fleet.join(spec, state)
            case WorkerChanged(worker_id, state):
                self._fleet.change(worker_id, state, now_s)
                if state is WorkerState.UP:
                    self._waiting.forgive(worker_id)
            case WorkerReported(worker_id, report, reported_at_s):
                own = self._ledger.own_load(self._fleet.index[worker_id])
                self._fleet.report(worker_id, report, own, reported_at_s)
            case WorkerGone(worker_id):
                self._ledger.drop_worker(self._fleet.remove(worker_id))
            case _:
                assert_never(event)
        self._natural = None
        if self._fleet.version != version:
            self._waiting.refit(self._fleet)
        if was_up and not self._fleet.up().any():
            self._nobody_up_since_s = now_s

    def _refuse(self, request_id: str, reason: Refusal, detail: str) -> Refuse:
        self._waiting.remove(request_id)
        self._counters.refused[reason] += 1
        return Refuse(request_id, reason, detail)

    def _refuse_expired(self, now_s: float, *, patient: bool) -> list[Command]:
        """Refuse those whose wait is over, of those who would wait or of those who would not."""
        commands: list[Command] = []
        for request_id in self._waiting.expired(now_s):
            request = self._waiting.entries[request_id].request
            if (request.max_wait_s != 0) is not patient:
                continue
            reason, detail = Refusal.WOULD_WAIT, "no worker can start the request now"
            if patient:
                waited_s = now_s - request.arrival_s
                reason = Refusal.WAITED_TOO_LONG
                detail = f"no worker could start the request within {waited_s:.1f} s"
            commands.append(self._refuse(request_id, reason, detail))
        return commands

    def _refuse_unreachable(self, now_s: float) -> list[Command]:
        """Refuse those who have waited the hold time for any worker that serves them to come up."""
        hold_s = self._config.no_worker_hold_s
        commands: list[Command] = []
        for request_id in self._waiting.cut_off(self._fleet):
            entry = self._waiting.entries[request_id]
            lost_s = max(self._nobody_up_since_s, self._fleet.left_up_s(entry.request.model))
            if now_s - max(entry.entered_s, lost_s) < hold_s:
                continue
            detail = f"no worker that serves the request came up within {hold_s:g} s"
            why = self._too_large(entry) if entry.too_large else (Refusal.NO_WORKER, detail)
            commands.append(self._refuse(request_id, *why))
        return commands

    def _decide(self, now_s: float) -> list[Pair]:
        view = self._view(now_s)
        if self._config.prices.inline:
            self._natural = None
        try:
            return _checked(self._policy.decide(view), view)
        except Exception as fault:  # the one place: a broken policy must not stop the service
            self._counters.fallback_ticks += 1
            self._counters.last_fault = repr(fault)
            return _checked(self._fallback.decide(view), view)

    def _start(self, pairs: list[Pair], now_s: float) -> list[Command]:
        ids = [(self._waiting.ids[row], worker) for row, worker in pairs]
        commands: list[Command] = []
        for request_id, worker in ids:
            self._ledger.start(self._waiting.remove(request_id), worker, now_s)
            self._counters.starts += 1
            commands.append(Start(request_id, self._fleet.workers[worker].spec.worker_id))
        return commands

    def _view(self, now_s: float) -> View:
        fleet = self._fleet
        own = self._ledger.sequences_per_worker(len(fleet))

        def occupancy(horizon: Horizon, offset: float, workers: IntArray | None) -> Usage:
            return self._ledger.occupancy(fleet, now_s, horizon, offset, workers)

        def kv_ceiling_tokens(worker: int, spare_tokens: float) -> float:
            own_tokens = self._ledger.kv_ceiling_tokens(worker, spare_tokens)
            return own_tokens + fleet.workers[worker].foreign_kv

        return View(
            now_s=now_s,
            kernel=self._config.kernel,
            horizon=self._horizon,
            waiting=self._waiting.arrays(fleet),
            fleet=FleetView(
                worker_ids=fleet.worker_ids,
                batch_limit=fleet.array("batch_limit"),
                kv_capacity_tokens=fleet.array("kv_capacity_tokens"),
                block_tokens=fleet.array("block_tokens"),
                iteration_s=fleet.array("iteration_s"),
                outstanding=own + fleet.array("foreign_active"),
                engine_queue_empty=fleet.engine_queue_empty(now_s),
            ),
            occupancy=occupancy,
            kv_ceiling_tokens=kv_ceiling_tokens,
            arrivals_per_s=self._rate.per_s(now_s),
        )

    def _has_free_slot(self) -> np.ndarray:
        fleet = self._fleet
        own = self._ledger.sequences_per_worker(len(fleet))
        free = fleet.array("batch_limit") - own - fleet.array("foreign_active")
        return np.asarray(fleet.up() & (free >= 1))


def _checked(pairs: list[Pair], view: View) -> list[Pair]:
    """Starts that can all be booked, or none: half-booked starts would lose requests."""
    rows = [row for row, _ in pairs]
    if len(set(rows)) != len(rows):
        raise ValueError("a policy started one request twice")
    for row, worker in pairs:
        if not (0 <= row < len(view.waiting) and 0 <= worker < len(view.fleet)):
            raise ValueError(f"a policy started request {row} on worker {worker}: no such pair")
    return pairs
