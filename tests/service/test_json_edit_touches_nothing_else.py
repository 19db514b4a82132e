"""A field is cut out of, or changed in, a body's bytes; whatever else is in it stays as it was."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from service.errors import BadRequestError
from service.json_edit import edit_object

NAMES = st.sampled_from(["a", "b", "model", "kv_transfer_params", 'quo"te', "ü"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
SPACES = st.sampled_from(["", " ", "\n\t", "  "])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, list[tuple[str, object]]]:
    """An object as text, with spaces, escapes and repeated keys; and its members."""
    members = draw(st.lists(st.tuples(NAMES, VALUES), max_size=6))
    parts = []
    for name, value in members:
        plain = draw(st.booleans())
        spaces = [draw(SPACES) for _ in range(4)]
        key, text = (json.dumps(one, ensure_ascii=not plain) for one in (name, value))
        parts.append(f"{spaces[0]}{key}{spaces[1]}:{spaces[2]}{text}{spaces[3]}")
    return draw(SPACES) + "{" + ",".join(parts) + "}" + draw(SPACES), members


@given(body=bodies())
def test_what_is_left_is_what_was_there_in_order(
    body: tuple[str, list[tuple[str, object]]],
) -> None:
    text, members = body
    edited = edit_object(
        text.encode("utf-8", "surrogatepass"), drop={"kv_transfer_params"}, put={"model": "new"}
    )
    expected = [
        (name, "new" if name == "model" else value)
        for name, value in members
        if name != "kv_transfer_params"
    ]
    parsed = json.loads(edited.decode("utf-8", "surrogatepass"), object_pairs_hook=list)
    assert [name for name, _ in parsed] == [name for name, _ in expected]
    assert json.loads(edited.decode("utf-8", "surrogatepass")) == dict(expected)


@given(body=bodies())
def test_a_body_without_those_fields_is_the_same_bytes(
    body: tuple[str, list[tuple[str, object]]],
) -> None:
    raw = body[0].encode("utf-8", "surrogatepass")
    assert edit_object(raw, drop={"nothing"}, put={"nowhere": "x"}) == raw


@given(raw=st.binary(max_size=40))
def test_any_bytes_are_edited_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadRequestError):
        edit_object(raw, drop={"a"}, put={"b": "c"})


def test_numbers_that_parsers_lose_keep_their_digits() -> None:
    raw = b'{"a":1, "big": 123456789012345678901234567890, "x":1.10, "y":1E400}'
    kept = b'{ "big": 123456789012345678901234567890, "x":1.10, "y":1E400}'
    assert edit_object(raw, drop={"a"}, put={}) == kept
