"""The published method in plain loops, written from the paper, line by line. The tests' oracle.

Nothing here is fast and nothing comes from `service`: a column is a dict from slot to use, and
every sum over slots, columns and workers is a loop. [OLP] is "Online Linear Programming for
Multi-Objective Routing in LLM Serving".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Use = tuple[float, float]
"""(batch slots, KV tokens) on one slot; also a price, or a capacity, of the two."""
Column = dict[int, Use]
"""Slot -> use, on one worker; slots that are not there are not used."""
Tensor = dict[tuple[int, int], Use]
"""(worker, slot) -> prices, residual capacities or scarcities."""
Recorded = tuple[float, int, Column]
"""(r*, worker, a*) of Hist."""
FREE: Use = (0.0, 0.0)


@dataclass(frozen=True)
class NaiveRequest:
    """What Algorithm 1 knows of a request: t_j, s_j, o^_j; and two extensions of ours."""

    name: str
    arrival: int
    prompt: int
    length: int
    sequences: int = 1
    value: float = 1.0


@dataclass(frozen=True)
class NaiveWeights:
    """The six weights of [OLP] 3.1 and the bounds t1', t2' in periods."""

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    sigma: float = 0.0
    zeta1: float = 0.0
    zeta2: float = 0.0
    t1: float = 30.0
    t2: float = 10.0


def kv_use(mixed: bool, prompt: int, length: int, theta: int) -> int:
    """m_j(theta): eq. (1), or the kernel of appendix A when prefill is mixed in."""
    if mixed:
        if theta == 0:
            return prompt
        return prompt + theta if 1 <= theta <= length else 0
    return prompt + theta + 1 if 0 <= theta < length else 0


def is_active(mixed: bool, length: int, theta: int) -> bool:
    """a_j(theta): o^ service steps, 1 + o^ when prefill is mixed in (appendix A)."""
    return 0 <= theta <= length if mixed else 0 <= theta < length


def column(mixed: bool, request: NaiveRequest, start: int) -> Column:
    """a_(j,g,k) of [OLP] 3.1 for a start in slot `start`."""
    uses: Column = {}
    theta = 0
    while is_active(mixed, request.length, theta):
        tokens = kv_use(mixed, request.prompt, request.length, theta)
        uses[start + theta] = (float(request.sequences), float(request.sequences * tokens))
        theta += 1
    return uses


def clipped(uses: Column, slots: range) -> Column:
    """The part of a column inside a look-ahead."""
    return {slot: use for slot, use in uses.items() if slot in slots}


def bucketed(uses: Column, bucket_slots: int) -> Column:
    """A column over buckets of slots: its largest use inside each (spec 7.1)."""
    buckets: Column = {}
    for slot, (batch, kv) in uses.items():
        old_batch, old_kv = buckets.get(slot // bucket_slots, FREE)
        buckets[slot // bucket_slots] = (max(batch, old_batch), max(kv, old_kv))
    return buckets


def cost(uses: Column, worker: int, prices: Mapping[tuple[int, int], Use]) -> float:
    """a^T p, eq. (10), summed slot by slot."""
    total = 0.0
    for slot, (batch, kv) in uses.items():
        price_batch, price_kv = prices.get((worker, slot), FREE)
        total += price_batch * batch + price_kv * kv
    return total


def reward(weights: NaiveWeights, left: int, length: int, waited: int) -> float:
    """The overall positive reward of [OLP] 3.1, with left = T-k+1 and waited = k-t_j."""
    total = weights.alpha * min(length, left)
    saved = left - length  # T - (k + o^ - 1)
    if saved > 0:
        total += weights.beta * saved
    total += weights.gamma * left
    total += weights.sigma
    if waited + length < weights.t1:
        total += weights.zeta1
    if waited < weights.t2:
        total += weights.zeta2
    return total


def scarcity(residual: Tensor, n_remain: float, mem_scale: float) -> Tensor:
    """d_k, eq. (11)."""
    return {
        where: (
            max(batch, 0.0) / max(1.0, n_remain),
            max(kv, 0.0) * mem_scale / max(1.0, n_remain),
        )
        for where, (batch, kv) in residual.items()
    }


def objective(d: Tensor, history: Iterable[Recorded], prices: Tensor) -> float:
    """f_k(p), eq. (6)."""
    linear = 0.0
    for where, (batch, kv) in d.items():
        price_batch, price_kv = prices.get(where, FREE)
        linear += batch * price_batch + kv * price_kv
    hinges = [max(r - cost(a, worker, prices), 0.0) for r, worker, a in history]
    return linear + sum(hinges) / max(1, len(hinges))


def subgradient(d: Tensor, batch: list[Recorded], prices: Tensor) -> Tensor:
    """g^ of eq. (8); lines 11-17 of Algorithm 2."""
    gradient = dict(d)
    for r, worker, a in batch:
        if r - cost(a, worker, prices) > 0:
            for slot, (use_batch, use_kv) in a.items():
                if (worker, slot) in gradient:
                    old_batch, old_kv = gradient[worker, slot]
                    gradient[worker, slot] = (
                        old_batch - use_batch / len(batch),
                        old_kv - use_kv / len(batch),
                    )
    return gradient


@dataclass(frozen=True)
class Resolved:
    """What Algorithm 2 went through: its last prices, and the mean of all its iterates."""

    last: Tensor
    mean: Tensor


def resolve_dual_prices(
    d: Tensor, history: list[Recorded], warm: Tensor, steps: int, step_size: float
) -> Resolved:
    """Algorithm 2 with a mini-batch as large as the history, so that nothing is random."""
    if not history:
        return Resolved({}, {})
    prices = {where: warm.get(where, FREE) for where in d}
    total = dict.fromkeys(d, FREE)
    for _ in range(steps):
        gradient = subgradient(d, history, prices)
        prices = {
            where: (
                max(batch - step_size * gradient[where][0], 0.0),
                max(kv - step_size * gradient[where][1], 0.0),
            )
            for where, (batch, kv) in prices.items()
        }
        total = {
            where: (batch + prices[where][0], kv + prices[where][1])
            for where, (batch, kv) in total.items()
        }
    return Resolved(prices, {at: (x / steps, y / steps) for at, (x, y) in total.items()})


def fits(uses: Column, worker: int, residual: Mapping[tuple[int, int], Use]) -> bool:
    """Algorithm 1, line 13: a_i <= b_i on every slot that the column touches."""
    return all(
        batch <= residual[worker, slot][0] and kv <= residual[worker, slot][1]
        for slot, (batch, kv) in uses.items()
    )


def subtract(uses: Column, worker: int, residual: Tensor) -> None:
    """Algorithm 1, line 14."""
    for slot, (batch, kv) in uses.items():
        old_batch, old_kv = residual[worker, slot]
        residual[worker, slot] = (old_batch - batch, old_kv - kv)


def admit_greedily(
    margins: dict[tuple[int, int], float],
    columns: list[Column],
    order: list[int],
    residual: Tensor,
) -> list[tuple[int, int]]:
    """Algorithm 1, lines 10-16, and constraint (5); ties go to the earlier, then the lower worker.

    Args:
        margins: (row, worker) -> Delta_j(g).
        columns: a_(j,g,k) of each row; the same on every worker.
        order: rank of each row by arrival.
        residual: updated in place.
    """
    candidates = [pair for pair, margin in margins.items() if margin > 0]
    candidates.sort(key=lambda pair: (-margins[pair], order[pair[0]], pair[1]))
    admitted: list[tuple[int, int]] = []
    assigned: set[int] = set()
    for row, worker in candidates:
        if row not in assigned and fits(columns[row], worker, residual):
            subtract(columns[row], worker, residual)
            assigned.add(row)
            admitted.append((row, worker))
    return admitted


@dataclass
class NaiveAlgorithm1:
    """The router of appendix B.1 as a calendar of slots.

    Periods count from 0, so the paper's T-k+1 is `slots - k` with a fixed horizon and `slots` with
    a rolling one (spec 7.1: T = k + H - 1). With a fixed horizon every vector lives on all T slots,
    the past ones included, as in the paper; a rolling look-ahead forgets slots that have passed.

    Attributes:
        forecast: (k, slots left, requests waiting) -> n^_remain(k).
        b: residual capacity b^(k) of every (worker, slot) touched so far.
    """

    mixed: bool
    weights: NaiveWeights
    slots: int
    fixed: bool
    batch_limits: list[int]
    kv_limits: list[int]
    steps: int
    step_size: float
    normalizer: float
    history_max: int
    forecast: Callable[[int, int, int], float]
    b: Tensor = field(default_factory=dict)
    history: list[Recorded] = field(default_factory=list)
    prices: Tensor = field(default_factory=dict)

    def left(self, k: int) -> int:
        """T - k + 1."""
        return self.slots - k if self.fixed else self.slots

    def residual(self, slots: range) -> Tensor:
        """What is left of b on some slots of every worker."""
        capacity = list(zip(self.batch_limits, self.kv_limits, strict=True))
        return {
            (g, slot): self.b.get((g, slot), (float(capacity[g][0]), float(capacity[g][1])))
            for g in range(len(capacity))
            for slot in slots
        }

    def period(
        self,
        k: int,
        waiting: list[NaiveRequest],
        running: list[tuple[NaiveRequest, int, int]],
    ) -> list[tuple[str, int]]:
        """One pass of the loop of Algorithm 1.

        Args:
            k: the period.
            waiting: J_k(wait), in order of arrival.
            running: started requests, their workers and the steps they are known to have done;
                with exact forecasts what they hold is what b has lost already.
        """
        future = range(k, k + self.left(k))
        self._see(k, running)
        priced = range(self.slots) if self.fixed else future
        workers = range(len(self.batch_limits))
        mem_scale = 1.0 / max(self.kv_limits)
        n_remain = self.forecast(k, len(future), len(waiting))
        d = scarcity(self.residual(priced), n_remain, mem_scale)
        self.prices = resolve_dual_prices(
            d,
            [(r, g, clipped(a, priced)) for r, g, a in self.history],
            self.prices,
            self.steps,
            self.step_size,
        ).last
        columns = [column(self.mixed, request, k) for request in waiting]
        seen = [clipped(uses, future) for uses in columns]
        scaled = [{s: (batch, kv * mem_scale) for s, (batch, kv) in c.items()} for c in columns]
        rewards = [self._reward(request, k) for request in waiting]
        margins = {
            (row, g): rewards[row] - cost(clipped(scaled[row], future), g, self.prices)
            for row in range(len(waiting))
            for g in workers
        }
        if margins:
            row, g = min(margins, key=lambda pair: (-margins[pair], *pair))
            self.history.append((rewards[row], g, scaled[row]))
            self.history = self.history[-self.history_max :]
        residual = self.residual(future)
        pairs = admit_greedily(margins, seen, list(range(len(waiting))), residual)
        for row, g in pairs:
            self._book(columns[row], g)
        return [(waiting[row].name, g) for row, g in pairs]

    def _reward(self, request: NaiveRequest, k: int) -> float:
        """r^norm of [OLP] B.2."""
        r = reward(self.weights, self.left(k), request.length, k - request.arrival)
        return min(request.value * r / self.normalizer, 1.0)

    def _see(self, k: int, running: list[tuple[NaiveRequest, int, int]]) -> None:
        """Work b out anew from period k on; what is past stays as it was."""
        self.b = {(g, slot): use for (g, slot), use in self.b.items() if slot < k}
        for request, worker, steps_done in running:
            uses = column(self.mixed, request, k - steps_done)
            self._book({slot: use for slot, use in uses.items() if slot >= k}, worker)

    def _book(self, uses: Column, worker: int) -> None:
        last = self.slots if self.fixed else max(uses, default=-1) + 1
        touched = clipped(uses, range(last))
        whole = self.residual(range(min(touched, default=0), max(touched, default=-1) + 1))
        subtract(touched, worker, whole)
        self.b.update({at: use for at, use in whole.items() if at[0] == worker})
