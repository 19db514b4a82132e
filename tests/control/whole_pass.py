"""The admission of assign.py without pruning: everybody's margins and order, no bounds."""

from __future__ import annotations

import numpy as np

from service.control.assign import Asking, Offer
from service.control.columns import Columns, Horizon
from service.control.kernels.admission import ALIKE
from service.control.residual import Residual
from service.control.spans import PrefixPrices, Spans


def use_of(columns: Columns, row: int, horizon: Horizon) -> tuple[np.ndarray, np.ndarray]:
    """(N,) batch slots and KV tokens of one column, bucket by bucket."""
    batch, kv = np.zeros(horizon.buckets), np.zeros(horizon.buckets)
    start, several = float(columns.start[row]), float(columns.sequences[row])
    end = min(start + float(columns.steps[row]), float(horizon.iterations))
    for bucket in range(horizon.buckets):
        left = bucket * horizon.bucket_iterations
        if left < end:
            last_step = min(left + horizon.bucket_iterations, end)
            batch[bucket] = several
            kv[bucket] = several * (float(columns.footprint[row]) - start + last_step)
    return batch, kv


def fits(use: tuple[np.ndarray, np.ndarray], free: tuple[np.ndarray, np.ndarray], g: int) -> bool:
    """Whether a column's use is within (w, N) what is free on a worker, wherever it has any."""
    held = use[0] > 0
    return bool((use[0] <= free[0][g])[held].all() and (use[1] <= free[1][g])[held].all())


def plain_margins(asking: Asking, offer: Offer, horizon: Horizon) -> np.ndarray:
    """(n, w) rewards less costs; -inf where a request may not go; about equal ones made equal."""
    sums = PrefixPrices.stacked(offer.prices[offer.workers], horizon)
    cost = sums.cost_on_every_worker(Spans.of(asking.columns, horizon))
    margin = np.where(
        offer.reach[asking.kind][:, offer.workers], asking.rewards[:, None] - cost, -np.inf
    )
    for row in margin:
        best = row.max()
        row[row >= best - ALIKE * abs(best)] = best
    return np.asarray(margin)


def delayed(
    asking: Asking, offer: Offer, plain: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(n, w) margins less delays, or plus what caches are worth; without caches; and tolls."""
    delay, toll = np.zeros_like(plain), np.zeros_like(plain)
    if offer.waits is not None:
        for row in range(len(plain)):
            pace, held_up, before = offer.waits.lines
            per_token, prompt = offer.waits.value[row] * pace, asking.prompt[row]
            whole = per_token * (prompt * held_up + before)
            allowed = offer.reach[asking.kind[row], offer.workers]
            delay[row, allowed] = whole[allowed] - min(whole[allowed], default=0.0)
            toll[row] = per_token * prompt * offer.waits.toll
    without = plain - delay
    if not offer.extra.size:
        return without.copy(), without, toll
    known = offer.toll.any(axis=1, keepdims=True) | (offer.waits is None)
    margin = np.where(known, plain + offer.extra, without)
    return margin, without, np.where(known, offer.toll, toll)


def liked_best(margins: dict[int, float], liking: np.ndarray, free: np.ndarray) -> int:
    """The worker of the largest margin, then of the largest liking x free, then the first."""
    return min(margins, key=lambda g: (-margins[g], -liking[g] * free[g], g))


def whole_pass(
    asking: Asking, offer: Offer, residual: Residual, horizon: Horizon
) -> list[tuple[int, int, int]]:
    """`admit_priced`, from the margins of everybody; what starts is taken out of the residual."""
    margin, plain, toll = delayed(asking, offer, plain_margins(asking, offer, horizon))
    free, before = (residual.batch, residual.kv), (residual.batch.copy(), residual.kv.copy())
    unswayed_free = residual.batch[:, 0].copy()
    open_pairs: dict[int, list[int]] = {}
    for row in np.flatnonzero(asking.asks).tolist():
        use = use_of(asking.columns, row, horizon)
        wanted = np.flatnonzero(margin[row] > asking.floor).tolist()
        able = [g for g in wanted if fits(use, before, g)]
        if able:
            open_pairs[row] = able
    started: list[tuple[int, int, int]] = []
    best = {row: max(margin[row, g] for g in able) for row, able in open_pairs.items()}
    for row in sorted(best, key=lambda row: (-best[row], asking.order[row])):
        use = use_of(asking.columns, row, horizon)
        able = {g: margin[row, g] for g in open_pairs[row] if fits(use, free, g)}
        if len(started) >= asking.most or not able:
            continue
        worker = liked_best(able, offer.liking, free[0][:, 0])
        known = np.isfinite(plain[row])
        known &= (unswayed_free >= 1) | (np.arange(known.size) == worker)
        others = {g: plain[row, g] for g in np.flatnonzero(known).tolist()}
        other = liked_best(others, offer.liking, unswayed_free)
        unswayed_free[other] -= 1
        free[0][worker] -= use[0]
        free[1][worker] -= use[1]
        started.append((row, worker, other))
        margin[:, worker] -= toll[:, worker]
    return started
