"""The shipped policy's prices: slots, KV memory or nothing is scarce, and the prices say which."""

from __future__ import annotations

import pytest

from loadgen.experiments import price_diagnostics
from loadgen.experiments.cases import Case, Probe, run_case
from loadgen.experiments.fleets import period_control, unit_fleet
from loadgen.experiments.lines import Line
from loadgen.experiments.price_diagnostics import EXPECTED, diagnosis, request_prices
from loadgen.experiments.rules import RuleBook

REQUESTS = 150


@pytest.mark.parametrize("situation", list(EXPECTED))
def test_the_scarce_resource_has_the_price(situation: str) -> None:
    case = Case(
        load=price_diagnostics.loads(REQUESTS)[situation],
        workers=unit_fleet(
            price_diagnostics.WORKERS, price_diagnostics.BATCH_LIMIT, price_diagnostics.KV_TOKENS
        ),
        rule=RuleBook(period_control()).forward(),
        probe=Probe.PRICES,
    )
    slots, kv = request_prices(Line(situation, (case,)), {case: run_case(case)})
    assert diagnosis(slots[0], kv[0]) == EXPECTED[situation], (slots, kv)
