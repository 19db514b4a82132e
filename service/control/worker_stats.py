"""3 controller, what can be looked at from outside: each worker as the ledger sees it now."""

from __future__ import annotations

import numpy as np

from service.control.columns import BoolArray
from service.control.fleet_state import FleetState
from service.control.ledger import Ledger
from service.control.stats import WorkerStats
from service.control.view import Policy


def worker_stats(
    fleet: FleetState, ledger: Ledger, policy: Policy, startable: BoolArray
) -> tuple[WorkerStats, ...]:
    """One record a worker, in index order.

    Args:
        fleet: limits and states.
        ledger: what we hold.
        policy: for the prices.
        startable: (g,) whether a request could start there now.
    """
    if not len(fleet):
        return ()
    ids = fleet.worker_ids
    active = ledger.sequences_per_worker(len(fleet))
    kv_tokens = ledger.kv_tokens_per_worker(len(fleet))
    price_batch, price_kv = policy.natural_prices(ids)
    return tuple(
        WorkerStats(
            worker_id=ids[g],
            state=worker.state,
            batch_limit=worker.batch_limit,
            active=int(active[g]),
            foreign=worker.foreign_active,
            kv_tokens=int(kv_tokens[g]),
            kv_capacity_tokens=(
                int(worker.kv_capacity_tokens) if np.isfinite(worker.kv_capacity_tokens) else None
            ),
            iteration_s=worker.iteration_s,
            startable=bool(startable[g]),
            price_batch=float(price_batch[g]),
            price_kv=float(price_kv[g]),
        )
        for g, worker in enumerate(fleet.workers)
    )
