"""3 controller: the sans-I/O state machine. Events in, commands out, time as a parameter.

Holds the waiting requests, the ledger of started ones and the fleet; asks a policy at every tick.
Read life.py for what becomes of a request, view.py for what a policy sees, forward.py and
published.py for the decision itself.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from service.control.affinity import Affinity
from service.control.baselines import CentralFcfs
from service.control.columns import FloatArray
from service.control.config import ControlConfig, PolicyName, taken_live
from service.control.displacement import Bid, Displacement
from service.control.events import (
    Arrived,
    Command,
    Event,
    FirstToken,
    Left,
    Prefilled,
    PrefillFailed,
    Progressed,
    Refusal,
    Returned,
    Start,
    WorkerChanged,
    WorkerGone,
    WorkerJoined,
    WorkerReported,
    WorkerState,
    nobody_up,
)
from service.control.fleet_state import FleetState
from service.control.handoff import Handoff
from service.control.ledger import Ledger
from service.control.lengths import LengthPredictor
from service.control.life import RETURNS_MAX, Life
from service.control.policies import make_policy
from service.control.prices import PriceSnapshot, PriceSolution
from service.control.rate import RateMonitor
from service.control.sight import Sight, checked
from service.control.stats import Counters, RouterStats
from service.control.tenants import Tenants
from service.control.view import Pair, Policy
from service.control.waiting import WaitingRoom
from service.control.worker_stats import has_free_slot, worker_stats

__all__ = ["IDLE_REFRESH_S", "RETURNS_MAX", "Router"]

TICK_MIN_S = 0.001
IDLE_REFRESH_S = 1.0
"""Time between two price refreshes while no request waits."""
TOO_SLOW = "its decisions took too long"


class Router:
    """Holds every waiting and started request; decides which waiting request starts where."""

    def __init__(self, config: ControlConfig, predictor: LengthPredictor | None = None) -> None:
        self._config = config
        self._policy = make_policy(config)
        self._fallback = CentralFcfs()
        predictor = predictor or LengthPredictor(
            config.decode_tokens_default, config.decode_quantile
        )
        self._fleet = FleetState(config.handoff, config.slow_start_s)
        self._affinity = Affinity(
            self._fleet, config.affinity.weight, config.handoff.prefill_tokens_per_s
        )
        self._waiting = WaitingRoom(self._affinity)
        self._handoff = Handoff(config.handoff, self._fleet, self._waiting)
        self._ledger = Ledger(predictor)
        self._tenants = Tenants(config.tenants)
        self._sight = Sight(
            config=config,
            fleet=self._fleet,
            waiting=self._waiting,
            ledger=self._ledger,
            handoff=self._handoff,
            tenants=self._tenants,
        )
        self._rate = RateMonitor(config.rate)
        self._nobody_up_since_s = -np.inf
        self._counters = Counters()
        self._life = Life(
            config=config,
            predictor=predictor,
            fleet=self._fleet,
            affinity=self._affinity,
            waiting=self._waiting,
            displacement=Displacement(self._waiting, self._tenants),
            handoff=self._handoff,
            ledger=self._ledger,
            tenants=self._tenants,
            rate=self._rate,
            counters=self._counters,
        )
        self._adopted_s: float | None = None
        self._asked_s = -np.inf
        self._natural: tuple[FloatArray, FloatArray] | None = None
        self._policy_rests_until_s = -np.inf

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Book one event; answers only refusals that need no decision (queue full, too large).

        A full queue may refuse another than who arrives.

        Raises:
            KeyError: the event names a request or worker that the router does not hold.
        """
        match event:
            case Arrived(request):
                return self._life.arrive(request, now_s)
            case FirstToken(request_id):
                self._ledger.progress({request_id: 1}, now_s)
                self._affinity.computed(request_id, now_s)
                self._fleet.prefill.fetched(request_id)
            case Progressed(decode_tokens):
                self._ledger.progress(decode_tokens, now_s)
            case Prefilled(request_id):
                self._life.prefilled(request_id, now_s)
            case PrefillFailed(request_id, kept):
                self._fleet.prefill.leave(request_id, now_s, kept=kept)
                self._ledger.prefilled(request_id, now_s)
            case Returned(request_id, worker_id):
                return self._life.give_back(request_id, worker_id, now_s)
            case Left(request_id, outcome, decode_tokens):
                self._life.leave(request_id, outcome, decode_tokens, now_s)
            case WorkerJoined() | WorkerChanged() | WorkerReported() | WorkerGone():
                self._follow_worker(event, now_s)
            case _:
                assert_never(event)
        return []

    def make_room(self, bid: Bid, size: int, now_s: float) -> list[Command]:
        """Refuse waiting requests that hold so many bytes and are worth less than a newcomer.

        Nobody is refused where that would not be enough.
        """
        return self._life.make_room(bid, size, now_s)

    def rest_policy(self, until_s: float) -> None:
        """Decide by the fallback until then: the policy has been too slow."""
        self._policy_rests_until_s = until_s

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
        commands += self._handoff.begin_tick(now_s)
        # Prices that move inside the decision move in every period, whoever waits.
        if (len(self._waiting) or self._config.prices.inline) and self._fleet.up().any():
            commands += self._start(self._decide(now_s), now_s)
        if len(self._waiting):
            commands += self._refuse_expired(now_s, patient=False)
        self._handoff.forget(commands, now_s)
        return commands

    def next_tick_s(self, now_s: float) -> float | None:
        """When the next timer tick is wanted; None while only an event can change anything."""
        if not len(self._waiting):
            return None
        due_s = self._waiting.next_expiry_s()
        up = self._fleet.up()
        if not up.any():
            since_s = max(self._nobody_up_since_s, self._waiting.oldest_arrival_s())
            due_s = min(due_s, since_s + self._config.no_worker_hold_s)
        elif (has_free_slot(self._fleet, self._ledger) | (up & self._fleet.decodes())).any():
            due_s = min(due_s, now_s + float(self._fleet.array("iteration_s")[up].min()))
        return max(due_s, now_s + TICK_MIN_S)

    def price_problem(self, now_s: float) -> PriceSnapshot | None:
        """Return an immutable snapshot to solve, when a price refresh is due; else None.

        Only copies are made here; what takes long is `solve`, in any thread.
        """
        settings = self._config.prices
        # With nobody waiting nothing is scarce: prices only have to fade, and an arrival at an
        # idle fleet must not compete with their refresh.
        pause_s = settings.refresh_s if len(self._waiting) else IDLE_REFRESH_S
        if settings.inline or now_s - self._asked_s < pause_s:
            return None
        if self._config.policy is not PolicyName.ONLINE_LP or not len(self._fleet):
            return None
        self._asked_s = now_s
        view = self._sight.view(now_s, self._rate.per_s(now_s), with_cached=False)
        return self._policy.price_problem(view)

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

    def reconfigure(self, config: ControlConfig) -> None:
        """Take other settings; requests stay, and a policy that changed learns its prices anew."""
        self._config, alike = taken_live(self._config, config)
        self._life.config = self._config
        if not alike:
            self._policy, self._natural = make_policy(self._config), None
        self._affinity.on = self._config.affinity.weight > 0
        self._fleet.start_slowly_over(self._config.slow_start_s)
        room = self._waiting
        waiting = [room.entries[request_id] for request_id in room.ids]
        self._tenants.reconfigure(self._config.tenants, waiting, room.tenants)

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
            running=len(self._ledger) + len(self._handoff),
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
            price_age_s=None if self._adopted_s is None else now_s - self._adopted_s,
            arrivals_per_s=self._rate.per_s(now_s),
            tenants=self._tenants.stats(self._waiting.tenants),
            rate_rises=self._rate.rises,
            rate_falls=self._rate.falls,
            prefills=self._handoff.prefills,
            holds_passed=self._handoff.holds_passed,
            whole_on_decode=self._handoff.whole_on_decode,
            workers=worker_stats(
                self._fleet,
                self._ledger,
                self._policy.natural_prices(self._fleet.worker_ids),
                now_s,
            ),
            prefillers=self._fleet.prefill.stats(),
            affinity=self._affinity.stats(),
        )

    @property
    def policy(self) -> Policy:
        """The rule that decides, to be looked at."""
        return self._policy

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

    def _follow_worker(
        self, event: WorkerJoined | WorkerChanged | WorkerReported | WorkerGone, now_s: float
    ) -> None:
        was_up, version = self._fleet.up().any(), self._fleet.version
        if isinstance(event, WorkerChanged) and event.state is WorkerState.UP:
            self._waiting.forgive(event.worker_id)
        if self._fleet.followed_prefill(event, now_s):
            return
        match event:
            case WorkerJoined(spec, state):
                self._fleet.join(spec, state)
            case WorkerChanged(worker_id, state):
                self._fleet.change(worker_id, state, now_s)
                if state is WorkerState.DOWN:
                    self._affinity.forget(worker_id)
            case WorkerReported(worker_id, report, reported_at_s):
                own = self._ledger.own_load(self._fleet.index[worker_id])
                self._fleet.report(worker_id, report, own, reported_at_s)
                self._affinity.take(worker_id, report)
            case WorkerGone(worker_id):
                self._ledger.drop_worker(self._fleet.remove(worker_id))
                self._affinity.forget(worker_id)
            case _:
                assert_never(event)
        self._natural = None
        if self._fleet.version != version:
            self._waiting.refit(self._fleet)
        if was_up and not self._fleet.up().any():
            self._nobody_up_since_s = now_s

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
            commands.append(self._life.refuse(request_id, reason, detail))
        return commands

    def _refuse_unreachable(self, now_s: float) -> list[Command]:
        """Refuse those who have waited the hold time for any worker that serves them to come up."""
        hold_s = self._config.no_worker_hold_s
        commands: list[Command] = []
        for request_id in self._waiting.cut_off(self._fleet):
            entry = self._waiting.entries[request_id]
            left_s = (self._fleet.left_up_s(entry.request.model), self._fleet.prefill.left_up_s())
            lost_s = max(self._nobody_up_since_s, *left_s)
            if now_s - max(entry.entered_s, lost_s) < hold_s:
                continue
            detail = Refusal.NO_WORKER, nobody_up(hold_s)
            why = self._life.too_large(entry) if entry.too_large else detail
            commands.append(self._life.refuse(request_id, *why))
        return commands

    def _decide(self, now_s: float) -> list[Pair]:
        view = self._sight.view(now_s, self._rate.per_s(now_s))
        if self._config.prices.inline:
            self._natural = None
        if now_s < self._policy_rests_until_s:
            self._counters.fallback_ticks += 1
            self._counters.last_fault = TOO_SLOW
            return checked(self._fallback.decide(view), view)
        try:
            return checked(self._policy.decide(view), view)
        except Exception as fault:  # the one place: a broken policy must not stop the service
            self._counters.fallback_ticks += 1
            self._counters.last_fault = repr(fault)
            return checked(self._fallback.decide(view), view)

    def _start(self, pairs: list[Pair], now_s: float) -> list[Command]:
        ids = [(self._waiting.ids[row], worker, row) for row, worker in pairs]
        commands: list[Command] = []
        for request_id, worker, row in ids:
            first = self._handoff.assign(self._waiting.entries[request_id], worker, now_s)
            if first is None:
                continue
            entry = self._waiting.remove(request_id)
            self._tenants.start(entry, self._fleet, now_s)
            self._ledger.start(entry, worker, now_s, first.ready_s)
            self._affinity.start(entry.request, worker, row, now_s)
            self._counters.starts += 1
            worker_id = self._fleet.workers[worker].spec.worker_id
            tokens = entry.decode_tokens * entry.request.sequences
            commands.append(Start(request_id, worker_id, first.prefill_id, first.handed, tokens))
        return commands
