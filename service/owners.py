"""1 edge, stored responses: which worker holds which, as only that one can show or cancel it.

Engines keep stored responses in their own memory. The map is bounded and forgets: an id that fell
out of it is answered as unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

ID_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a response.

    Attributes:
        worker_id: which worker.
        context_tokens: estimate of its prompt and output, which one that continues it has as well.
        expires_s: on the loop's clock.
    """

    worker_id: str
    context_tokens: int
    expires_s: float


class Owners:
    """Owners of responses by id.

    Args:
        entries_max: most ids remembered; the oldest go first.
        ttl_s: how long one is remembered.
    """

    def __init__(self, *, entries_max: int, ttl_s: float) -> None:
        self._entries_max = entries_max
        self._ttl_s = ttl_s
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, response_id: str, worker_id: str, context_tokens: int, now_s: float) -> None:
        """Remember an owner; noting it again renews it."""
        if not response_id or len(response_id) > ID_CHARS_MAX:
            return
        self._owners[response_id] = Owner(worker_id, context_tokens, now_s + self._ttl_s)
        self._owners.move_to_end(response_id)
        while self._owners:
            oldest = next(iter(self._owners))
            if len(self._owners) <= self._entries_max and self._owners[oldest].expires_s > now_s:
                return
            del self._owners[oldest]

    def find(self, response_id: str, now_s: float) -> Owner | None:
        """Return an owner that is remembered."""
        owner = self._owners.get(response_id)
        return owner if owner is not None and owner.expires_s > now_s else None

    def forget(self, response_id: str) -> None:
        """Forget one that was deleted."""
        self._owners.pop(response_id, None)
