"""The two loads by which the router is judged, with every baseline and the hindsight bound."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import KV_UTILISATION, PERIOD_TABLE, UTILISATION
from loadgen.experiments.comparisons import Comparison, compare_rules, ratio_chart
from loadgen.experiments.document import Claim, Document, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import PER_PERIOD, PERIOD_S, period_control, unit_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.lines import Results, cases_of, pick
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import (
    FORWARD,
    HINDSIGHT,
    PUBLISHED,
    SHORTEST_FIRST,
    ZERO_PRICES,
    RuleBook,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "yardsticks"
BATCH_LIMIT = 32
AMPLE_KV, TIGHT_KV = 40_000, 5_400
BATCH_BOUND, KV_BOUND = "bound by slots, load 1.06", "bound by KV memory, load 0.97"


def plan(scale: Scale) -> Plan:
    """Put every rule under both loads."""
    book = RuleBook(period_control())
    rules = [*book.heuristics(), book.true_jsq(), *book.strong(), book.hindsight()]
    settings = (
        (BATCH_BOUND, AMPLE_KV, Load(load=1.06, requests=scale.requests)),
        (KV_BOUND, TIGHT_KV, Load(kv_load=0.97, requests=scale.requests)),
    )
    comparisons = tuple(
        compare_rules(
            title,
            Case(
                load=load,
                workers=unit_fleet(4, BATCH_LIMIT, kv_tokens),
                rule=rules[0],
                ttft_bound_s=49 * PERIOD_S,
            ),
            rules,
            scale,
        )
        for title, kv_tokens, load in settings
    )
    return Plan(cases_of(comparisons), partial(_report, scale, comparisons))


def _report(scale: Scale, comparisons: Sequence[Comparison], results: Results) -> Document:
    return Document(
        title="The yardsticks: two loads, every baseline, the hindsight bound",
        asked="Where does the gain come from: late binding, ordering, the future-KV check, or "
        "prices? And how much is left to gain?",
        answers=tuple(sentence for item in comparisons for sentence in _sentences(item, results)),
        setting={
            "fleet": f"4 workers, B = {BATCH_LIMIT}, M = {AMPLE_KV:,} (slots bind) or "
            f"{TIGHT_KV:,} tokens (KV binds), decode only",
            "load": "LMSYS-like lengths, Poisson, exact prediction; arrival times stretched until "
            "the sample offers the load exactly; the KV load is token-iterations over capacity",
            "requests": f"{scale.requests}, from empty to empty",
            "hindsight bound": "a linear program that knows all arrivals (workers pooled, starts "
            "in buckets of 10 periods, both relaxations); a bound on the means and on the share "
            "within 49 periods, not a policy",
        },
        seeds=scale.seeds,
        tables=tuple(
            item.table((*PERIOD_TABLE, UTILISATION, KV_UTILISATION), results)
            for item in comparisons
        ),
        charts=(ratio_chart(NAME, "Every policy over round robin", comparisons, results),),
        claims=tuple(ablation_claim(item, results) for item in comparisons),
    )


def ablation_claim(item: Comparison, results: Results) -> Claim:
    """Judge whether the paper's prices earn their place: the policy with and without them."""
    priced, zero = (_mean(item, label, results) for label in (PUBLISHED, ZERO_PRICES))
    gain = 1 - priced / zero
    found = Verdict.NOT_REPRODUCED
    if gain > 0.01:
        found = Verdict.CONFIRMED if gain > 0.05 else Verdict.CONDITIONS
    return Claim(
        source=f"Prices matter ({item.title})",
        statement="Learned shadow prices improve on the same rule with all prices zero.",
        verdict=found,
        evidence=f"mean TTFT {number(priced)} periods with prices, {number(zero)} with zero "
        f"prices.",
        chart=NAME,
    )


def _sentences(item: Comparison, results: Results) -> list[str]:
    names = ("round_robin", "least_outstanding", "central_fcfs", SHORTEST_FIRST)
    told = ", ".join(
        f"{label} {number(_mean(item, label, results))}"
        for label in (*names, ZERO_PRICES, PUBLISHED, FORWARD)
    )
    bound = _mean(item, HINDSIGHT, results)
    ours = _mean(item, FORWARD, results)
    least, mine = pick(item.lines, "least_outstanding"), pick(item.lines, FORWARD)
    tail = mine.mean("ttft_p99_s", results) / least.mean("ttft_p99_s", results)
    return [
        f"{item.title}: mean TTFT in periods: {told}; no policy can have less than "
        f"{number(bound)}.",
        f"{item.title}: ours over least outstanding: mean TTFT x"
        f"{ours / _mean(item, 'least_outstanding', results):.2f}, p99 x{tail:.2f}, preemptions "
        f"{number(mine.mean('preemptions', results))} against "
        f"{number(least.mean('preemptions', results))}.",
    ]


def _mean(item: Comparison, label: str, results: Results) -> float:
    return pick(item.lines, label).mean("ttft_mean_s", results) * PER_PERIOD


EXPERIMENT = Experiment(
    name=NAME, summary="slot-bound and KV-bound load, every baseline, hindsight bound", plan=plan
)
