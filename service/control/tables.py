"""3 controller, storage: requests as dense arrays that grow by doubling, rows freed by swapping."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_CAPACITY = 64


class Table:
    """Keyed rows in numpy columns; a removed row is replaced by the last one.

    Row order is therefore not arrival order: whoever needs an order sorts by a column.
    """

    def __init__(self, **dtypes: type) -> None:
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.zeros(FIRST_CAPACITY, dtype=dtype) for name, dtype in dtypes.items()
        }
        self._capacity = FIRST_CAPACITY
        self.keys: list[str] = []
        self._row: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The live part of a column: a view, valid until the next add or remove."""
        return self._arrays[name][: len(self.keys)]

    def take(self, rows: NDArray[np.int64] | slice) -> dict[str, NDArray[Any]]:
        """Some rows of every column; views when the rows are a slice."""
        return {name: array[: len(self.keys)][rows] for name, array in self._arrays.items()}

    def row(self, key: str) -> int:
        """Where a key's row is now."""
        return self._row[key]

    def add(self, key: str, **values: float) -> None:
        """Append a row; every column must be given."""
        if key in self._row:
            raise KeyError(f"{key!r} is in the table already")
        row = len(self.keys)
        if row == self._capacity:
            self._capacity *= 2
            for name, array in self._arrays.items():
                self._arrays[name] = np.concatenate([array, np.zeros_like(array)])
        self.keys.append(key)
        self._row[key] = row
        for name, array in self._arrays.items():
            array[row] = values[name]

    def remove(self, key: str, *names: str) -> dict[str, float]:
        """Free a key's row and return what it held in some columns."""
        row = self._row.pop(key)
        held = {name: self._arrays[name][row].item() for name in names}
        last = self.keys.pop()
        if last != key:
            tail = len(self.keys)
            for array in self._arrays.values():
                array[row] = array[tail]
            self.keys[row] = last
            self._row[last] = row
        return held
