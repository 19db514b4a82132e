"""Which HTTP headers pass between client and worker, and which end at bidgate (RFC 9110, 7.6.1)."""

from __future__ import annotations

from typing import Final, TypeAlias

from service.errors import BadRequestError

RawHeaders: TypeAlias = list[tuple[bytes, bytes]]

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

CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})
"""Where clients put keys; those that are bidgate's own go no further."""


def to_worker(headers: RawHeaders, *, streams: bool, drop_authorization: bool) -> RawHeaders:
    """Keep what a client's headers say to the worker.

    Bytes pass through undecoded, so the worker must not compress more than the client accepts:
    a client that names no encoding gets none, and neither does a stream, whose tokens are counted
    as they pass and whose events must not sit in a compressor.

    Args:
        headers: lower-case names as ASGI delivers them; repeated names stay repeated.
        streams: whether the client asked for a stream.
        drop_authorization: whether the credentials were meant for bidgate, or the worker has its
            own.

    Raises:
        BadRequestError: a value is not UTF-8: the HTTP client can send no other bytes as they are.
    """
    dropped = _NOT_TO_WORKER | _named_in_connection(headers)
    if drop_authorization:
        dropped |= CREDENTIALS
    if streams:
        dropped |= {b"accept-encoding"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    for name, value in kept:
        if not value.isascii():
            _check_utf8(name, value)
    if streams or all(name != b"accept-encoding" for name, _ in headers):
        kept.append((b"accept-encoding", b"identity"))
    return kept


def to_client(headers: RawHeaders) -> RawHeaders:
    """Keep what a worker's headers say to the client; names become lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    dropped = _NOT_TO_CLIENT | _named_in_connection(lower)
    return [(name, value) for name, value in lower if name not in dropped]


def first(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of a lower-case name, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


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
