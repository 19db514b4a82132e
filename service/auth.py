"""1 edge, the door: which key a request comes with, whom it stands for, and its limits.

Keys are compared as digests, every one of them and each in constant time, so that the time of an
answer tells nothing about them. Limits are token buckets on the loop's clock, one state per key.
"""

from __future__ import annotations

import hmac
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Final

from pydantic import SecretStr

from service.auth_settings import AuthConfig, ClientKey
from service.errors import NoSuchRouteError, RateLimitedError, UnauthorizedError
from service.headers import RawHeaders, first
from service.surface import ALIVE_PATHS, READY_PATHS

OPEN_PATHS: Final = frozenset((*ALIVE_PATHS, *READY_PATHS))
METRICS_PATH: Final = "/metrics"
ADMIN_PREFIX: Final = "/admin/"
MINUTE_S: Final = 60.0
BEARER: Final = b"bearer "
BUSY_RETRY_S: Final = 1
"""When a client at its limit of requests may try again: any of them may end at any time."""


class Limit(StrEnum):
    """What a key ran into; doubles as a metric label."""

    REQUESTS_MAX = "requests_max"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"


class Bucket:
    """A token bucket: refills at a rate up to a minute's worth; what is spent late becomes debt.

    Tokens of an answer are known only when it ends. Spending below zero makes the next request
    wait for as long as the rate needs, so that the rate holds on average.

    Args:
        per_minute: rate and size.
        now_s: of the caller's clock.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._size = per_minute
        self._level = per_minute
        self._at_s = now_s

    def resize(self, per_minute: float, now_s: float) -> None:
        """Take another rate; debt stays, and so does what is left, up to the new size."""
        self._refill(now_s)
        self._size = per_minute
        self._level = min(self._level, per_minute)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much could be spent without debt; 0 when it could be now."""
        self._refill(now_s)
        # A whole bucket is enough for anything: what is larger would never fit.
        missing = min(amount, self._size) - self._level
        return max(0.0, missing * MINUTE_S / self._size)

    def spend(self, amount: float, now_s: float) -> None:
        """Take so much out, below zero if need be."""
        self._refill(now_s)
        self._level -= amount

    def _refill(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._level = min(self._size, self._level + passed_s * self._size / MINUTE_S)
        self._at_s = now_s


@dataclass(slots=True)
class Holder:
    """A key's tenant, limits and present use.

    Attributes:
        digest: SHA-256 of the key. limits: as configured. running: requests inside now.
        requests, tokens: buckets of the rates that are limited.
    """

    digest: bytes
    limits: ClientKey
    running: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None

    def obey(self, limits: ClientKey, now_s: float) -> None:
        """Take new limits; what was used stays used."""
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now_s)

    def reached(self, now_s: float) -> tuple[Limit, float] | None:
        """The limit that keeps a request out, and for how many seconds; None lets it in."""
        most = self.limits.requests_max
        if most is not None and self.running >= most:
            return Limit.REQUESTS_MAX, BUSY_RETRY_S
        waits: list[tuple[float, Limit]] = []
        if self.requests is not None:
            waits.append((self.requests.wait_s(1.0, now_s), Limit.REQUESTS_PER_MINUTE))
        if self.tokens is not None:
            waits.append((self.tokens.wait_s(1.0, now_s), Limit.TOKENS_PER_MINUTE))
        wait_s, limit = max(waits, default=(0.0, Limit.REQUESTS_MAX))
        return (limit, wait_s) if wait_s > 0 else None


class Visit:
    """A request that was let in, for as long as the block lasts.

    Args:
        holder: of the key that it came with; None where none is needed.
        counts: of the door.

    Attributes:
        tenant: whom its key stands for, "" when that is not said.
        metered: whether its key has a rate of tokens.
    """

    def __init__(self, holder: Holder | None, counts: DoorCounts) -> None:
        self.tenant = "" if holder is None else holder.limits.tenant
        self.metered = holder is not None and holder.tokens is not None
        self._holder = holder
        self._counts = counts

    def __enter__(self) -> None:
        """Hold one of the key's requests."""
        if self._holder is not None:
            self._holder.running += 1

    def __exit__(self, *exception: object) -> None:
        """Give it back."""
        if self._holder is not None:
            self._holder.running -= 1

    def spend(self, tokens: int, now_s: float) -> None:
        """Count prompt or output tokens against the key's rate."""
        holder = self._holder
        if holder is None or not tokens:
            return
        self._counts.tokens[self.tenant] += tokens
        if holder.tokens is not None:
            holder.tokens.spend(tokens, now_s)


@dataclass(slots=True)
class DoorCounts:
    """Counters of the door.

    Attributes:
        unauthorized: requests without a right key. requests: let in, by tenant.
        limited: kept out, by tenant and limit. tokens: spent, by tenant.
    """

    unauthorized: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    limited: Counter[tuple[str, Limit]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


class Door:
    """Lets requests in by their key.

    Attributes:
        counts: what happened so far; tenants are those of the settings.
    """

    def __init__(self) -> None:
        self.counts = DoorCounts()
        self._holders: tuple[Holder, ...] = ()
        self._admin: bytes | None = None
        self._metrics_open = True

    def configure(self, config: AuthConfig, keys: Iterable[ClientKey], now_s: float = 0.0) -> None:
        """Take keys and limits; a key that stays keeps what it has used."""
        known = {holder.digest: holder for holder in self._holders}
        holders: dict[bytes, Holder] = {}
        for entry in keys:
            digest = entry.digest
            holder = known.get(digest) or Holder(digest, entry)
            holder.obey(entry, now_s)
            holders.setdefault(digest, holder)
        self._holders = tuple(holders.values())
        self._admin = None if config.admin_key is None else _digest(config.admin_key)
        self._metrics_open = config.metrics_open
        self._forget_tenants()

    @property
    def keeps_keys(self) -> bool:
        """Whether clients need a key, which then ends here and goes to no worker."""
        return bool(self._holders)

    def running(self) -> dict[str, int]:
        """Requests inside now, by tenant."""
        counts: Counter[str] = Counter()
        for holder in self._holders:
            counts[holder.limits.tenant] += holder.running
        return dict(counts)

    def admit(self, path: str, headers: RawHeaders, now_s: float, *, limited: bool) -> Visit:
        """Let a request in; it counts against its key's limits while the visit's block runs.

        Args:
            path: asked for.
            headers: of the request.
            now_s: on the loop's clock.
            limited: whether it is work for a worker, which the limits are about.

        Raises:
            UnauthorizedError: its key is missing or wrong.
            NoSuchRouteError: it asks for an operator's route, and there is no admin key.
            RateLimitedError: its key's limits are reached.
        """
        holder = self._identify(path, headers)
        if holder is None or not limited:
            return Visit(None, self.counts)
        self._check_limits(holder, now_s)
        return Visit(holder, self.counts)

    def _identify(self, path: str, headers: RawHeaders) -> Holder | None:
        if path.startswith(ADMIN_PREFIX):
            self._check_admin(path, headers)
            return None
        if not self._holders or path in OPEN_PATHS:
            return None
        if path == METRICS_PATH and self._metrics_open:
            return None
        sent = _sent_digest(headers)
        # Every key is compared: the time does not tell which one was nearly right.
        found = [holder for holder in self._holders if _same(holder.digest, sent)]
        if not found:
            raise self._unauthorized("missing or wrong API key")
        return found[0]

    def _check_admin(self, path: str, headers: RawHeaders) -> None:
        if self._admin is None:
            raise NoSuchRouteError(f"{path}: Not Found")
        if not _same(self._admin, _sent_digest(headers)):
            raise self._unauthorized("missing or wrong admin key")

    def _check_limits(self, holder: Holder, now_s: float) -> None:
        tenant = holder.limits.tenant
        reached = holder.reached(now_s)
        if reached is not None:
            limit, wait_s = reached
            self.counts.limited[tenant, limit] += 1
            allowed = getattr(holder.limits, limit)
            raise RateLimitedError(
                f"the key's limit {limit} of {allowed:g} is reached",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
        self.counts.requests[tenant] += 1
        if holder.requests is not None:
            holder.requests.spend(1.0, now_s)

    def _unauthorized(self, message: str) -> UnauthorizedError:
        self.counts.unauthorized += 1
        return UnauthorizedError(message)

    def _forget_tenants(self) -> None:
        """Series of tenants that are gone go too."""
        tenants = {holder.limits.tenant for holder in self._holders}
        for counter in (self.counts.requests, self.counts.tokens):
            for tenant in counter.keys() - tenants:
                del counter[tenant]
        for pair in [pair for pair in self.counts.limited if pair[0] not in tenants]:
            del self.counts.limited[pair]


def _resized(bucket: Bucket | None, per_minute: float | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.resize(per_minute, now_s)
    return bucket


def _digest(key: SecretStr) -> bytes:
    return sha256(key.get_secret_value().encode()).digest()


def _same(digest: bytes, sent: bytes | None) -> bool:
    return hmac.compare_digest(digest, sent or b"")


def _sent_digest(headers: RawHeaders) -> bytes | None:
    """Digest of the key that came: `Authorization: Bearer`, or Anthropic's `x-api-key`."""
    authorization = first(headers, b"authorization")
    if authorization is not None and authorization[: len(BEARER)].lower() == BEARER:
        return sha256(authorization[len(BEARER) :].strip()).digest()
    key = first(headers, b"x-api-key")
    return None if key is None else sha256(key.strip()).digest()
