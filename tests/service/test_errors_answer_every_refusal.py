"""Every way to be turned away has one status, in OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from service import errors
from service.control.events import Refusal
from service.errors import REFUSAL_ANSWERS, BidgateError, RefusedError


def test_every_refusal_has_an_answer() -> None:
    assert set(REFUSAL_ANSWERS) == set(Refusal)


@pytest.mark.parametrize("reason", Refusal)
def test_a_refusal_is_a_client_or_capacity_error_never_a_500(reason: Refusal) -> None:
    error = RefusedError(reason, "no")
    assert error.status in {400, 404, 429, 503}
    assert (error.retry_after_s is not None) == (error.status in {429, 503})
    assert json.loads(error.body())["error"] == {
        "message": "no",
        "type": error.reply.type,
        "param": None,
        "code": error.reply.code,
    }


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    def tree(kind: type[BidgateError]) -> list[type[BidgateError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in tree(child))]

    for kind in tree(BidgateError):
        line = next(line for line in errors.__doc__.splitlines() if kind.__name__ in line)  # type: ignore[union-attr]
        if not kind.__subclasses__() and kind is not RefusedError:
            assert str(kind.answer.status) in line
