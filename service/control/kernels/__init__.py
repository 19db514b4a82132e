"""3 controller, kernels: the inner loops of the controller, compiled (compiled.py says how)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from service.control.kernels.ledger import left_steps

if TYPE_CHECKING:
    from service.control.kernels.compiled import Kernel

KERNELS: Final[tuple[Kernel[..., Any], ...]] = (left_steps,)


def compile_all() -> None:
    """Compile every kernel now: no decision waits for it. Takes seconds the first time."""
    for each in KERNELS:
        each.compile()
