"""Join the shortest queue with true lengths: a yardstick that only a simulator can have.

Every request goes on arrival to the worker that owes the fewest decode tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.push_at_once import PushAtOnce

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from service.control.events import Request, WorkerSpec

TRUE_JSQ = "true_jsq"


class TrueJsq(PushAtOnce):
    """Work-aware join-shortest-queue.

    Args:
        decode_tokens: the true length of every request that will come, by request id.
    """

    def __init__(self, decode_tokens: Mapping[str, int]) -> None:
        super().__init__()
        self._decode_tokens = decode_tokens
        self._seen: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def choose(self, request: Request, up: Sequence[str]) -> str:
        """The worker with the least work; the first to join breaks ties."""
        return min(up, key=self._left.__getitem__)

    def joined(self, spec: WorkerSpec) -> None:
        """A worker owes nothing yet."""
        self._left.setdefault(spec.worker_id, 0)

    def sent(self, request: Request, worker_id: str) -> None:
        """All its tokens are owed there."""
        self._seen[request.request_id] = 0
        self._left[worker_id] += self._decode_tokens[request.request_id]

    def progressed(self, request: Request, worker_id: str, tokens: int) -> None:
        """Some of them came."""
        new = tokens - self._seen[request.request_id]
        if new > 0:
            self._seen[request.request_id] = tokens
            self._left[worker_id] -= new

    def lost(self, worker_id: str) -> None:
        """What it owed ends with its requests."""

    def ended(self, request: Request, worker_id: str) -> None:
        """The rest is owed no more."""
        request_id = request.request_id
        self._left[worker_id] -= self._decode_tokens[request_id] - self._seen.pop(request_id)
