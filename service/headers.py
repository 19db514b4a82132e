"""Which HTTP headers pass between client and worker, and which end at bidgate (RFC 9110, 7.6.1)."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from service.errors import BadRequestError

RawHeaders: TypeAlias = list[tuple[bytes, bytes]]

LENGTH_DIGITS_MAX: Final = 18
LENGTH_MAX: Final = 10**LENGTH_DIGITS_MAX

EVENT_STREAM: Final = b"text/event-stream"
FORM: Final = b"multipart/form-data"
"""Media type of streams of server-sent events."""
DATA_PARALLEL_RANK: Final = b"x-data-parallel-rank"
"""Pins a request to one data-parallel rank of a vLLM server."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Made anew for the worker: its own authority, the length of the body as sent, our request id, and
# its rank: a client does not know which server it will get, nor what else runs there.
_NOT_TO_WORKER: Final = _HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"x-request-id"),
    DATA_PARALLEL_RANK,
}
# Made anew for the client by the server or the edge.
_NOT_TO_CLIENT: Final = _HOP_BY_HOP | {b"date", b"x-request-id"}

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})
"""Where clients put keys; those that are bidgate's own go no further."""


def to_worker(headers: RawHeaders, *, plain: bool, drop_authorization: bool) -> RawHeaders:
    """Keep what a client's headers say to the worker.

    Bytes pass through undecoded, so the worker must not compress more than the client accepts:
    a client that names no encoding gets none, and neither does a stream, whose tokens are counted
    as they pass and whose events must not sit in a compressor.

    Args:
        headers: lower-case names as ASGI delivers them; repeated names stay repeated.
        plain: whether the answer must not be compressed: a stream, or one that is counted.
        drop_authorization: whether the credentials were meant for bidgate, or the worker has its
            own.

    Raises:
        BadRequestError: a value is not UTF-8: the HTTP client can send no other bytes as they are.
    """
    dropped = _NOT_TO_WORKER | _named_in_connection(headers)
    if drop_authorization:
        dropped |= CREDENTIALS
    if plain:
        dropped |= {b"accept-encoding"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    for name, value in kept:
        if not value.isascii():
            _check_utf8(name, value)
    if plain or all(name != b"accept-encoding" for name, _ in headers):
        kept.append((b"accept-encoding", b"identity"))
    return kept


def to_client(headers: RawHeaders) -> RawHeaders:
    """Keep what a worker's headers say to the client; names become lower case.

    A name that is no token is left out, and a control character in a value becomes a blank
    (RFC 9110, 5.5): the reader of a worker's answer takes them, our server sends none.
    """
    lower = [(name.lower(), value) for name, value in headers]
    dropped = _NOT_TO_CLIENT | _named_in_connection(lower)
    return [
        (name, _CONTROL.sub(b" ", value))
        for name, value in lower
        if name not in dropped and _TOKEN.fullmatch(name)
    ]


def first(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of a lower-case name, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def media_type(headers: RawHeaders) -> bytes:
    """The media type of a body in lower case, without parameters; nothing where none is told."""
    return (first(headers, b"content-type") or b"").partition(b";")[0].strip().lower()


def is_compressed(headers: RawHeaders) -> bool:
    """Whether a body is encoded in any way."""
    coding = first(headers, b"content-encoding") or b""
    return coding.strip().lower() not in (b"", b"identity")


def announced_bytes(headers: RawHeaders) -> int | None:
    """The content-length; None where it is missing or no number, LENGTH_MAX where it is absurd."""
    told = first(headers, b"content-length")
    if told is None or not told.isdigit():
        return None
    # Python refuses to read numbers of thousands of digits.
    return int(told) if len(told) <= LENGTH_DIGITS_MAX else LENGTH_MAX


def _check_utf8(name: bytes, value: bytes) -> None:
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"the value of the header {name.decode('latin-1')} is not UTF-8; encode it, as in "
            "percent-encoding"
        ) from error


def _named_in_connection(headers: RawHeaders) -> frozenset[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))
