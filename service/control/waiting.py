"""3 controller, waiting room: requests that entered and were not started yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from service.control.columns import BoolArray, FloatArray
from service.control.events import Request
from service.control.fleet_state import FleetState
from service.control.lengths import Forecast
from service.control.tables import Table
from service.control.view import Waiting


@dataclass(slots=True)
class Entry:
    """A request on its way through the router.

    Attributes:
        request: as it arrived. forecast: of its decode length.
        order: rank by arrival. expires_s: when its wait ends with a refusal.
        sequences, decode_tokens: the column's size, capped to what an empty worker can hold.
        avoid: workers that did not take it.
    """

    request: Request
    forecast: Forecast
    order: int
    expires_s: float
    sequences: int = 1
    decode_tokens: int = 1
    avoid: set[str] = field(default_factory=set)


def fit_to_fleet(entry: Entry, fleet: FleetState) -> None:
    """Cap an entry's column so that some empty worker could start it.

    The engine queues surplus sequences and stops at its own length limit; a column that no worker
    could ever hold would wait for ever.
    """
    request = entry.request
    entry.sequences, entry.decode_tokens = request.sequences, entry.forecast.decode_tokens
    serves = fleet.serves(request.model)
    if not serves.any():
        return
    slots = float(fleet.array("batch_limit")[serves].max())
    room = float(fleet.array("kv_capacity_tokens")[serves].max())
    block = float(fleet.array("block_tokens")[serves].max())
    least = request.prompt_tokens + block + 1
    entry.sequences = int(min(request.sequences, slots, max(1.0, room // least)))
    longest = max(1.0, room // entry.sequences - request.prompt_tokens - block)
    entry.decode_tokens = int(min(entry.forecast.decode_tokens, longest))


class WaitingRoom:
    """Waiting requests by id, and their numbers as arrays."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._table = Table(
            arrival_s=np.float64,
            order=np.int64,
            prompt_tokens=np.float64,
            decode_tokens=np.float64,
            sequences=np.float64,
            value=np.float64,
            ttft_bound_s=np.float64,
            expires_s=np.float64,
        )

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.entries

    @property
    def ids(self) -> list[str]:
        """Request ids in row order."""
        return self._table.keys

    def add(self, entry: Entry) -> None:
        """Let a request in."""
        request = entry.request
        bound_s = np.nan if request.ttft_bound_s is None else request.ttft_bound_s
        self.entries[request.request_id] = entry
        self._table.add(
            request.request_id,
            arrival_s=request.arrival_s,
            order=entry.order,
            prompt_tokens=request.prompt_tokens,
            decode_tokens=entry.decode_tokens,
            sequences=entry.sequences,
            value=request.value,
            ttft_bound_s=bound_s,
            expires_s=entry.expires_s,
        )

    def remove(self, request_id: str) -> Entry:
        """Let a request out."""
        self._table.remove(request_id)
        return self.entries.pop(request_id)

    def expired(self, now_s: float) -> list[str]:
        """Requests whose wait is over."""
        return [self.ids[row] for row in np.flatnonzero(self._table["expires_s"] <= now_s)]

    def next_expiry_s(self) -> float:
        """When the next wait is over."""
        return float(self._table["expires_s"].min(initial=np.inf))

    def oldest_arrival_s(self) -> float:
        """Arrival of the request that waits longest; inf when nobody does."""
        return float(self._table["arrival_s"].min(initial=np.inf))

    def arrivals_s(self) -> FloatArray:
        """(n,) arrival times."""
        return np.asarray(self._table["arrival_s"])

    def allowed(self, fleet: FleetState) -> BoolArray:
        """(n, g) workers that are up, serve the model, and did not just turn the request away."""
        up = fleet.up()
        allowed = np.empty((len(self), len(fleet)), dtype=np.bool_)
        for row, request_id in enumerate(self.ids):
            entry = self.entries[request_id]
            allowed[row] = up & fleet.serves(entry.request.model)
            for worker_id in entry.avoid & fleet.index.keys():
                allowed[row, fleet.index[worker_id]] = False
        return allowed

    def arrays(self, fleet: FleetState) -> Waiting:
        """What a policy sees of the waiting requests."""
        table = self._table
        return Waiting(
            arrival_s=table["arrival_s"].copy(),
            order=table["order"].copy(),
            prompt_tokens=table["prompt_tokens"].copy(),
            decode_tokens=table["decode_tokens"].copy(),
            sequences=table["sequences"].copy(),
            value=table["value"].copy(),
            ttft_bound_s=table["ttft_bound_s"].copy(),
            allowed=self.allowed(fleet),
        )
