"""Bytes that were right once: cut, flipped, doubled, spliced; seeded."""

from __future__ import annotations

import random

SPLICES = (
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\x00",
    b"\xff\xfe",
    b": ",
    b" ",
    b"content-length: 99999999999999999999\r\n",
    b"content-length: -1\r\n",
    b"content-length: 3\r\ncontent-length: 4\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"expect: 100-continue\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"connection: close, x-request-id\r\n",
    b"x-request-id: \xe4\xf6\r\n",
    b"x-bidgate-max-wait-ms: nan\r\n",
    b"x-bidgate-value: 1e999\r\n",
    b"HTTP/0.9\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffffff\r\n",
    b'"max_tokens":1e400,',
    b'"n":100000,',
    b"{" * 2000,
    b"[" * 200_000,
    b"%00%ff%zz",
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Damage bytes in one to four places."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(5):
            case 0:
                data = data[:at]
            case 1 if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 2:
                end = min(len(data), at + rng.randint(1, 40))
                data = data[:at] + data[at:end] * 2 + data[end:]
            case 3:
                end = min(len(data), at + rng.randint(1, 40))
                data = data[:at] + data[end:]
            case _:
                data = data[:at] + rng.choice(SPLICES) + data[at:]
    return data
