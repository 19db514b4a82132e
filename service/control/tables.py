"""3 controller, storage: requests as dense arrays that grow by doubling, rows freed by swapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Collection

FIRST_CAPACITY = 64


class Table:
    """Keyed rows in numpy columns; a removed row is replaced by the last one.

    Row order is therefore not arrival order: whoever needs an order sorts by a column. Columns of
    one type lie in one block, so that a row moves with one assignment a type.

    Attributes:
        keys: of the rows, in their order.
        capacity: rows that there is room for; as long as it stays, views show what is written.
    """

    def __init__(self, **dtypes: type) -> None:
        self._names = {
            dtype: [name for name, of in dtypes.items() if of is dtype] for dtype in dtypes.values()
        }
        self.capacity = FIRST_CAPACITY
        self._blocks: dict[type, NDArray[Any]] = {
            dtype: np.zeros((len(names), FIRST_CAPACITY), dtype=dtype)
            for dtype, names in self._names.items()
        }
        self._arrays = self._columns()
        self.keys: list[str] = []
        self._row: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self._row

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The live part of a column: a view, valid until the next add or remove."""
        return self._arrays[name][: len(self.keys)]

    def live(self, *names: str) -> dict[str, NDArray[Any]]:
        """The live parts of some columns, by name and in this order."""
        arrays, n = self._arrays, len(self.keys)
        return {name: arrays[name][:n] for name in names}

    def take(self, rows: NDArray[np.int64] | slice) -> dict[str, NDArray[Any]]:
        """Some rows of every column; views when the rows are a slice."""
        return {name: array[: len(self.keys)][rows] for name, array in self._arrays.items()}

    def row(self, key: str) -> int:
        """Where a key's row is now."""
        return self._row[key]

    def rows(self, keys: Collection[str]) -> NDArray[np.int64]:
        """(n,) where the rows of n keys are now."""
        return np.fromiter(map(self._row.__getitem__, keys), np.int64, len(keys))

    def add(self, key: str, **values: float) -> None:
        """Append a row; every column must be given."""
        if key in self._row:
            raise KeyError(f"{key!r} is in the table already")
        row = len(self.keys)
        if row == self.capacity:
            self._grow()
        self.keys.append(key)
        self._row[key] = row
        for name, array in self._arrays.items():
            array[row] = values[name]

    def remove(self, key: str, *names: str) -> dict[str, float]:
        """Free a key's row and return what it held in some columns."""
        row = self._row.pop(key)
        held = {name: self._arrays[name].item(row) for name in names}
        last = self.keys.pop()
        if last != key:
            tail = len(self.keys)
            for block in self._blocks.values():
                block[:, row] = block[:, tail]
            self.keys[row] = last
            self._row[last] = row
        return held

    def _grow(self) -> None:
        """Make room for as many rows again."""
        self.capacity *= 2
        for dtype, block in self._blocks.items():
            self._blocks[dtype] = np.concatenate([block, np.zeros_like(block)], axis=1)
        self._arrays = self._columns()

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {
            name: values
            for dtype, names in self._names.items()
            for name, values in zip(names, self._blocks[dtype], strict=True)
        }
