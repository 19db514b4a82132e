"""Settings of one mock worker, in vLLM's terms where vLLM has one. Plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from service.mock.profiles import LLAMA_3_8B_A100

if TYPE_CHECKING:
    from service.mock.profiles import DecodeProfile

CONTEXT_TOKENS_DEFAULT: Final = 32_768
ENGINES_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MockWorkerConfig:
    """One mock worker.

    Attributes:
        model: name served.
        profile: durations of decode iterations.
        batch_limit: most sequences in the batch (--max-num-seqs).
        kv_capacity_tokens: tokens the KV cache holds; None for the profile's.
        block_tokens: KV block size (--block-size).
        context_tokens: prompt and output of one sequence (--max-model-len); None for the smaller
            of CONTEXT_TOKENS_DEFAULT and the KV cache.
        queue_max: sequences that may wait in the worker's own queue (--max-num-queued-reqs).
        prefill: whether prompts are computed here (else they come from a prefill worker).
        time_scale: how many times faster than real time it runs.
        seed: of output lengths that no request fixes.
        decode_tokens_mean: mean of those lengths (LMSYS-Chat-1M: 214.5 tokens an answer).
        decode_tokens_sigma: spread of their logarithm.
        kv_transfer: has a connector that passes prompts on (--kv-transfer-config); else
            kv_transfer_params are ignored.
        kv_lease_s: how long it keeps a prompt that nobody fetches, whatever time_scale is.
        prefix_caching: keeps the blocks of prompts for later ones that begin alike, and tells
            cached_tokens (--enable-prefix-caching --enable-prompt-tokens-details).
        request_id_headers: answer with x-request-id (--enable-request-id-headers).
        data_parallel_size: engines behind the server, each with the sizes above.
        data_parallel_start_rank: label of the first of them, above 0 on the later servers of a
            hybrid deployment.
    """

    model: str = "mock"
    profile: DecodeProfile = LLAMA_3_8B_A100
    batch_limit: int = 256
    kv_capacity_tokens: int | None = None
    block_tokens: int = 16
    context_tokens: int | None = None
    queue_max: int = 10_000
    prefill: bool = True
    time_scale: float = 1.0
    seed: int = 0
    decode_tokens_mean: float = 214.5
    decode_tokens_sigma: float = 1.0
    kv_transfer: bool = False
    kv_lease_s: float = 30.0
    prefix_caching: bool = False
    request_id_headers: bool = False
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0

    def __post_init__(self) -> None:
        """Refuse what vLLM would refuse at its start, and speeds that make no sense."""
        if min(self.batch_limit, self.block_tokens, self.queue_max) < 1:
            raise ValueError("batch_limit, block_tokens and queue_max must be at least 1")
        if not 1 <= self.data_parallel_size <= ENGINES_MAX or self.data_parallel_start_rank < 0:
            raise ValueError(
                f"data_parallel_size must be in 1..{ENGINES_MAX} and the start rank at least 0"
            )
        if not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise ValueError(f"time_scale must be positive, got {self.time_scale}")
        if not self.kv_lease_s > 0:
            raise ValueError(f"kv_lease_s must be positive, got {self.kv_lease_s}")
        if self.decode_tokens_mean < 1 or self.decode_tokens_sigma < 0:
            raise ValueError("decode_tokens_mean must be >= 1 and decode_tokens_sigma >= 0")
        if not 2 <= self.max_model_len <= self.kv_tokens:
            raise ValueError(
                f"the KV cache holds {self.kv_tokens} tokens: too few for one sequence of "
                f"context_tokens={self.max_model_len}"
            )

    @property
    def kv_tokens(self) -> int:
        """Tokens in whole KV blocks."""
        wanted = self.kv_capacity_tokens
        capacity = self.profile.kv_capacity_tokens if wanted is None else wanted
        return capacity // self.block_tokens * self.block_tokens

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together."""
        if self.context_tokens is not None:
            return self.context_tokens
        return min(CONTEXT_TOKENS_DEFAULT, self.kv_tokens)
