"""3 controller, views of a queue that are kept: its length hovers, so most were made before."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

V = TypeVar("V")

VIEWS_MAX: Final = 64


class KeptViews(Generic[V]):
    """Views by the length of the queue, at most VIEWS_MAX: a full one forgets all.

    Whoever puts one here says when they hold no more: by `clear`, or by a look at what `get` gives.
    """

    def __init__(self) -> None:
        self._by_length: dict[int, V] = {}

    def get(self, length: int) -> V | None:
        """What was kept for this length."""
        return self._by_length.get(length)

    def put(self, length: int, view: V) -> V:
        """Keep a view, and give it back."""
        if len(self._by_length) >= VIEWS_MAX:
            self._by_length.clear()
        self._by_length[length] = view
        return view

    def clear(self) -> None:
        """Forget all."""
        self._by_length.clear()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._by_length)
