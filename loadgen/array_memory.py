"""Memory of numpy arrays that objects hold, found by following their references."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np

ELSEWHERE = (type, ModuleType, BuiltinFunctionType)
"""What leads out of an object into the program."""


def array_bytes(*roots: object) -> int:
    """Bytes of all arrays that can be reached from some objects; shared memory counts once."""
    seen: set[int] = set()
    owners: dict[int, int] = {}
    left = list(roots)
    while left:
        found = left.pop()
        if id(found) in seen or isinstance(found, ELSEWHERE):
            continue
        seen.add(id(found))
        if isinstance(found, np.ndarray):
            owner = _owner(found)
            owners[id(owner)] = owner.nbytes
        elif isinstance(found, FunctionType):
            left.extend(found.__closure__ or ())
        else:
            left.extend(gc.get_referents(found))
    return sum(owners.values())


def _owner(array: np.ndarray) -> np.ndarray:
    """The array whose memory a view looks at."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
