"""3 controller, kernels: a loop over numbers becomes machine code the first time it is called.

A decision is hundreds of small steps; in numpy each costs a call, and the calls cost more than the
numbers. Numba compiles a loop that is written out in plain Python. Every kernel states the types it
takes, so nothing is ever compiled in the middle of a decision for types that nobody foresaw: other
types are a TypeError, in tests always, elsewhere in a kernel's first calls. What was compiled is
kept on disk (Numba's cache: beside the source, in the user's cache folder or in NUMBA_CACHE_DIR);
where nothing can be written it is compiled at each start.

Two rules. A kernel calls nothing of another file: Numba's cache looks at a kernel's own file alone
when it decides whether what it kept is still true; nor does it call itself, as what is kept of
such a loop crashes when it is read. And a kernel adds up in the order of its loop
and without `fastmath`, so that the same numbers give the same decision on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

from numba import njit, types

P = ParamSpec("P")
R = TypeVar("R")

FLOAT: Final = types.float64
INT: Final = types.int64
BOOL: Final = types.boolean
NOTHING: Final = types.void
FLOATS: Final = types.Array(FLOAT, 1, "A", readonly=True)
"""(n,) read-only for the kernel; arrays that may be written to are taken as well."""
FLOATS_2D: Final = types.Array(FLOAT, 2, "A", readonly=True)
FLOATS_3D: Final = types.Array(FLOAT, 3, "A", readonly=True)
INTS: Final = types.Array(INT, 1, "A", readonly=True)
INTS_2D: Final = types.Array(INT, 2, "A", readonly=True)
BOOLS: Final = types.Array(BOOL, 1, "A", readonly=True)
BOOLS_2D: Final = types.Array(BOOL, 2, "A", readonly=True)
FLOATS_OUT: Final = types.Array(FLOAT, 1, "A")
"""(n,) that the kernel writes to."""
FLOATS_2D_OUT: Final = types.Array(FLOAT, 2, "A")
FLOATS_3D_OUT: Final = types.Array(FLOAT, 3, "A")
INTS_OUT: Final = types.Array(INT, 1, "A")
INTS_2D_OUT: Final = types.Array(INT, 2, "A")
BOOLS_OUT: Final = types.Array(BOOL, 1, "A")
COLUMN: Final = types.UniTuple(FLOAT, 4)  # type: ignore[no-untyped-call]
Column: TypeAlias = tuple[float, float, float, float]
"""Start, steps, footprint and sequences of one column."""

CHECKED: Final = 100
"""So many first calls of each kernel are looked at."""


def dense(taken: types.Array) -> types.Array:
    """The same arrays where their numbers lie side by side; a quarter less time in long loops."""
    return types.Array(taken.dtype, taken.ndim, "C", readonly=not taken.mutable)


@dataclass(frozen=True, slots=True)
class _MachineCode(Generic[P, R]):
    """What is run: with a look at the types of what is given, and without."""

    checked: Callable[P, R]
    unchecked: Callable[P, R]


class Kernel(Generic[P, R]):
    """A loop that is compiled before its first call.

    Looking at the types of what a kernel is given takes as long as a short kernel itself. So it is
    done for the first CHECKED calls; what comes later goes straight to the machine code, which by
    itself refuses only what is no array, or one of numbers of another size.

    Attributes:
        plain: the same in plain Python, for tests.
        checks: whether every call is looked at; for tests.
    """

    checks = False

    def __init__(self, function: Callable[P, R], signature: object) -> None:
        self.plain = function
        self._signature = signature
        self._run: Callable[P, R] = self._checked
        self._machine_code: _MachineCode[P, R] | None = None
        self._left = CHECKED
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the machine code."""
        return self._run(*args, **kwargs)

    def compile(self) -> _MachineCode[P, R]:
        """Compile, or read what was compiled before; a second call does nothing."""
        if self._machine_code is None:
            self._machine_code = _machine_code(self.plain, self._signature)
        return self._machine_code

    def _checked(self, *args: P.args, **kwargs: P.kwargs) -> R:
        code = self.compile()
        self._left -= 1
        if self._left <= 0 and not self.checks:
            self._run = code.unchecked
        return code.checked(*args, **kwargs)


def kernel(signature: object) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a kernel of a function that takes and returns numbers and arrays of these types.

    Args:
        signature: as `INT(FLOATS, FLOATS_OUT)`: what is returned, and the arguments.
    """

    def made(function: Callable[P, R]) -> Kernel[P, R]:
        return Kernel(function, signature)

    return made


def part(function: Callable[P, R]) -> Callable[P, R]:
    """Make a step of a function, for the kernels of its own file alone."""
    made: Callable[P, R] = njit(nogil=True, forceinline=True)(function)
    return made


def _machine_code(function: Callable[P, R], signature: object) -> _MachineCode[P, R]:
    options: dict[str, Any] = {"nogil": True}
    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder to write to
        dispatcher = njit(**options)(function)
    dispatcher.compile(signature)
    dispatcher.disable_compile()
    return _MachineCode(dispatcher, dispatcher.get_overload(signature))
