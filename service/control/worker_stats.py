"""3 controller, every worker as the ledger sees it now: numbers for metrics and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from service.control.stats import WorkerStats

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray
    from service.control.fleet_state import FleetState
    from service.control.ledger import Ledger


def free_slots(fleet: FleetState, ledger: Ledger) -> FloatArray:
    """(g,) batch slots that nobody holds on workers that are up; 0 on others."""
    own = ledger.sequences_per_worker(len(fleet))
    free = fleet.array("batch_limit") - own - fleet.array("foreign_active")
    return np.asarray(np.where(fleet.up(), np.maximum(free, 0.0), 0.0))


def has_free_slot(fleet: FleetState, ledger: Ledger) -> BoolArray:
    """(g,) up, with a free batch slot."""
    return np.asarray(free_slots(fleet, ledger) >= 1)


def worker_stats(
    fleet: FleetState, ledger: Ledger, prices: tuple[FloatArray, FloatArray], now_s: float
) -> tuple[WorkerStats, ...]:
    """Every worker but the prefill ones, with (g,) prices of a batch slot and of a KV token."""
    active = ledger.sequences_per_worker(len(fleet))
    kv_tokens = ledger.kv_tokens_per_worker(len(fleet))
    startable = has_free_slot(fleet, ledger) & fleet.engine_queue_empty(now_s)
    token_s = ledger.token_s(fleet)
    price_batch, price_kv = prices
    return tuple(
        WorkerStats(
            worker_id=worker.spec.worker_id,
            role=worker.spec.role,
            state=worker.state,
            batch_limit=worker.batch_limit,
            active=int(active[g]),
            foreign=worker.foreign_active,
            kv_tokens=int(kv_tokens[g]),
            kv_capacity_tokens=(
                int(worker.kv_capacity_tokens) if np.isfinite(worker.kv_capacity_tokens) else None
            ),
            iteration_s=worker.iteration_s,
            token_s=float(token_s[g]),
            startable=bool(startable[g]),
            price_batch=float(price_batch[g]),
            price_kv=float(price_kv[g]),
        )
        for g, worker in enumerate(fleet.workers)
    )
