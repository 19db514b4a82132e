"""3 controller, delay: the waits that a start causes on each of the workers where it could be made.

A worker computes the prompts that are sent to it one after the other, and decodes for nobody
meanwhile. So starting request n on worker g takes, in iterations of everybody's latency,

  delay[n, g] = v_g (s_n (beta + gamma + (alpha + beta) a_g) + ahead_g (beta + gamma))

v_g iterations that the worker takes for a prompt token, as first tokens show (token_pace.py); s
prompt tokens; a sequences on the worker; ahead prompt tokens that were sent there and are not
computed. It is what sway.py counts where nothing is cached, and what published.py cannot see: the
paper counts a prefill as one iteration.

Only the differences between a request's workers count, and only between those that prices leave
equally good: what a prompt costs at best stands in its reward already. Within a tick every start
adds to a_g and ahead_g for the next: the toll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from service.control.config import Kernel
from service.control.pricing import normalizer

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray, IntArray
    from service.control.config import ControlConfig
    from service.control.view import View


@dataclass(frozen=True, slots=True, eq=False)
class Delay:
    """What some waiting requests lose on some workers; normalised as rewards are.

    Attributes:
        cost: (n, w) more than on the worker where it is least; 0 where a pair is not allowed.
        toll: (n, w) what a start on that worker adds for the next one.
    """

    cost: FloatArray
    toll: FloatArray

    @staticmethod
    def of(view: View, config: ControlConfig, rows: IntArray, workers: IntArray) -> Delay | None:
        """Look at some waiting rows on w workers; None where all workers are alike to them."""
        fleet, waiting, weights = view.fleet, view.waiting, config.weights
        prompt_s = fleet.prompt_s[workers]
        if view.kernel is Kernel.DECODE_ONLY or workers.size == 1 or not np.count_nonzero(prompt_s):
            return None
        value = waiting.value[rows]
        if waiting.shared:
            value = value * waiting.discount[rows]
        pace = prompt_s / (float(fleet.step_s.mean()) * normalizer(config))
        per_token = value[:, None] * pace
        own = weights.e2e + weights.ttft
        others = weights.e2e + weights.throughput
        prompt = waiting.prompt_tokens[rows, None]
        cost = own + others * fleet.outstanding[workers]
        whole = per_token * (prompt * cost + own * fleet.ahead_tokens[workers])
        allowed = waiting.allowed(workers, rows)
        return Delay(_beyond_least(whole, allowed), per_token * prompt * (own + others))


def _beyond_least(cost: FloatArray, allowed: BoolArray) -> FloatArray:
    """(n, w) by how much each pair costs more than the cheapest allowed one of its row."""
    least = cost.min(axis=1, keepdims=True, where=allowed, initial=np.inf)
    return np.where(allowed, cost - least, 0.0)
