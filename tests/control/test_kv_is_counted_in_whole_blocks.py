"""The engine allocates KV in whole blocks; what a column claims covers that, and not much more."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.control.columns import Columns, Horizon, in_whole_blocks
from service.control.spans import total_usage


def _one(start: int, steps: int, footprint: int) -> Columns:
    return Columns(
        worker=np.zeros(1, dtype=np.int64),
        start=np.array([float(start)]),
        steps=np.array([float(steps)]),
        footprint=np.array([float(footprint)]),
        sequences=np.ones(1),
    )


def _allocated(start: int, steps: int, footprint: int, block: int, horizon: Horizon) -> np.ndarray:
    """(N,) most tokens in whole blocks in each bucket, slot by slot."""
    most = np.zeros(horizon.buckets)
    for slot in range(max(0, start), min(start + steps, horizon.iterations)):
        tokens = footprint + (slot - start) + 1
        bucket = slot // horizon.bucket_iterations
        most[bucket] = max(most[bucket], -(-tokens // block) * block)
    return most


@given(
    start=st.integers(-50, 0),
    extra_steps=st.integers(1, 150),
    footprint=st.integers(0, 100),
    block=st.sampled_from([1, 4, 16, 32]),
    bucket=st.sampled_from([1, 4, 16, 32]),
)
def test_a_column_claims_at_least_the_blocks_the_engine_allocates_and_wastes_less_than_one_bucket(
    start: int, extra_steps: int, footprint: int, block: int, bucket: int
) -> None:
    horizon = Horizon(12, bucket)
    steps = extra_steps - start
    column = in_whole_blocks(_one(start, steps, footprint), np.array([float(block)]), horizon)
    claimed = total_usage(column, horizon, 1).kv[0]
    allocated = _allocated(start, steps, footprint, block, horizon)
    assert (claimed >= allocated).all()
    assert (claimed <= allocated + block + bucket).all()


def test_with_buckets_of_whole_blocks_the_claim_at_an_edge_is_exact() -> None:
    """Prompt 20 in blocks of 16: 48 tokens at the first edge (20 + 16 = 36), 64 at the second."""
    horizon = Horizon(3, 16)
    column = in_whole_blocks(_one(0, 32, 20), np.array([16.0]), horizon)
    assert total_usage(column, horizon, 1).kv[0].tolist() == [48.0, 64.0, 0.0]


def test_one_token_blocks_change_nothing() -> None:
    """The published variant counts tokens."""
    before = _one(-3, 21, 7)
    after = in_whole_blocks(before, np.array([1.0]), Horizon(4, 16))
    assert after.steps == before.steps
    assert after.footprint == before.footprint
