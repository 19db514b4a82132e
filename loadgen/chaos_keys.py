"""Keys that clients of a chaos run come with: most have no limit, some are over theirs.

Limits follow from the plan, so that in a run of any length about half of what comes with a limited
key is let in. Each key has a tenant of its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MINUTE_S: Final = 60.0
REQUESTS_MAX: Final = 2
"""Requests that the key FEW may have inside at once."""
FIT_SHARE: Final = 0.5
"""Of what comes with a key whose rate is limited, what that rate lets in."""


class Key(StrEnum):
    """What a client comes with; doubles as the name of the key's tenant."""

    OPEN = "open"
    FEW = "few"
    SLOW = "slow"
    SHORT = "short"
    WRONG = "wrong"
    NONE = "none"


KEY_WEIGHTS: Final[dict[Key, int]] = {
    Key.OPEN: 84,
    Key.FEW: 5,
    Key.SLOW: 4,
    Key.SHORT: 4,
    Key.WRONG: 2,
    Key.NONE: 1,
}
LIMITED: Final = frozenset({Key.FEW, Key.SLOW, Key.SHORT})
"""Keys with limits: of requests at once, of requests a minute, of tokens a minute."""
STRANGE: Final = frozenset({Key.WRONG, Key.NONE})
"""What opens nothing."""
TENANT_WEIGHTS: Final = f"{Key.OPEN}=3,{Key.FEW}=1,*=1"


def secret(key: Key) -> str:
    """The key itself; WRONG has one too, which the router does not know."""
    return f"chaos-{key}-key"


def per_minute(amount: float, seconds: float) -> float:
    """The rate that lets in FIT_SHARE of an amount offered over a run; a minute's worth is free."""
    return max(1.0, FIT_SHARE * amount / (1.0 + seconds / MINUTE_S))


def let_in_most(rate: float, seconds: float) -> float:
    """Most that a rate per minute lets in over so many seconds, from a full bucket on."""
    return rate * (1.0 + seconds / MINUTE_S) + 1.0


def key_settings(
    requests: Mapping[Key, int], tokens: Mapping[Key, int], seconds: float
) -> list[dict[str, object]]:
    """Entries of auth.keys.

    Args:
        requests: how many come with each key.
        tokens: what their answers have.
        seconds: over which they come.
    """
    limits: dict[Key, dict[str, object]] = {
        Key.OPEN: {},
        Key.FEW: {"requests_max": REQUESTS_MAX},
        Key.SLOW: {"requests_per_minute": per_minute(requests.get(Key.SLOW, 0), seconds)},
        Key.SHORT: {"tokens_per_minute": per_minute(tokens.get(Key.SHORT, 0), seconds)},
    }
    return [{"key": secret(key), "tenant": str(key)} | limit for key, limit in limits.items()]
