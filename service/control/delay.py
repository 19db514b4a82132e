"""3 controller, delay: the waits that a start causes on each of the workers where it could be made.

A worker computes the prompts that are sent to it one after the other, and decodes for nobody
meanwhile. So starting request n on worker g takes, in iterations of everybody's latency,

  delay[n, g] = v_g (s_n (beta + gamma + (alpha + beta) a_g) + ahead_g (beta + gamma))

v_g iterations that the worker takes for a prompt token, as first tokens show (token_pace.py), never
fewer than workers do on average; s prompt tokens; a sequences on the worker; ahead prompt tokens
that were sent there and have to be computed yet. Of a request that a worker has cached something of
sway.py counts the same, less what the cache saves. published.py cannot see it: the paper counts a
prefill as one iteration.

Only the differences between a request's workers count, and only between those that prices leave
equally good: what a prompt costs at best stands in its reward already. Within a tick every start
adds to a_g and ahead_g for the next: the toll.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from service.control.config import Kernel
from service.control.kernels.fleet import weigh_waits
from service.control.pricing import normalizer

if TYPE_CHECKING:
    from service.control.columns import BoolArray, FloatArray, IntArray
    from service.control.config import ControlConfig, Weights
    from service.control.view import View


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """What a request of value 1 loses on w workers, normalised as rewards are.

    Its delay on one of them is per_token (s held_up + before), s its prompt tokens.

    Attributes:
        lines: (3, w) per_token, held_up and before, one above the other.
        value: (n,) of every waiting request; multiplies the delay.
        toll: what a start adds for the next one is per_token s toll.
    """

    lines: FloatArray
    value: FloatArray
    toll: float

    @staticmethod
    def of(view: View, config: ControlConfig, workers: IntArray) -> Waits | None:
        """Look at w workers; None where all of them are alike to everybody."""
        if view.kernel is Kernel.DECODE_ONLY or workers.size == 1:
            return None
        fleet, waiting = view.fleet, view.waiting
        own, others = iteration_weights(config.weights)
        lines = np.empty((3, workers.size))
        # Little is learned of a worker before its first tokens come: without the others' pace it
        # would look fast, and take everything for as long as none comes.
        known = weigh_waits(
            fleet.prompt_s,
            fleet.step_s,
            _ahead_tokens(view),
            fleet.outstanding,
            workers,
            own,
            others,
            normalizer(config),
            lines,
        )
        if not known:
            return None
        value = waiting.value * waiting.discount if waiting.shared else waiting.value
        return Waits(lines, value, own + others)


def iteration_weights(weights: Weights) -> tuple[float, float]:
    """What an iteration more counts until a first token, and for each request that decodes."""
    return weights.e2e + weights.ttft, weights.e2e + weights.throughput


def held_up_and_before(
    view: View, config: ControlConfig, workers: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Weigh what waits for a prompt on w workers, and what it waits for there.

    Returns:
        (w,) what the time of one of its tokens counts: for itself and for all that decode there.
        (w,) prompt tokens to compute before it, times what waiting for one counts.
    """
    own, others = iteration_weights(config.weights)
    ahead = _ahead_tokens(view)[workers]
    return own + others * view.fleet.outstanding[workers], own * ahead


def _ahead_tokens(view: View) -> FloatArray:
    """(g,) prompt tokens to compute first; what caches are believed to hold takes no time."""
    ahead = view.fleet.ahead_tokens
    return ahead if view.cached is None else np.maximum(ahead - view.cached.spared, 0.0)


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
        waits = Waits.of(view, config, workers)
        if waits is None:
            return None
        pace, held_up, before = waits.lines
        per_token = waits.value[rows, None] * pace
        prompt = view.waiting.prompt_tokens[rows, None]
        whole = per_token * (prompt * held_up + before)
        allowed = view.waiting.allowed(workers, rows)
        return Delay(_beyond_least(whole, allowed), per_token * prompt * waits.toll)


def _beyond_least(cost: FloatArray, allowed: BoolArray) -> FloatArray:
    """(n, w) by how much each pair costs more than the cheapest allowed one of its row."""
    least = cost.min(axis=1, keepdims=True, where=allowed, initial=np.inf)
    return np.where(allowed, cost - least, 0.0)
