"""Do shadow prices name the bottleneck?

Slots when short answers come fast, KV memory when contexts are long, nothing at light load.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case, Probe
from loadgen.experiments.columns import KV_UTILISATION, PERIOD_TABLE, UTILISATION
from loadgen.experiments.document import (
    Cell,
    Chart,
    Claim,
    Column,
    Document,
    Panel,
    Row,
    Series,
    Table,
    Verdict,
    rounded,
)
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import PER_PERIOD, period_control, unit_fleet
from loadgen.experiments.lines import Line, Results, TableSpec, line, spread, tabulate
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import FORWARD, PUBLISHED, RuleBook
from service.control.reward import largest_reward

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "prices"
WORKERS, BATCH_LIMIT, KV_TOKENS = 4, 25, 20_000
NEAR_ZERO = 0.01
"""Price of a request below one per cent of the largest reward."""
LIGHT, SHORT, LONG = "light load", "short answers, high rate", "long contexts"


def loads(requests: int) -> dict[str, Load]:
    """The three situations."""
    return {
        LIGHT: Load(load=0.3, requests=requests),
        SHORT: Load(trace="fixed:32x48", load=1.3, requests=2 * requests),
        LONG: Load(trace="fixed:3000x150", kv_load=1.3, requests=requests // 2),
    }


def plan(scale: Scale) -> Plan:
    """Watch the prices of the paper's policy and of ours in every situation."""
    book = RuleBook(period_control())
    found = {}
    for rule in (book.forward(), book.published()):
        for name, load in loads(max(60, scale.requests // 2)).items():
            case = Case(
                load=load,
                workers=unit_fleet(WORKERS, BATCH_LIMIT, KV_TOKENS),
                rule=rule,
                probe=Probe.PRICES,
            )
            label = f"{rule.label}: {name}"
            found[rule.label, name] = line(replace(case), scale.seeds, label)
    cases = [case for item in found.values() for case in item.cases]
    return Plan(tuple(cases), partial(_report, scale, found))


def request_prices(item: Line, results: Results) -> tuple[list[float], list[float]]:
    """(slots, KV): by seed, what a mean request costs at the mean prices of the second half.

    As a share of the largest reward that a request can have.
    """
    control = item.cases[0].rule.control
    most = largest_reward(control.weights, control.horizon_iterations)
    slots, kv = [], []
    for case in item.cases:
        measured = results[case]
        capacity = case.workers[0].machine().kv_capacity_tokens
        batch_price = _late_mean(measured.series["price_of_batch"]) / case.workers[0].batch_limit
        kv_price = _late_mean(measured.series["price_of_kv"]) / capacity
        slots.append(batch_price * measured.values["mean_decode_tokens"] / most)
        kv.append(kv_price * measured.values["mean_kv_iterations"] / most)
    return slots, kv


def diagnosis(slots: float, kv: float) -> str:
    """Name the bottleneck that two prices of a request tell."""
    if slots + kv < NEAR_ZERO:
        return "nothing is scarce"
    return "slots are scarce" if slots > kv else "KV memory is scarce"


EXPECTED = {
    LIGHT: "nothing is scarce",
    SHORT: "slots are scarce",
    LONG: "KV memory is scarce",
}


def _late_mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    late = known[len(known) // 3 : 2 * len(known) // 3] or known
    return sum(late) / len(late)


def _report(scale: Scale, lines: dict[tuple[str, str], Line], results: Results) -> Document:
    claims = [price_claim(name, lines, results) for name in (PUBLISHED, FORWARD)]
    claims[1] = replace(claims[1], source="ours, shadow prices")
    return Document(
        title="What shadow prices say",
        asked="Does the price of slots dominate when short answers come fast, that of KV memory "
        "when contexts are long, and are both near zero at light load?",
        answers=tuple(
            f"{name}: {claim.verdict.value}; {claim.evidence}"
            for name, claim in zip((PUBLISHED, FORWARD), claims, strict=True)
        ),
        setting={
            "fleet": f"{WORKERS} workers, B = {BATCH_LIMIT}, M = {KV_TOKENS:,} tokens, decode only",
            LIGHT: "LMSYS-like lengths at 0.3 of the slots",
            SHORT: "prompts of 32, answers of 48 tokens, 1.3 of the slots",
            LONG: "prompts of 3,000, answers of 150 tokens, 1.3 of the KV memory",
            "price of a request": "mean price x mean use of a request, over the largest reward; "
            "middle third of the run",
            "weights": "shipped",
        },
        seeds=scale.seeds,
        tables=(
            _price_table(lines, results),
            tabulate(
                list(lines.values()),
                TableSpec("The runs", (*PERIOD_TABLE, UTILISATION, KV_UTILISATION)),
                results,
            ),
        ),
        charts=(_chart(lines, results),),
        claims=tuple(claims),
    )


def price_claim(policy: str, lines: dict[tuple[str, str], Line], results: Results) -> Claim:
    """Judge the three situations under one policy."""
    told, right = [], 0
    for name, expected in EXPECTED.items():
        slots, kv = (sum(v) / len(v) for v in request_prices(lines[policy, name], results))
        said = diagnosis(slots, kv)
        right += said == expected
        told.append(f"{name}: slots {100 * slots:.2g} %, KV {100 * kv:.2g} %, so {said}")
    found = Verdict.CONFIRMED if right == len(EXPECTED) else Verdict.CONDITIONS
    return Claim(
        source="Section 1, shadow prices",
        statement="Shadow prices reveal which resource is the bottleneck.",
        verdict=found if 2 * right > len(EXPECTED) else Verdict.NOT_REPRODUCED,
        evidence="; ".join(told) + " (price of a mean request over the largest reward).",
        chart=NAME,
    )


def _price_table(lines: dict[tuple[str, str], Line], results: Results) -> Table:
    rows = []
    for item in lines.values():
        prices = request_prices(item, results)
        cells = tuple(Cell(spread([100 * v for v in values])) for values in prices)
        rows.append(Row(item.label, cells))
    return Table(
        "Price of a mean request, per cent of the largest reward",
        (Column("slots", "slots", "%", better=0), Column("kv", "KV memory", "%", better=0)),
        tuple(rows),
    )


def _chart(lines: dict[tuple[str, str], Line], results: Results) -> Chart:
    panels = []
    for (policy, name), item in lines.items():
        if policy != FORWARD:
            continue
        series = results[item.cases[0]].series
        x = tuple(rounded((t or 0.0) * PER_PERIOD) for t in series["price_time_s"])
        panels.append(
            Panel(
                kind="lines",
                title=f"{policy}: {name} (seed {item.cases[0].load.seed})",
                x_label="period",
                y_label="reward per iteration of a whole worker",
                series=tuple(
                    Series(label, x, tuple(None if v is None else rounded(v) for v in series[key]))
                    for key, label in (
                        ("price_of_batch", "all slots"),
                        ("price_of_kv", "all KV memory"),
                    )
                ),
            )
        )
    return Chart(NAME, "Shadow price of a worker's slots and of its KV memory", tuple(panels))


EXPERIMENT = Experiment(name=NAME, summary="do shadow prices name the bottleneck?", plan=plan)
