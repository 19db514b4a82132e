"""4 forwarder, its settings: how long each step of a relay may take, and how often it is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig:
    """Bounds of a relay; seconds.

    Attributes:
        connect_timeout_s: longest wait for a TCP connection to a worker.
        keepalive_s: idle connections to workers are dropped after this; below the workers' own
            limit (vLLM: 5 s), so that a request never meets a closing connection.
        first_byte_timeout_s: longest wait for a worker's response and, of a stream, first event.
        stall_timeout_s: longest silence within a response.
        client_stall_timeout_s: longest a client may leave a full buffer unread.
        retries_max: other workers tried when one cannot take a request.
        retry_share: over all requests, at most this share of second tries because a worker was too
            busy; more are not made, so that retries cannot storm.
        retry_burst: such tries that may come at once after a quiet time.
        failures_to_suspect: broken answers of a worker in a row that take it out of rotation until
            its health is checked, so that a dying engine does not eat the queue.
    """

    connect_timeout_s: float = 3.0
    keepalive_s: float = 4.0
    first_byte_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0
    client_stall_timeout_s: float = 60.0
    retries_max: int = 2
    retry_share: float = 0.1
    retry_burst: float = 10.0
    failures_to_suspect: int = 2

    def __post_init__(self) -> None:
        """Refuse bounds that are none."""
        for name in (
            "connect_timeout_s",
            "keepalive_s",
            "first_byte_timeout_s",
            "stall_timeout_s",
            "client_stall_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.retries_max < 0:
            raise ValueError(f"retries_max must not be negative, got {self.retries_max}")
        if not (0 <= self.retry_share <= 1 and self.retry_burst >= 0):
            raise ValueError("retry_share must be in [0, 1] and retry_burst not negative")
        if self.failures_to_suspect < 1:
            given = self.failures_to_suspect
            raise ValueError(f"failures_to_suspect must be at least 1, got {given}")
