"""Table 2's scenario: the rate jumps, nobody tells the router, and both variants react."""

from __future__ import annotations

import pytest

from loadgen.bench_rate import measure_rate
from loadgen.simulate_command import SimulateOptions, make_plan
from loadgen.simulate_options import FleetOptions, LoadOptions, PolicyOptions, SightOptions
from loadgen.simulator import Hooks, simulate
from service.control.config import Variant
from service.control.router import Router


@pytest.mark.parametrize(
    ("variant", "watched"),
    [(Variant.FORWARD, True), (Variant.PUBLISHED, True), (Variant.FORWARD, False)],
)
def test_a_jump_of_the_rate_is_noticed_and_priced_anew__olp_table_2(
    variant: Variant, *, watched: bool
) -> None:
    plan = make_plan(
        SimulateOptions(
            fleet=FleetOptions(profile="unit", batch_limit=2, decode_only=True),
            load=LoadOptions(
                trace="fixed:20x8",
                arrivals="piecewise:0=0.4,12=0.8",
                load=1.0,
                requests=700,
            ),
            policy=PolicyOptions(
                variant=variant,
                price_refresh_s=0.2,
                horizon_iterations=256,
                rate_significance=0.01 if watched else 0.0,
            ),
            sight=SightOptions(),
        )
    )
    router = Router(plan.config.control)
    noticed_s: list[float] = []

    def look(now_s: float) -> None:
        if router.stats(now_s).rate_rises > len(noticed_s):
            noticed_s.append(now_s)

    result = simulate(plan.requests, plan.config, router, hooks=Hooks(on_tick=look))
    assert result.router is not None
    assert result.router.fallback_ticks == 0
    assert len(noticed_s) == int(watched)
    if watched:
        assert 12.0 < noticed_s[0] < 16.0
    # The measured rate follows: 80 a second after the jump.
    assert result.router.arrivals_per_s == pytest.approx(80.0, rel=0.3)


def test_the_benchmark_counts_alarms_and_delays() -> None:
    case = measure_rate("poisson", 8.0, hours=0.02, seeds=(0,))
    assert case.alarms_per_hour == 0
    assert case.delays_s[3.0][0] is not None
    assert case.delays_s[3.0][0] < 6.0
    assert case.summary()["process"] == "poisson"
