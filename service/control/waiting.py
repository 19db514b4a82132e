"""3 controller, waiting room: requests that entered and were not started yet."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from service.control.affinity import Affinity, Cached
from service.control.columns import BoolArray, FloatArray, IntArray
from service.control.events import Request
from service.control.fleet_state import FleetState, Limits, Shapes
from service.control.kept_views import KeptViews
from service.control.kinds import Kind, Kinds, Route
from service.control.lengths import Forecast
from service.control.tables import Table
from service.control.view import Waiting

SHOWN = (
    "arrival_s",
    "order",
    "prompt_tokens",
    "decode_tokens",
    "kv_max",
    "sequences",
    "value",
    "ttft_bound_s",
    "e2e_bound_s",
    "kind",
    "stamp",
)
"""What a policy sees of each."""


@dataclass(slots=True)
class Entry:
    """A request on its way through the router.

    Attributes:
        request: as it arrived. forecast: of its decode length.
        order: rank by arrival. expires_s: when its wait ends with a refusal.
        entered_s: when it began to wait; for one that was handed back, when that was.
        sequences, decode_tokens: the column's size, capped to what an empty worker can hold.
        kv_max: KV tokens a sequence that such a worker has.
        too_large: no worker that serves it can ever hold its prompt.
        tenant: where its tenant is counted.
        slot_share: batch slots that one of its sequences is charged for.
        avoid: workers that did not take it.
        route: what it wants of decode workers. prefilled_s: since when it is HANDED.
    """

    request: Request
    forecast: Forecast
    order: int
    expires_s: float
    entered_s: float
    sequences: int = 1
    decode_tokens: int = 1
    kv_max: float = np.inf
    too_large: bool = False
    tenant: int = 0
    slot_share: float = 1.0
    avoid: set[str] = field(default_factory=set)
    route: Route = Route.SPLIT
    prefilled_s: float = 0.0


def fit_to_fleet(entry: Entry, fleet: FleetState) -> None:
    """Cap an entry's column so that some empty worker, best one that is up, could start it.

    The engine queues surplus sequences and stops at its own length limit; a column that no worker
    could ever hold would wait for ever.
    """
    request = entry.request
    pinned = request.pinned_worker
    shapes = fleet.shapes_of(pinned) if pinned else fleet.shapes(request.model)
    able = [limits for limits in shapes.up if request.prompt_tokens < limits.room]
    able = able or [limits for limits in shapes.serving if request.prompt_tokens < limits.room]
    entry.too_large = bool(shapes.serving) and not able
    entry.sequences, entry.decode_tokens, entry.kv_max = max(
        (_column_size(entry, limits) for limits in able),
        default=(request.sequences, entry.forecast.decode_tokens, np.inf),
    )


def _column_size(entry: Entry, limits: Limits) -> tuple[int, int, float]:
    """(sequences, decode tokens, KV tokens a sequence) of the largest column a worker can hold."""
    prompt = entry.request.prompt_tokens
    most = min(entry.request.sequences, limits.batch_limit, limits.room // (prompt + 1))
    sequences = max(1.0, most)
    room = limits.room if math.isinf(limits.room) else limits.room // sequences
    decode = min(entry.forecast.decode_tokens, room - prompt)
    return int(sequences), int(decode), room


class WaitingRoom:
    """Waiting requests by id, and their numbers as arrays."""

    def __init__(self, affinity: Affinity) -> None:
        self.entries: dict[str, Entry] = {}
        self._affinity = affinity
        self._table = Table(
            arrival_s=np.float64,
            order=np.int64,
            prompt_tokens=np.float64,
            decode_tokens=np.float64,
            kv_max=np.float64,
            sequences=np.float64,
            value=np.float64,
            ttft_bound_s=np.float64,
            e2e_bound_s=np.float64,
            expires_s=np.float64,
            kind=np.int64,
            tenant=np.int64,
            prefix=np.int64,
            stamp=np.int64,
            body_bytes=np.float64,
        )
        self._ones: FloatArray = np.ones(0)
        # Views of so many rows of the same table stay true.
        self._shown = KeptViews[Waiting]()
        self._shown_capacity = 0
        self._stamps = itertools.count()
        self._none_before_s = np.inf
        self._kinds = Kinds()
        self._avoiding: set[str] = set()
        self._shapes: dict[str, Shapes] = {}

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
        self.entries[request.request_id] = entry
        self._none_before_s = min(self._none_before_s, entry.expires_s)
        self._table.add(
            request.request_id,
            arrival_s=request.arrival_s,
            order=entry.order,
            prompt_tokens=request.prompt_tokens,
            decode_tokens=entry.decode_tokens,
            kv_max=entry.kv_max,
            sequences=entry.sequences,
            value=request.value,
            ttft_bound_s=np.nan if request.ttft_bound_s is None else request.ttft_bound_s,
            e2e_bound_s=np.nan if request.e2e_bound_s is None else request.e2e_bound_s,
            expires_s=entry.expires_s,
            kind=self._enter_kind(entry),
            tenant=entry.tenant,
            prefix=self._affinity.enter(request),
            stamp=next(self._stamps),
            body_bytes=request.body_bytes,
        )
        if entry.avoid:
            self._avoiding.add(request.request_id)

    def remove(self, request_id: str) -> Entry:
        """Let a request out."""
        held = self._table.remove(request_id, "kind", "prefix")
        self._kinds.leave(int(held["kind"]))
        self._affinity.leave(int(held["prefix"]))
        self._avoiding.discard(request_id)
        return self.entries.pop(request_id)

    def forgive(self, worker_id: str) -> None:
        """A worker that came back may be tried again by those it had turned away."""
        for request_id in self._avoiding:
            entry = self.entries[request_id]
            if worker_id in entry.avoid:
                entry.avoid.discard(worker_id)
                self._change_kind(request_id)

    def refit(self, fleet: FleetState) -> None:
        """Cap columns anew where the limits of the workers that serve them changed."""
        models = {entry.request.model for entry in self.entries.values()}
        now = {model: fleet.shapes(model) for model in models}
        changed = {model for model, limits in now.items() if self._shapes.get(model) != limits}
        self._shapes = now
        if not changed:
            return
        for request_id, entry in self.entries.items():
            if entry.request.model not in changed:
                continue
            was_too_large = entry.too_large
            fit_to_fleet(entry, fleet)
            row = self._table.row(request_id)
            for name in ("sequences", "decode_tokens", "kv_max"):
                self._table[name][row] = getattr(entry, name)
            self._table["stamp"][row] = next(self._stamps)
            if entry.too_large != was_too_large:
                self._change_kind(request_id)

    def _enter_kind(self, entry: Entry) -> int:
        request = entry.request
        model = None if entry.too_large else request.model
        kind = Kind(model, frozenset(entry.avoid), entry.route, request.pinned_worker)
        return self._kinds.enter(kind)

    def change_route(self, request_id: str, route: Route) -> None:
        """Let a waiting request want something else of decode workers."""
        self.entries[request_id].route = route
        self._change_kind(request_id)

    def _change_kind(self, request_id: str) -> None:
        row = self._table.row(request_id)
        self._kinds.leave(int(self._table["kind"][row]))
        self._table["kind"][row] = self._enter_kind(self.entries[request_id])

    def expired(self, now_s: float) -> list[str]:
        """Requests whose wait is over."""
        if now_s < self._none_before_s:
            return []
        self._none_before_s = self.next_expiry_s()
        return [self.ids[row] for row in np.flatnonzero(self._table["expires_s"] <= now_s)]

    def next_expiry_s(self) -> float:
        """When the next wait is over."""
        return float(self._table["expires_s"].min(initial=np.inf))

    def oldest_arrival_s(self) -> float:
        """Arrival of the request that waits longest; inf when nobody does."""
        return float(self._table["arrival_s"].min(initial=np.inf))

    def cut_off(self, fleet: FleetState) -> list[str]:
        """Requests that no worker that is up could take, in the order they were let in."""
        alone = self._kinds.cut_off(fleet)
        if alone is None:
            return []
        found = {self.ids[row] for row in np.flatnonzero(alone[self._table["kind"]])}
        return [request_id for request_id in self.entries if request_id in found] if found else []

    def shortest_prompt(self) -> int:
        """Tokens of the shortest waiting prompt; 0 when nobody waits."""
        prompts = self._table["prompt_tokens"]
        return int(prompts.min()) if prompts.size else 0

    @property
    def tenants(self) -> IntArray:
        """(n,) where each request's tenant is counted; a view."""
        return self._table["tenant"]

    def column(self, name: str) -> FloatArray:
        """(n,) one number of each; a view, valid until one comes or goes."""
        return self._table[name]

    def handed(self) -> BoolArray | None:
        """(n,) whose prompt is computed already; None where nobody's is."""
        kinds = self._kinds.handed()
        return None if kinds is None else kinds[self._table["kind"]]

    def cached(self) -> Cached | None:
        """What workers are believed to hold of the waiting prompts."""
        return self._affinity.show(self._table["prefix"])

    def arrays(
        self, fleet: FleetState, discount: FloatArray | None, *, prefill_open: bool
    ) -> Waiting:
        """What a policy sees of the waiting requests: views, valid until one comes or goes.

        Args:
            fleet: for the workers that each may go to.
            discount: (n,) of their tenants; None where there is none.
            prefill_open: whether a prefill worker would take a prompt now.
        """
        reach, wanted = self._kinds.open_reach(fleet, prefill_open=prefill_open)
        if discount is not None:
            return Waiting(
                **self._table.live(*SHOWN),
                discount=discount,
                shared=True,
                reach=reach,
                wanted=wanted,
            )
        n = len(self._table)
        if self._shown_capacity != self._table.capacity:
            self._shown.clear()
            self._shown_capacity = self._table.capacity
        known = self._shown.get(n)
        if known is not None and known.reach is reach and known.wanted is wanted:
            return known
        if n > self._ones.size:
            self._ones = np.ones(2 * n)
            self._ones.flags.writeable = False
        return self._shown.put(
            n,
            Waiting(
                **self._table.live(*SHOWN),
                discount=self._ones[:n],
                shared=False,
                reach=reach,
                wanted=wanted,
            ),
        )
