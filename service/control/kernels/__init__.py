"""3 controller, kernels: the inner loops of the controller, compiled (compiled.py says how)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from service.control.kernels.admission import admit_by_best_margin
from service.control.kernels.arrivals import (
    last_within,
    note_arrivals,
    nth_most_work,
    record_columns,
)
from service.control.kernels.calendar import hold, left_tokens, with_others
from service.control.kernels.descent import descend, price_tokens, reach_of_prices, scarce
from service.control.kernels.fleet import (
    free_beside,
    prompt_steps,
    startable_workers,
    sum_over,
    weigh_waits,
    work_and_pace,
)
from service.control.kernels.queue import extent, find_aged, settle, weigh
from service.control.kernels.room import (
    admit_in_order,
    earliest_room,
    fitting,
    is_full,
    start_oldest,
    take_out,
)
from service.control.kernels.samples import draw_words, samples
from service.control.kernels.tiers import distinct_levels, free_sequences
from service.control.kernels.tokens import book_tokens, iteration_pace, note_pace

if TYPE_CHECKING:
    from service.control.kernels.compiled import Kernel

KERNELS: Final[tuple[Kernel[..., Any], ...]] = (
    hold,
    left_tokens,
    with_others,
    draw_words,
    samples,
    descend,
    scarce,
    reach_of_prices,
    price_tokens,
    book_tokens,
    note_pace,
    iteration_pace,
    admit_by_best_margin,
    admit_in_order,
    take_out,
    start_oldest,
    is_full,
    earliest_room,
    fitting,
    distinct_levels,
    free_sequences,
    free_beside,
    prompt_steps,
    startable_workers,
    sum_over,
    weigh_waits,
    work_and_pace,
    settle,
    extent,
    find_aged,
    weigh,
    last_within,
    note_arrivals,
    record_columns,
    nth_most_work,
)


def compile_all() -> None:
    """Compile every kernel now: no decision waits for it. Takes seconds the first time."""
    for each in KERNELS:
        each.compile()
