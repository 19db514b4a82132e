"""3 controller, what a batch slot of each worker takes for a token, as the requests show it.

Told iteration times may be off, and leave out what prefills cost the others. Tokens that came and
the time their requests held a slot for them tell both.
"""

from __future__ import annotations

import numpy as np

from service.control.columns import FloatArray, IntArray, sum_per_slot

PRIOR_TOKENS = 256.0
"""Weight of the told iteration time, in tokens seen."""
MEMORY_TOKENS = 16384.0
"""Tokens of one worker after which what was seen counts half."""


class TokenPace:
    """Slot-seconds and tokens of every worker, the recent ones weighing most."""

    def __init__(self) -> None:
        self._slot_s: FloatArray = np.zeros(0)
        self._tokens: FloatArray = np.zeros(0)

    def note(self, worker: IntArray, slot_s: FloatArray, tokens: FloatArray) -> None:
        """Book tokens.

        Args:
            worker: (n,) index of the worker they came from.
            slot_s: (n,) slot-seconds in which they came: sequences x time since the last ones.
            tokens: (n,) how many, all sequences together.
        """
        self._make_room(int(worker.max(initial=-1)) + 1)
        self._slot_s += sum_per_slot(worker, slot_s, self._slot_s.size)
        self._tokens += sum_per_slot(worker, tokens, self._tokens.size)
        full = self._tokens > MEMORY_TOKENS
        if full.any():
            self._slot_s[full] *= 0.5
            self._tokens[full] *= 0.5

    def token_s(self, told_s: FloatArray) -> FloatArray:
        """(g,) seconds of a slot for one token.

        Args:
            told_s: (g,) the workers' iteration times: what is believed before tokens came.
        """
        self._make_room(told_s.size)
        slot_s, tokens = self._slot_s[: told_s.size], self._tokens[: told_s.size]
        return np.asarray((PRIOR_TOKENS * told_s + slot_s) / (PRIOR_TOKENS + tokens))

    def drop_worker(self, gone: int) -> None:
        """Forget a worker; later ones move down."""
        if gone < self._tokens.size:
            self._slot_s = np.delete(self._slot_s, gone)
            self._tokens = np.delete(self._tokens, gone)

    def _make_room(self, workers: int) -> None:
        more = workers - self._tokens.size
        if more > 0:
            self._slot_s = np.append(self._slot_s, np.zeros(more))
            self._tokens = np.append(self._tokens, np.zeros(more))
