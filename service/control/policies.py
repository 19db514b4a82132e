"""3 controller, the decision rules by name."""

from __future__ import annotations

from typing import assert_never

from service.control.baselines import (
    CentralFcfs,
    CentralShortestFirst,
    LeastOutstanding,
    PowerOfTwo,
    Random,
    RoundRobin,
)
from service.control.config import ControlConfig, PolicyName, Variant
from service.control.forward import ForwardLp
from service.control.published import PublishedLp
from service.control.view import Policy


def make_policy(config: ControlConfig) -> Policy:
    """Build the configured rule."""
    match config.policy:
        case PolicyName.ONLINE_LP:
            published = config.prices.variant is Variant.PUBLISHED
            return PublishedLp(config) if published else ForwardLp(config)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
        case PolicyName.LEAST_OUTSTANDING:
            return LeastOutstanding()
        case PolicyName.RANDOM:
            return Random(config.seed)
        case PolicyName.POWER_OF_TWO:
            return PowerOfTwo(config.seed)
        case PolicyName.CENTRAL_FCFS:
            return CentralFcfs()
        case PolicyName.CENTRAL_SHORTEST_FIRST:
            return CentralShortestFirst(config.age_bound_s)
        case _:
            assert_never(config.policy)
