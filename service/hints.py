"""1 edge, reading: what a request's headers say about its value, its bounds and who pays.

Headers win over the body. Times are milliseconds on the wire and seconds here.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final

from service.auth_settings import TENANT_CHARS_MAX
from service.errors import BadRequestError
from service.headers import RawHeaders
from service.intake import COUNT_MAX, VALUE_MAX, priority_value

KEY_DIGEST_BYTES: Final = 6
YES: Final = (b"1", b"true", b"yes")

VALUE: Final = (b"x-bidgate-value",)
PRIORITY: Final = (b"x-bidgate-priority", b"x-request-priority")
DECODE_TOKENS: Final = (b"x-bidgate-decode-tokens",)
TENANT: Final = (
    b"x-bidgate-tenant",
    b"x-llm-d-inference-fairness-id",
    b"x-gateway-inference-fairness-id",
)
TTFT_MS: Final = (b"x-bidgate-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
E2E_MS: Final = (b"x-bidgate-e2e-ms",)
DEADLINE_MS: Final = (b"x-bidgate-deadline-ms",)
MAX_WAIT_MS: Final = (b"x-bidgate-max-wait-ms",)
NO_QUEUE: Final = b"x-bidgate-no-queue"
WORKER: Final = (b"x-bidgate-worker", b"x-gateway-destination-endpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderFacts:
    """What the headers say.

    Attributes:
        decode_tokens_hint: a forecast of the output length.
        value: multiplies the reward; (0, 64]. From x-bidgate-value, else a priority: lower is
            sooner, each step doubles.
        tenant: named, else made from the API key; "" without both.
        ttft_bound_s: wanted time to first token.
        e2e_bound_s: wanted end-to-end time.
        max_wait_s: longest wait in the queue; 0 for none at all.
        deadline_s: when the request is worth nothing any more, from its arrival.
        worker_id: the one worker it is for, where the operator lets clients say so; else "".
    """

    decode_tokens_hint: int | None
    value: float | None
    tenant: str
    ttft_bound_s: float | None
    e2e_bound_s: float | None
    max_wait_s: float | None
    deadline_s: float | None
    worker_id: str


def read_headers(headers: RawHeaders) -> HeaderFacts:
    """Read the hints among the request headers.

    Raises:
        BadRequestError: one of ours is not a number in its range.
    """
    named = dict(headers)
    tokens = _number(named, DECODE_TOKENS)
    deadline_s = _seconds(named, DEADLINE_MS)
    e2e_s = _seconds(named, E2E_MS)
    return HeaderFacts(
        decode_tokens_hint=None if tokens is None else math.ceil(min(tokens, COUNT_MAX)),
        value=_value(named),
        tenant=_tenant(named),
        ttft_bound_s=_seconds(named, TTFT_MS),
        e2e_bound_s=deadline_s if e2e_s is None else e2e_s,
        max_wait_s=_max_wait_s(named, deadline_s),
        deadline_s=deadline_s,
        worker_id=next((named[name] for name in WORKER if name in named), b"").decode("latin-1"),
    )


def _value(named: dict[bytes, bytes]) -> float | None:
    value = _number(named, VALUE)
    if value is not None:
        if value > VALUE_MAX:
            # A priority is cut, as vLLM takes any; this header is ours, and a cut would hide that
            # 100 is worth no more than 64.
            raise BadRequestError(f"header {VALUE[0].decode()} must be at most {VALUE_MAX:g}")
        return value
    name = next((name for name in PRIORITY if name in named), None)
    if name is None:
        return None
    try:
        return priority_value(int(named[name]))
    except ValueError:
        raise BadRequestError(f"header {name.decode()} must be an integer") from None


def _tenant(named: dict[bytes, bytes]) -> str:
    """A name from a header, else one that tells keys apart without telling the key."""
    given = next((named[name] for name in TENANT if named.get(name)), b"")
    if given:
        return given.decode("latin-1")[:TENANT_CHARS_MAX]
    key = named.get(b"authorization") or named.get(b"x-api-key") or b""
    if not key:
        return ""
    return f"key-{hashlib.blake2b(key, digest_size=KEY_DIGEST_BYTES).hexdigest()}"


def _max_wait_s(named: dict[bytes, bytes], deadline_s: float | None) -> float | None:
    preferences = named.get(b"prefer", b"").lower().replace(b" ", b"").split(b",")
    if named.get(NO_QUEUE, b"").lower() in YES or b"if-available" in preferences:
        return 0.0
    wait_s = _seconds(named, MAX_WAIT_MS, zero=True)
    bounds = [bound for bound in (wait_s, deadline_s) if bound is not None]
    return min(bounds, default=None)


def _seconds(
    named: dict[bytes, bytes], names: tuple[bytes, ...], *, zero: bool = False
) -> float | None:
    number_ms = _number(named, names, zero=zero)
    return None if number_ms is None else number_ms / 1e3


def _number(
    named: dict[bytes, bytes], names: tuple[bytes, ...], *, zero: bool = False
) -> float | None:
    name = next((name for name in names if name in named), None)
    if name is None:
        return None
    try:
        number = float(named[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        words = "a number that is not negative" if zero else "a positive number"
        raise BadRequestError(f"header {name.decode()} must be {words}")
    return number
