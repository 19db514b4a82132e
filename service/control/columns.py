"""3 controller, LP columns: what a request takes from a worker's future, and what that costs.

A column is a footprint over decode iterations counted from the left edge of the look-ahead. Both KV
kernels of [OLP] have the same shape, footprint + theta + 1 over a number of steps, so one set of
kernels serves the ledger, the candidates and the recorded history. Nothing here loops over slots.
Read spans.py for what columns cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.control.config import Kernel

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Horizon:
    """The look-ahead: N buckets of q iterations each.

    Attributes:
        buckets: N >= 1.
        bucket_iterations: q >= 1; q = 1 is the paper's slot.
        right_edges: (N,) last iteration of each bucket, exclusive.
    """

    buckets: int
    bucket_iterations: int
    right_edges: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse an empty look-ahead."""
        if self.buckets < 1 or self.bucket_iterations < 1:
            raise ValueError("a horizon needs at least one bucket of at least one iteration")
        edges = np.arange(1, self.buckets + 1, dtype=np.float64) * self.bucket_iterations
        edges.flags.writeable = False
        object.__setattr__(self, "right_edges", edges)

    @property
    def iterations(self) -> int:
        """H, the whole look-ahead in iterations."""
        return self.buckets * self.bucket_iterations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """n columns as a struct of arrays, all of shape (n,).

    Attributes:
        worker: worker index g, or any value where the caller prices against every worker.
        start: first active iteration relative to the look-ahead's left edge; may be negative.
        steps: active iterations; the column is active on [start, start + steps).
        footprint: KV tokens before the first step; use at step theta is footprint + theta + 1.
        sequences: parallel sequences; multiplies batch and KV use.
    """

    worker: IntArray
    start: FloatArray
    steps: FloatArray
    footprint: FloatArray
    sequences: FloatArray

    def __post_init__(self) -> None:
        """Check that all arrays have one length."""
        begun, lasting = self.start.shape, self.steps.shape
        held, several = self.footprint.shape, self.sequences.shape
        if not self.worker.shape == begun == lasting == held == several:
            raise ValueError("the arrays of Columns must have one shape")

    def take(self, rows: IntArray | BoolArray) -> Columns:
        """The columns of some rows."""
        return Columns(
            worker=self.worker[rows],
            start=self.start[rows],
            steps=self.steps[rows],
            footprint=self.footprint[rows],
            sequences=self.sequences[rows],
        )

    def on_worker(self, worker: IntArray) -> Columns:
        """The same footprints on other workers."""
        return Columns(
            worker=worker,
            start=self.start,
            steps=self.steps,
            footprint=self.footprint,
            sequences=self.sequences,
        )


def service_steps(kernel: Kernel, decode_tokens: FloatArray) -> FloatArray:
    """Active iterations of a request: o^ when decode-only, 1 + o^ when prefill is mixed in.

    Source: [OLP] section 2 and appendix A.
    """
    return decode_tokens + 1.0 if kernel is Kernel.MIXED else decode_tokens


def kv_footprint(kernel: Kernel, prompt_tokens: FloatArray) -> FloatArray:
    """KV tokens before the first step, such that use at step theta is footprint + theta + 1.

    Source: [OLP] eq. (1), m(theta) = s + theta + 1, and appendix A, m(0) = s, m(theta) = s + theta,
    which is the same line with footprint s - 1.
    """
    return prompt_tokens - 1.0 if kernel is Kernel.MIXED else prompt_tokens


def in_whole_blocks(columns: Columns, block_tokens: FloatArray, horizon: Horizon) -> Columns:
    """Count KV as the engine allocates it, in whole blocks.

    Inside a bucket a column's use is largest at the right edge. Where q is a multiple of the block
    size, use at every edge is the same number of tokens short of a whole block, so the footprint
    grows by just that, and a column ends at an edge. Otherwise it grows by one block less a token,
    which is always enough.

    Args:
        columns: n columns.
        block_tokens: (n,) KV block size of the worker each is (or may be) on, or (1,) for all.
        horizon: of the buckets.
    """
    q = float(horizon.bucket_iterations)
    if block_tokens.size > 1 and block_tokens.min() == block_tokens.max():
        block_tokens = block_tokens[:1]
    if block_tokens.size == 1:
        return _in_equal_blocks(columns, float(block_tokens[0]), q)
    aligned = (np.remainder(q, block_tokens) == 0) & (block_tokens > 1)
    spare = block_tokens - 1.0
    steps = columns.steps
    if aligned.any():
        tokens_at_edge = columns.footprint - columns.start
        blocks = np.ceil(tokens_at_edge / block_tokens)
        spare = np.where(aligned, blocks * block_tokens - tokens_at_edge, spare)
        ends_at_edge = np.ceil((columns.start + steps) / q) * q
        steps = np.where(aligned, ends_at_edge - columns.start, steps)
    return Columns(
        worker=columns.worker,
        start=columns.start,
        steps=steps,
        footprint=columns.footprint + spare,
        sequences=columns.sequences,
    )


def _in_equal_blocks(columns: Columns, block_tokens: float, q: float) -> Columns:
    """`in_whole_blocks` where all blocks have one size."""
    if block_tokens <= 1 or q % block_tokens:
        steps, footprint = columns.steps, columns.footprint + (block_tokens - 1.0)
    else:
        tokens_at_edge = columns.footprint - columns.start
        spare = np.ceil(tokens_at_edge / block_tokens) * block_tokens - tokens_at_edge
        steps = np.ceil((columns.start + columns.steps) / q) * q - columns.start
        footprint = columns.footprint + spare
    return Columns(
        worker=columns.worker,
        start=columns.start,
        steps=steps,
        footprint=footprint,
        sequences=columns.sequences,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Two resources over workers and buckets; also the shape of capacities and of prices.

    Attributes:
        batch: (g, N) batch slots, or their price.
        kv: (g, N) KV tokens, or their price.
    """

    batch: FloatArray
    kv: FloatArray

    @staticmethod
    def zeros(workers: int, horizon: Horizon) -> Usage:
        """Nothing used, or everything free of charge."""
        shape = (workers, horizon.buckets)
        return Usage(batch=np.zeros(shape), kv=np.zeros(shape))

    def copy(self) -> Usage:
        """The same in arrays of its own."""
        return Usage(batch=self.batch.copy(), kv=self.kv.copy())


def sum_per_slot(index: IntArray, amount: FloatArray, size: int) -> FloatArray:
    """(size,) sum of amounts by index; float also when there are none (bincount's would be int)."""
    return np.bincount(index, weights=amount, minlength=size).astype(np.float64, copy=False)
