"""Views of a queue are kept by its length, a bounded number of them."""

from __future__ import annotations

from service.control.kept_views import VIEWS_MAX, KeptViews


def test_lengths_without_end_keep_a_bounded_number_of_views() -> None:
    views = KeptViews[str]()
    for length in range(3 * VIEWS_MAX):
        assert views.put(length, f"view of {length}") == f"view of {length}"
        assert len(views) <= VIEWS_MAX
        assert views.get(length) == f"view of {length}"
    assert views.get(0) is None


def test_what_holds_no_more_is_forgotten() -> None:
    views = KeptViews[str]()
    views.put(7, "old")
    views.clear()
    assert len(views) == 0
    assert views.get(7) is None
