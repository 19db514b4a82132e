"""3 controller, a full queue: who of those who wait makes room for a newcomer that is worth more.

What counts is the tier of the value (tiers.py), lowered for a tenant over its share as its reward
is (tenants.py): equals never displace each other, so nobody gains by asking again. Of the lowest
tier the newest goes, who loses the least wait. Whose prompt was computed ahead stays: that work is
done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from service.control.tiers import LOWEST_VALUE

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray
    from service.control.tenants import Tenants
    from service.control.waiting import WaitingRoom

DISPLACED_MAX: Final = 32
"""Most requests that make room for the bytes of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """What a newcomer is worth.

    Attributes:
        value: its own. tenant: who pays.
    """

    value: float
    tenant: str


def lower(worth: FloatArray, than: float) -> BoolArray:
    """(n,) which worths are of a lower tier than this one; all of them positive."""
    return np.asarray(np.maximum(worth, LOWEST_VALUE) < _begin(than))


def newest_of_the_lowest(worth: FloatArray, order: FloatArray, able: BoolArray) -> int | None:
    """The row of the latest arrival in the lowest tier.

    Args:
        worth: (n,) value times what the tenant's share leaves of it; > 0.
        order: (n,) rank by arrival; >= 0.
        able: (n,) who may be chosen.

    Returns:
        None where nobody may.
    """
    if not able.any():
        return None
    least = worth.min(initial=np.inf, where=able)
    lowest = able & (np.maximum(worth, LOWEST_VALUE) < 2.0 * _begin(least))
    return int(np.argmax(np.where(lowest, order, -1)))


class Displacement:
    """Finds those who make room, with a handful of array operations whoever waits.

    Args:
        waiting: who waits. tenants: what their shares leave of their values.
    """

    def __init__(self, waiting: WaitingRoom, tenants: Tenants) -> None:
        self._waiting = waiting
        self._tenants = tenants

    def for_a_place(self, bid: Bid, now_s: float) -> str | None:
        """Who gives its place in the queue to a newcomer; None where nobody is worth less."""
        worth, able = self._below(bid, now_s)
        row = newest_of_the_lowest(worth, self._waiting.column("order"), able)
        return None if row is None else self._waiting.ids[row]

    def for_bytes(self, bid: Bid, size: int, now_s: float) -> list[str]:
        """Who gives up so many bytes of bodies to a newcomer.

        Returns:
            Nobody where those who are worth less, DISPLACED_MAX of them, hold less than that.
        """
        worth, able = self._below(bid, now_s)
        held, order = self._waiting.column("body_bytes"), self._waiting.column("order")
        able &= held > 0
        found: list[str] = []
        for _ in range(DISPLACED_MAX):
            row = newest_of_the_lowest(worth, order, able)
            if row is None:
                return []
            found.append(self._waiting.ids[row])
            size -= int(held[row])
            if size <= 0:
                return found
            able[row] = False
        return []

    def _below(self, bid: Bid, now_s: float) -> tuple[FloatArray, BoolArray]:
        """(n,) what each is worth, and (n,) whether it may make room."""
        worth, own = self._waiting.column("value"), bid.value
        shares = self._tenants.discounts_with(self._waiting.tenants, bid.tenant, now_s)
        if shares is not None:
            worth, own = worth * shares[0], own * shares[1]
        if max(worth.min(initial=np.inf), LOWEST_VALUE) >= _begin(own):
            # The usual case, at the cost of one look: nobody is worth less.
            return worth, np.zeros(worth.size, dtype=np.bool_)
        able = lower(worth, own)
        computed = self._waiting.handed()
        return worth, able if computed is None else able & ~computed


def _begin(worth: float) -> float:
    """Where the tier of a worth begins."""
    return math.ldexp(1.0, math.frexp(max(worth, LOWEST_VALUE))[1] - 1)
