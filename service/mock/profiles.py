"""Decode iteration times and KV capacities of known (model, GPU) pairs; pure figures.

The constants are least-squares fits of published A100-80GB measurements; a test states their
error. The machine that uses them is decode_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """How long one decode iteration takes: an affine function of what is in the batch.

    Attributes:
        name: unique; what the command line calls it.
        base_ms: c0, of an iteration whatever it holds.
        per_request_ms: c1, per sequence in the batch.
        per_kv_token_ms: c2, per KV token read by the batch.
        prefill_ms_per_token: per prompt token computed in the iteration.
        kv_capacity_tokens: M, what fits into the GPU beside the weights.
        batched_tokens_limit: most tokens computed in one iteration (the engine's
            --max-num-batched-tokens); longer prompts are prefilled in chunks. None for no limit.
    """

    name: str
    base_ms: float
    per_request_ms: float
    per_kv_token_ms: float
    prefill_ms_per_token: float
    kv_capacity_tokens: int
    batched_tokens_limit: int | None = 8192

    def __post_init__(self) -> None:
        """Refuse times and limits no worker can have."""
        costs = (self.per_request_ms, self.per_kv_token_ms, self.prefill_ms_per_token)
        if not self.base_ms > 0 or not all(cost >= 0 for cost in costs):
            raise ValueError(f"profile {self.name}: base_ms must be positive, the costs >= 0")
        if self.kv_capacity_tokens < 1:
            raise ValueError(f"profile {self.name}: kv_capacity_tokens must be positive")
        if self.batched_tokens_limit is not None and self.batched_tokens_limit < 1:
            raise ValueError(f"profile {self.name}: batched_tokens_limit must be positive or None")

    def iteration_s(self, batch: int, kv_tokens: int, prefill_tokens: int) -> float:
        """Duration of one iteration in seconds.

        Args:
            batch: sequences that take part.
            kv_tokens: KV tokens they hold together.
            prefill_tokens: prompt tokens computed in it.
        """
        return 1e-3 * (
            self.base_ms
            + self.per_request_ms * batch
            + self.per_kv_token_ms * kv_tokens
            + self.prefill_ms_per_token * prefill_tokens
        )


LLAMA_3_8B_A100: Final = DecodeProfile(
    name="llama-3-8b-a100",
    base_ms=11.5,
    per_request_ms=0.060,
    per_kv_token_ms=9.0e-5,
    prefill_ms_per_token=0.07,
    kv_capacity_tokens=445_000,
)
LLAMA_2_7B_A100: Final = DecodeProfile(
    name="llama-2-7b-a100",
    base_ms=9.9,
    per_request_ms=0.050,
    per_kv_token_ms=3.15e-4,
    prefill_ms_per_token=0.07,
    kv_capacity_tokens=117_000,
)
# One iteration is one period of the paper: 10 ms, whatever is in the batch.
UNIT: Final = DecodeProfile(
    name="unit",
    base_ms=10.0,
    per_request_ms=0.0,
    per_kv_token_ms=0.0,
    prefill_ms_per_token=0.0,
    kv_capacity_tokens=445_000,
    batched_tokens_limit=None,
)

PROFILES: Final[Mapping[str, DecodeProfile]] = MappingProxyType(
    {profile.name: profile for profile in (LLAMA_3_8B_A100, LLAMA_2_7B_A100, UNIT)}
)
