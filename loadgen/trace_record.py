"""One request of a load trace: the record that traces, replay, simulator and reports share.

Times are seconds since the start of the trace, lengths are tokens. Read traces.py next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request to send, checked when built.

    Attributes:
        arrival_s: when it is sent, seconds since the trace began; >= 0.
        prompt_tokens: length of the prompt, >= 1.
        decode_tokens: true length of the answer, >= 1.
        decode_tokens_hint: the forecast that goes with the request, or None for no forecast.
        tenant: who pays; "" for the anonymous tenant.
        group: label under which a length predictor may pool requests.
        value: multiplies the request's reward; > 0; 1 is ordinary traffic.
        ttft_bound_s: the request's own bound on time to first token, or None.
        hash_ids: ids of the prompt's KV blocks, equal ids meaning an equal prefix; () if unknown.
    """

    arrival_s: float
    prompt_tokens: int
    decode_tokens: int
    decode_tokens_hint: int | None = None
    tenant: str = ""
    group: str = ""
    value: float = 1.0
    ttft_bound_s: float | None = None
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no request can have."""
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"arrival_s must be finite and not negative, got {self.arrival_s}")
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if self.decode_tokens < 1:
            raise ValueError(f"decode_tokens must be at least 1, got {self.decode_tokens}")
        if self.decode_tokens_hint is not None and self.decode_tokens_hint < 1:
            raise ValueError(f"decode_tokens_hint must be >= 1, got {self.decode_tokens_hint}")
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"value must be positive and finite, got {self.value}")
        if self.ttft_bound_s is not None and not self.ttft_bound_s > 0:
            raise ValueError(f"ttft_bound_s must be positive, got {self.ttft_bound_s}")
