"""5 fleet: for how long a worker's engines have stood still while they had requests to serve.

Pure: pages in, seconds out. A busy engine moves some counter in every iteration; a hung one leaves
requests in its batch and every counter as it was, while its HTTP server goes on answering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from service.engine_metrics import EnginePage, EngineSample

_MOVING: Final = (
    "generation_tokens_total",
    "token_latency_count",
    "requests_succeeded_total",
    "queue_time_count",
    "preemptions_total",
)

_Mark = tuple[object, ...]


class EngineProgress:
    """Remembers when each engine last moved."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._moved_s: dict[str, float] = {}

    def note(self, page: EnginePage, now_s: float) -> float:
        """Take a page; returns the longest standstill of an engine with running requests.

        An engine without requests, or without any counter to go by, does not stand still: unknown
        is not stalled. Engines that a page does not name are forgotten.

        Args:
            page: the newest scrape.
            now_s: when it was taken; seconds of any clock that only grows.
        """
        marks = {
            label: _mark(sample, self._marks.get(label)) for label, sample in page.engines.items()
        }
        self._moved_s = {
            label: self._moved_s.get(label, now_s)
            if mark is not None and mark == self._marks.get(label)
            else now_s
            for label, mark in marks.items()
        }
        self._marks = {label: mark for label, mark in marks.items() if mark is not None}
        return max((now_s - moved_s for moved_s in self._moved_s.values()), default=0.0)


def _mark(sample: EngineSample, before: _Mark | None) -> _Mark | None:
    """What must change while requests run; None when nothing has to.

    What a page does not tell is as it was before: not every scrape asks for everything.
    """
    told = (getattr(sample, name) for name in _MOVING)
    earlier = before or (None,) * len(_MOVING)
    counters = tuple(was if now is None else now for now, was in zip(told, earlier, strict=True))
    if not sample.running or all(counter is None for counter in counters):
        return None
    return counters
