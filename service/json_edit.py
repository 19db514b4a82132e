"""Change a field of a JSON object in its bytes, and leave every other byte as the client sent it.

Writing a parsed body anew would lose what parsers do not keep: the digits of large numbers,
escapes, spaces, repeated keys, 1e400.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from service.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = json.JSONDecoder()


def edit_object(body: bytes, *, drop: Collection[str], put: Mapping[str, str]) -> bytes:
    """Take fields out of an object and give others a new string value, wherever they stand.

    Args:
        body: a JSON object in UTF-8; keys may repeat, and each occurrence is changed.
        drop: keys to take out with their values.
        put: new values of keys that are there; keys that are not there are not added.

    Raises:
        BadRequestError: it is no JSON object.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        members = list(_members(text))
    except (ValueError, RecursionError, IndexError) as error:
        raise BadRequestError(f"the request body is not valid JSON: {error}") from error
    if not any(key in drop or key in put for key, *_ in members):
        return body
    kept = []
    for key, start, value_start, end in members:
        if key in put:
            kept.append(text[start:value_start] + json.dumps(put[key]))
        elif key not in drop:
            kept.append(text[start:end])
    return ("{" + ",".join(kept) + "}").encode("utf-8", "surrogatepass")


def _members(text: str) -> Iterator[tuple[str, int, int, int]]:
    """(key, start, start of the value, end) of each member, spaces around it included."""
    at = _skip(text, 0)
    if text[at] != "{":
        raise ValueError("not an object")
    at += 1
    if text[_skip(text, at)] == "}":
        return
    while True:
        start = at
        key_start = _skip(text, at)
        _expect(text, key_start, '"')
        key, at = _DECODER.raw_decode(text, key_start)
        value_start = _skip(text, _expect(text, _skip(text, at), ":"))
        _, at = _DECODER.raw_decode(text, value_start)
        at = _skip(text, at)
        yield key, start, value_start, at
        if text[at] == "}":
            return
        at = _expect(text, at, ",")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(f"expected {character!r} at {at}")
    return at + 1
