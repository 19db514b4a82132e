"""`python -m tests.vllm.workers --apart` gives engines and routers processors of their own."""

from __future__ import annotations

import pytest

from tests.vllm.workers import WorkerError, halves


def test_no_processor_is_shared_and_none_is_left_out() -> None:
    engines, others = halves({7, 2, 4, 5, 9})
    assert not engines & others
    assert engines | others == {2, 4, 5, 7, 9}
    assert (len(engines), len(others)) == (2, 3)


def test_a_single_processor_cannot_be_divided() -> None:
    with pytest.raises(WorkerError, match="only one processor"):
        halves({3})
