"""Output tokens that nobody saw: an engine whose front end is busy puts several into one event.

A stream's events then undercount its tokens until it ends, and with them the KV it holds. The
engine's own counter knows the sum: what it made since the last scrape, less what the events of our
streams showed, is spread evenly over the streams that run there. Pure bookkeeping; the central
queue calls it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from service.control.events import Request, WorkerReport

DEBT_MAX_TOKENS: Final = 4096
"""Tokens seen before the engine counted them that are remembered, at most."""


@dataclass(slots=True)
class _Stream:
    """One started request.

    Attributes:
        sequences: it has.
        told: tokens of each sequence by its events.
        unseen: tokens of each sequence that came in shared events, as estimated.
    """

    sequences: int
    told: int = 0
    unseen: int = 0


@dataclass(slots=True)
class _Worker:
    """One worker since its last report.

    Attributes:
        streams: requests on it that are seen token by token.
        held_sequences: of all our requests on it.
        blind_requests: those that are not seen token by token.
        seen_tokens: by the events of all streams, those that ended included.
        missing_tokens: left over from earlier reports; negative when events came before the
            engine's counter moved.
        was_blind: whether a request ended there that was not seen token by token.
    """

    streams: dict[str, _Stream] = field(default_factory=dict)
    held_sequences: int = 0
    blind_requests: int = 0
    seen_tokens: int = 0
    missing_tokens: int = 0
    was_blind: bool = False


class MergedTokens:
    """Estimates the tokens in shared events, per worker.

    No estimate is made where others use the worker too, or where requests that do not stream run:
    their tokens cannot be told from ours.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = defaultdict(_Worker)
        self._started: dict[str, str] = {}

    def start(self, request: Request, worker_id: str) -> None:
        """Take note that a request was started."""
        self._started[request.request_id] = worker_id
        worker = self._workers[worker_id]
        worker.held_sequences += request.sequences
        if request.streams:
            worker.streams[request.request_id] = _Stream(request.sequences)
        else:
            worker.blind_requests += 1

    def end(self, request: Request) -> int:
        """Drop a request that ended or waits again; returns its unseen tokens per sequence."""
        worker_id = self._started.pop(request.request_id, None)
        if worker_id is None:
            return 0
        worker = self._workers[worker_id]
        worker.held_sequences -= request.sequences
        stream = worker.streams.pop(request.request_id, None)
        if stream is not None:
            return stream.unseen
        worker.blind_requests -= 1
        worker.was_blind = True
        return 0

    def note(self, request_id: str, decode_tokens: int, *, exact: bool) -> int:
        """Take a stream's tokens per sequence; returns the better estimate.

        Args:
            request_id: which.
            decode_tokens: by its events, or by a usage object in them.
            exact: whether it was a usage object: then the unseen tokens are among them.
        """
        worker_id = self._started.get(request_id)
        worker = None if worker_id is None else self._workers[worker_id]
        stream = None if worker is None else worker.streams.get(request_id)
        if worker is None or stream is None:
            return decode_tokens
        gain = decode_tokens - stream.told
        if exact:
            gain, stream.unseen = gain - stream.unseen, 0
        worker.seen_tokens += stream.sequences * gain
        stream.told = decode_tokens
        return decode_tokens + stream.unseen

    def reconcile(self, worker_id: str, report: WorkerReport) -> dict[str, int]:
        """Compare the engine's counter with the events since the last report.

        Returns:
            Tokens per sequence of the streams whose estimate grew.
        """
        worker = self._workers[worker_id]
        seen, worker.seen_tokens = worker.seen_tokens, 0
        blind, worker.was_blind = worker.was_blind or worker.blind_requests > 0, False
        foreign = (report.running or 0) + (report.waiting or 0) > worker.held_sequences
        if report.generated_tokens is None or foreign or blind:
            worker.missing_tokens = 0
            return {}
        begun = {key: stream for key, stream in worker.streams.items() if stream.told}
        sequences = sum(stream.sequences for stream in begun.values())
        missing = worker.missing_tokens + report.generated_tokens - seen
        share = max(missing, 0) // sequences if sequences else 0
        # What nobody runs for any more cannot be given to anyone.
        left = missing - share * sequences if sequences else min(missing, 0)
        worker.missing_tokens = max(left, -DEBT_MAX_TOKENS)
        if not share:
            return {}
        for stream in begun.values():
            stream.unseen += share
        return {key: stream.told + stream.unseen for key, stream in begun.items()}

    def drop_worker(self, worker_id: str) -> None:
        """Forget a worker that left, and what ran on it."""
        self._workers.pop(worker_id, None)
        gone = [key for key, at in self._started.items() if at == worker_id]
        for key in gone:
            del self._started[key]
