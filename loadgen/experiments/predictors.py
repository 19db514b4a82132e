"""Length predictors that know less than the shipped one, to see what knowing more is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from loadgen.experiments.rules import Lengths
from service.control.lengths import Forecast, LengthPredictor

if TYPE_CHECKING:
    from service.control.config import ControlConfig
    from service.control.events import Request


class PooledLengths(LengthPredictor):
    """One distribution for all requests without a hint."""

    def forecast(self, request: Request) -> Forecast:
        """Forecast as if all requests were alike."""
        return super().forecast(_alike(request))

    def observe(self, request: Request, decode_tokens: int) -> None:
        """Learn as if all requests were alike."""
        super().observe(_alike(request), decode_tokens)


class UnlearntLengths(LengthPredictor):
    """What is believed before anything was seen, for ever."""

    def observe(self, request: Request, decode_tokens: int) -> None:
        """Learn nothing."""


def make_predictor(lengths: Lengths, config: ControlConfig) -> LengthPredictor:
    """Build the predictor of a rule."""
    kinds = {
        Lengths.SHIPPED: LengthPredictor,
        Lengths.POOLED: PooledLengths,
        Lengths.UNLEARNT: UnlearntLengths,
    }
    return kinds[lengths](config.decode_tokens_default, config.decode_quantile)


def _alike(request: Request) -> Request:
    return replace(request, prompt_tokens=1, group="", fingerprint="")
