"""3 controller, what a batch slot of each worker takes for a token, as the requests show it.

Told iteration times may be off, and leave out what prefills cost the others. Tokens that came and
the time their requests held a slot for them tell both. What of that is due to prompts the waits for
first tokens tell: a worker computes the prompts that were sent to it in turn, so the wait grows by
the same time with every prompt token ahead.
"""

from __future__ import annotations

import numpy as np

from service.control.columns import FloatArray, IntArray
from service.control.kernels.tokens import iteration_pace, note_pace

PRIOR_TOKENS = 256.0
"""Weight of the told iteration time, in tokens seen."""
MEMORY_TOKENS = 16384.0
"""Tokens of one worker after which what was seen counts half."""
PROMPT_SHARE_MAX = 0.95
"""Most that prompts are taken to be of the time of a token; what is left is known too badly."""
PROMPT_MEMORY = 0.98
"""Weight of all earlier first tokens of a worker, at each new one."""
PROMPT_PRIOR_TOKENS = 256.0
"""Spread of prompt lengths at which one first token weighs as much as what was believed before."""


class PromptPace:
    """Time of a prompt token on every worker: by how much more the wait for a first token grows.

    Before first tokens came prompts are taken to cost nothing. UncachedPace (uncached_pace.py) is
    another estimate: it believes the pace that was set, and counts only what no cache holds.
    """

    def __init__(self) -> None:
        self._sums: FloatArray = np.zeros((5, 0))
        self._prompt_s: FloatArray = np.zeros(0)
        self._shown: FloatArray | None = None

    def note(self, worker: int, ahead_tokens: float, waited_s: float) -> None:
        """Learn from a first token.

        Args:
            worker: index of where it came from.
            ahead_tokens: prompt tokens that the worker had to compute before it, its own included.
            waited_s: time since its request was sent there.
        """
        self._make_room(worker + 1)
        self._shown = None
        x, y = ahead_tokens, waited_s
        sums = self._sums[:, worker]
        sums *= PROMPT_MEMORY
        sums += (1.0, x, y, x * x, x * y)
        weight, x, y, xx, xy = sums.tolist()
        weight = max(weight, 1.0)
        spread = max(xx - x * x / weight, 0.0) + PROMPT_PRIOR_TOKENS**2
        self._prompt_s[worker] = max((xy - x * y / weight) / spread, 0.0)

    def prompt_s(self, workers: int) -> FloatArray:
        """(g,) seconds by which a prompt token holds up everything else on a worker; read-only."""
        if self._shown is None or self._shown.size != workers:
            self._make_room(workers)
            self._shown = self._prompt_s[:workers].copy()
            self._shown.flags.writeable = False
        return self._shown

    def drop_worker(self, gone: int) -> None:
        """Forget a worker; later ones move down."""
        self._shown = None
        if gone < self._sums.shape[1]:
            self._sums = np.delete(self._sums, gone, axis=1)
            self._prompt_s = np.delete(self._prompt_s, gone)

    def _make_room(self, workers: int) -> None:
        more = workers - self._sums.shape[1]
        if more > 0:
            self._sums = np.concatenate([self._sums, np.zeros((5, more))], axis=1)
            self._prompt_s = np.append(self._prompt_s, np.zeros(more))


class TokenPace:
    """Slot-seconds and tokens of every worker, the recent ones weighing most."""

    def __init__(self) -> None:
        # Slot-seconds, tokens, and prompt tokens x slots that were busy meanwhile.
        self._sums: FloatArray = np.zeros((3, 0))

    def note(self, worker: IntArray, came: FloatArray, workers: int) -> None:
        """Book tokens.

        Args:
            worker: (n,) index of the worker they came from; -1 where it is gone.
            came: (2, n) slot-seconds in which they came, sequences x time since the last ones; and
                how many, all sequences together.
            workers: more than any index.
        """
        self._make_room(workers)
        note_pace(worker, came, MEMORY_TOKENS, self._sums)

    def note_prompt(self, worker: int, held_tokens: float) -> None:
        """Book a prompt that was computed: its tokens x the slots that were busy meanwhile."""
        self._make_room(worker + 1)
        self._sums[2, worker] += held_tokens

    def token_s(self, told_s: FloatArray) -> FloatArray:
        """(g,) seconds of a slot for one token.

        Args:
            told_s: (g,) the workers' iteration times: what is believed before tokens came.
        """
        self._make_room(told_s.size)
        slot_s, tokens, _ = self._sums[:, : told_s.size]
        return np.asarray((PRIOR_TOKENS * told_s + slot_s) / (PRIOR_TOKENS + tokens))

    def step_s(self, told_s: FloatArray, prompt_s: FloatArray) -> FloatArray:
        """(g,) seconds of a decode iteration without prompts: less what they held up.

        Args:
            told_s: (g,) the workers' iteration times.
            prompt_s: (g,) seconds of a prompt token.
        """
        self._make_room(told_s.size)
        step_s = np.empty(told_s.size)
        left_min = 1.0 - PROMPT_SHARE_MAX
        iteration_pace(told_s, prompt_s, self._sums, PRIOR_TOKENS, left_min, step_s)
        return step_s

    def drop_worker(self, gone: int) -> None:
        """Forget a worker; later ones move down."""
        if gone < self._sums.shape[1]:
            self._sums = np.delete(self._sums, gone, axis=1)

    def _make_room(self, workers: int) -> None:
        more = workers - self._sums.shape[1]
        if more > 0:
            self._sums = np.concatenate([self._sums, np.zeros((3, more))], axis=1)
