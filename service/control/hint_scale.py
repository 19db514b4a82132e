"""3 controller, decode lengths: by how much the hints of a client are too long or too short.

A client that always asks for too much (its `max_tokens` as a forecast, say) makes the queue look
longer than it is, and the age rule with it; one that asks for too little goes before its turn.
Read lengths.py next.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from service.control.events import Request

KEYS_MAX = 1024
"""Tenants and groups whose hints are judged; the least used gives way."""
SEEN_MIN = 20
"""Answers before hints are judged."""
MEMORY = 512
"""Answers after which what was seen counts half."""
OFF_MIN = 2.0
"""Hints nearer to the truth than this factor, all together, are taken as they are: single ones err
either way, and the conditional forecast of what runs sets those right."""


@dataclass(slots=True)
class _Seen:
    """Answers of one client: how many, their tokens, and the tokens that were hinted."""

    answers: float = 0.0
    tokens: float = 0.0
    hinted: float = 0.0


class HintScale:
    """True over hinted tokens, by tenant and group; what it holds is bounded."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], _Seen] = OrderedDict()

    def of(self, request: Request) -> float:
        """What to multiply this request's hint by: 1 where hints like it are about right."""
        seen = None if certain(request) else self._seen.get((request.tenant, request.group))
        if seen is None or seen.answers < SEEN_MIN:
            return 1.0
        ratio = seen.tokens / seen.hinted
        return 1.0 if 1.0 / OFF_MIN <= ratio <= OFF_MIN else ratio

    def note(self, request: Request, decode_tokens: int) -> None:
        """Learn from a completed request."""
        if request.decode_tokens_hint is None or certain(request):
            return
        key = (request.tenant, request.group)
        seen = self._seen.setdefault(key, _Seen())
        self._seen.move_to_end(key)
        if len(self._seen) > KEYS_MAX:
            self._seen.popitem(last=False)
        seen.answers += 1.0
        seen.tokens += decode_tokens
        seen.hinted += request.decode_tokens_hint
        if seen.answers > MEMORY:
            seen.answers, seen.tokens, seen.hinted = (
                seen.answers / 2.0,
                seen.tokens / 2.0,
                seen.hinted / 2.0,
            )


def certain(request: Request) -> bool:
    """Whether the engine decodes exactly as much as its bound says, whatever was hinted."""
    floor, limit = request.decode_tokens_floor, request.decode_tokens_limit
    return floor is not None and limit is not None and floor >= limit
