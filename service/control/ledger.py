"""3 controller, ledger: every started request, and what it will hold from now on.

The state is counted in tokens seen, not in time passed, so a wrong iteration time cannot corrupt
it. Forecasts are corrected while a request decodes: one that outlives its forecast gets its
conditional expected remaining length, one that ends early frees its slots at once.
"""

from __future__ import annotations

import numpy as np

from service.control.columns import (
    Columns,
    FloatArray,
    Horizon,
    Usage,
    kv_footprint,
    service_steps,
    sum_per_slot,
    total_usage,
)
from service.control.config import Kernel
from service.control.fleet_state import FleetState, OwnLoad
from service.control.lengths import LengthPredictor
from service.control.tables import Table
from service.control.waiting import Entry

NO_LIMIT = 2**31


class Ledger:
    """Started requests as arrays; occupancy of every worker's look-ahead."""

    def __init__(self, kernel: Kernel, predictor: LengthPredictor) -> None:
        self._kernel = kernel
        self._predictor = predictor
        self._entries: dict[str, Entry] = {}
        self._table = Table(
            worker=np.int64,
            prompt_tokens=np.float64,
            produced=np.float64,
            forecast=np.float64,
            limit=np.float64,
            pool=np.int64,
            scale=np.float64,
            sequences=np.float64,
            started_s=np.float64,
            streams=np.bool_,
        )

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._table

    def start(self, entry: Entry, worker: int, now_s: float) -> None:
        """Book a start on worker index `worker`."""
        request, forecast = entry.request, entry.forecast
        self._entries[request.request_id] = entry
        self._table.add(
            request.request_id,
            worker=worker,
            prompt_tokens=request.prompt_tokens,
            produced=0.0,
            forecast=entry.decode_tokens,
            limit=request.decode_tokens_limit or NO_LIMIT,
            pool=forecast.pool,
            scale=forecast.scale,
            sequences=entry.sequences,
            started_s=now_s,
            streams=request.streams,
        )

    def progress(self, request_id: str, decode_tokens: int) -> None:
        """Note tokens produced so far; totals never fall."""
        row = self._table.row(request_id)
        produced = self._table["produced"]
        produced[row] = max(produced[row], decode_tokens)

    def end(self, request_id: str) -> tuple[Entry, int, int]:
        """Free a request's slots; returns it, its worker index (-1: gone) and the tokens seen."""
        held = self._table.remove(request_id)
        return self._entries.pop(request_id), int(held["worker"]), int(held["produced"])

    def drop_worker(self, gone: int) -> None:
        """Renumber after a worker was removed; its own requests keep no worker (-1)."""
        worker = self._table["worker"]
        worker[worker == gone] = -1
        worker[worker > gone] -= 1

    def sequences_per_worker(self, workers: int) -> FloatArray:
        """(g,) batch slots held by our own started requests."""
        kept = self._table["worker"] >= 0
        table = self._table
        return sum_per_slot(table["worker"][kept], table["sequences"][kept], workers)

    def columns(self, fleet: FleetState, now_s: float, offset: float = 0.0) -> Columns:
        """(n,) started requests as columns that began in the past, with corrected lengths.

        Args:
            fleet: for block sizes and iteration times.
            now_s: the tick's time.
            offset: iterations from the look-ahead's left edge to now.
        """
        table = self._table
        kept = np.flatnonzero(table["worker"] >= 0)
        worker = table["worker"][kept]
        produced = self._produced(kept, fleet, now_s)
        total = table["forecast"][kept].copy()
        late = np.flatnonzero(produced >= total)
        if late.size:
            rows = kept[late]
            left = self._predictor.remaining(
                table["pool"][rows], table["scale"][rows], produced[late]
            )
            total[late] = produced[late] + left
        total = np.maximum(np.minimum(total, table["limit"][kept]), produced + 1.0)
        done = service_steps(self._kernel, produced) if self._kernel is Kernel.MIXED else produced
        done = np.where(produced > 0, done, 0.0)
        pad = fleet.array("block_tokens")[worker] - 1.0 if len(fleet) else np.zeros(0)
        return Columns(
            worker=worker,
            start=offset - done,
            steps=service_steps(self._kernel, total),
            footprint=kv_footprint(self._kernel, table["prompt_tokens"][kept] + pad),
            sequences=table["sequences"][kept],
        )

    def occupancy(
        self, fleet: FleetState, horizon: Horizon, now_s: float, offset: float = 0.0
    ) -> Usage:
        """(g, N) batch slots and KV tokens held from now on, load of others included."""
        used = total_usage(self.columns(fleet, now_s, offset), horizon, len(fleet))
        return Usage(
            batch=used.batch + fleet.array("foreign_active")[:, None],
            kv=used.kv + fleet.array("foreign_kv")[:, None],
        )

    def own_load(self, worker: int) -> OwnLoad:
        """What we hold on one worker now, in sequences and in KV tokens."""
        mine = self._table["worker"] == worker
        sequences = self._table["sequences"][mine]
        tokens = self._table["prompt_tokens"][mine] + self._table["produced"][mine]
        return OwnLoad(int(sequences.sum()), float((sequences * tokens).sum()))

    def kv_tokens_per_worker(self, workers: int) -> FloatArray:
        """(g,) KV tokens held now by our own started requests."""
        table = self._table
        kept = table["worker"] >= 0
        tokens = table["sequences"] * (table["prompt_tokens"] + table["produced"])
        return sum_per_slot(table["worker"][kept], tokens[kept], workers)

    def _produced(self, rows: np.ndarray, fleet: FleetState, now_s: float) -> FloatArray:
        """Tokens so far; a request that does not stream is taken to decode at the worker's pace."""
        table = self._table
        produced = table["produced"][rows].copy()
        blind = np.flatnonzero(~table["streams"][rows])
        if blind.size:
            at = rows[blind]
            pace_s = fleet.array("iteration_s")[table["worker"][at]]
            guess = np.floor((now_s - table["started_s"][at]) / pace_s)
            produced[blind] = np.minimum(np.maximum(guess, 0.0), table["limit"][at] - 1.0)
        return np.asarray(produced)
