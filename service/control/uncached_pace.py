"""3 controller, prompts that are being computed, and how fast each worker computes them.

A prompt counts from its start until its first token. That time, less what a decode iteration takes
anyway, tells the worker's pace, where no other prompt of ours was being computed there at the start
and this one is long enough. Where little was seen a worker is taken for one like the others, and
where nothing was, the pace is the one that was set. PromptPace (token_pace.py) learns by whole
prompts what one more token costs all others, and nothing before first tokens came; here only what a
cache does not hold counts, else hits would look like speed, and the pace must be known at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from service.control.columns import FloatArray

PENDING_MAX = 65_536
"""Started prompts that are followed until their first token."""
TOLD_TOKENS_MIN = 256.0
"""A shorter prompt's time to first token says more about iterations than about prompts."""
OWN_ITERATIONS = 1.5
"""Half the iteration in flight at the start, and the one that yields the first token."""
PRIOR_TOKENS = 4096.0
"""Weight of the pace that was set, in tokens seen of all workers."""
ALIKE_TOKENS = 2048.0
"""Weight of the pace of all workers, in tokens seen of one."""
MEMORY_TOKENS = 65_536.0
"""Tokens after which what was seen counts half."""
RATIO_MAX = 32.0
"""The pace stays within this ratio of the one that was set, both ways."""


@dataclass(slots=True)
class _Computing:
    """A prompt on its way.

    Attributes:
        worker_id: where. tokens: to compute. spared: held by the cache.
        began_s: since when. alone: whether no other one was there then.
    """

    worker_id: str
    tokens: float
    began_s: float
    alone: bool
    spared: float = 0.0


@dataclass(slots=True)
class _Seen:
    """Of prompts on one worker.

    Attributes:
        tokens: that were computed. seconds: that took; the recent ones weigh most in both.
        pending: tokens that are to be computed now. spared: held by the cache beside them.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    pending: float = 0.0
    spared: float = 0.0


class UncachedPace:
    """Prompts that are being computed, by request, and what was seen of each worker.

    Args:
        tokens_per_s: what a worker computes before anything was seen.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._told = tokens_per_s
        self._computing: dict[str, _Computing] = {}
        self._seen: dict[str, _Seen] = {}

    def start(self, request_id: str, worker_id: str, tokens: float, now_s: float) -> None:
        """A worker has so many tokens of a prompt to compute."""
        if len(self._computing) >= PENDING_MAX:
            return
        seen = self._seen.setdefault(worker_id, _Seen())
        alone = seen.pending == 0
        self._computing[request_id] = _Computing(worker_id, tokens, now_s, alone)
        seen.pending += tokens

    def spare(self, request_id: str, tokens: float) -> None:
        """So many tokens more of a prompt that was started are in its worker's cache."""
        prompt = self._computing.get(request_id)
        if prompt is not None:
            prompt.spared += tokens
            self._seen[prompt.worker_id].spared += tokens

    def computed(self, request_id: str, now_s: float, iteration_s: float) -> None:
        """A first token came, from a worker whose iterations take so long."""
        prompt = self._computing.get(request_id)
        self.drop(request_id)
        if prompt is None or not prompt.alone or prompt.tokens < TOLD_TOKENS_MIN:
            return
        seen = self._seen.get(prompt.worker_id)
        if seen is None:
            return
        seen.tokens += prompt.tokens
        seen.seconds += max(0.0, now_s - prompt.began_s - OWN_ITERATIONS * iteration_s)
        if seen.tokens > MEMORY_TOKENS:
            seen.tokens, seen.seconds = seen.tokens / 2, seen.seconds / 2

    def drop(self, request_id: str) -> None:
        """A prompt is computed, or will never be."""
        prompt = self._computing.pop(request_id, None)
        seen = None if prompt is None else self._seen.get(prompt.worker_id)
        if prompt is not None and seen is not None:
            # Sums of floats: what is left of them must not keep the next prompt from being alone.
            left = seen.pending - prompt.tokens
            seen.pending = left if left > 0.5 else 0.0
            left = seen.spared - prompt.spared
            seen.spared = left if left > 0.5 else 0.0

    def where(self, request_id: str) -> str:
        """The worker that computes a prompt; "" for none."""
        prompt = self._computing.get(request_id)
        return "" if prompt is None else prompt.worker_id

    def forget(self, worker_id: str) -> None:
        """A worker is gone or began anew."""
        self._seen.pop(worker_id, None)
        kept = {name: one for name, one in self._computing.items() if one.worker_id != worker_id}
        self._computing = kept

    def spared(self, worker_ids: Sequence[str]) -> FloatArray:
        """(g,) tokens of the prompts on each worker that its cache holds."""
        return np.array([self._seen[w].spared if w in self._seen else 0.0 for w in worker_ids])

    def tokens_per_s(self, worker_ids: Sequence[str]) -> FloatArray:
        """(g,) prompt tokens that each worker computes in a second.

        A worker of which little was seen is taken for one like the others.
        """
        seen = [self._seen.get(worker_id) or _Seen() for worker_id in worker_ids]
        tokens = np.array([one.tokens for one in seen])
        seconds = np.array([one.seconds for one in seen])
        alike = (PRIOR_TOKENS + tokens.sum()) / (PRIOR_TOKENS / self._told + seconds.sum())
        found = (ALIKE_TOKENS + tokens) / (ALIKE_TOKENS / alike + seconds)
        return np.asarray(np.clip(found, self._told / RATIO_MAX, self._told * RATIO_MAX))
