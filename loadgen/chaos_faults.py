"""Which worker goes wrong when in a chaos run, and how; a pure function of its settings."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from service.mock.faults import OF_PREFILL, Fault

if TYPE_CHECKING:
    from loadgen.chaos_plan import ChaosSpec

CALM_SHARE: Final = 0.15
"""Of the run, at its beginning and at its end: no fault begins."""
BLACKOUT_S: Final = 1.0
"""In the middle of a run no worker answers, at a third of it no prefill worker."""
DURATIONS_S: Final[dict[Fault, tuple[float, float]]] = {
    Fault.KILL: (0.2, 3.0),
    Fault.RESTART: (0.0, 0.0),
    Fault.FREEZE: (0.3, 5.0),
    Fault.STALL: (0.3, 5.0),
    Fault.SLOW: (1.0, 4.0),
    Fault.RESET: (0.0, 0.0),
    Fault.GARBAGE: (0.2, 1.5),
    Fault.FLAP: (0.5, 4.0),
    Fault.SILENCE: (0.3, 3.0),
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault: a worker has it from at_s on, for for_s seconds."""

    at_s: float
    worker: int
    fault: Fault
    for_s: float


def plan_faults(spec: ChaosSpec) -> list[PlannedFault]:
    """Deal faults from a shuffled deck, so that each kind comes up; once every worker is killed.

    Where there are prefill workers, every second fault is one of theirs: each of them is needed
    for every request.
    """
    rng = random.Random(f"faults {spec.seed}")
    calm_s = CALM_SHARE * spec.duration_s
    at_s = calm_s
    plan: list[PlannedFault] = []
    deck: list[Fault] = []
    while at_s < spec.duration_s - calm_s:
        if not deck:
            deck = [fault for fault in Fault if spec.prefill_workers or fault not in OF_PREFILL]
            rng.shuffle(deck)
        fault = deck.pop()
        for_s = rng.uniform(*DURATIONS_S[fault])
        of_prefill = fault in OF_PREFILL or (spec.prefill_workers and rng.random() < 1 / 2)
        most = spec.prefill_workers if of_prefill else spec.workers
        plan.append(PlannedFault(at_s, rng.randrange(most), fault, for_s))
        at_s += rng.expovariate(spec.faults_per_s)
    blackouts = (
        PlannedFault(share * spec.duration_s, worker, Fault.KILL, BLACKOUT_S)
        for share, count in ((1 / 3, spec.prefill_workers), (1 / 2, spec.workers))
        for worker in range(count)
    )
    return sorted((*plan, *blackouts), key=lambda one: one.at_s)
