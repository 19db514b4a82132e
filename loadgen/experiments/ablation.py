"""The ablation: the full policy, then with one part less after the other, on the same requests.

What prices add is the step from zero prices to the full policy; what order adds is the step from
first come first served to shortest first; what holding requests back adds is the step from least
outstanding to first come first served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import tiers
from loadgen.experiments.cases import Case
from loadgen.experiments.columns import PREEMPTIONS
from loadgen.experiments.document import Chart, Claim, Column, Document, Panel, Series, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import LMSYS_HORIZON, a100_fleet, period_control, unit_fleet
from loadgen.experiments.lines import (
    Line,
    Results,
    TableSpec,
    cases_of,
    lines_under,
    pick,
    ratio,
    tabulate,
)
from loadgen.experiments.loads import Load
from loadgen.experiments.reserve import FIRST_TIER
from loadgen.experiments.rules import (
    FORWARD,
    PUBLISHED,
    SHORTEST_FIRST,
    ZERO_PRICES,
    Rule,
    RuleBook,
)
from service.control.config import ControlConfig, PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.document import Table

NAME = "ablation"
NO_PRICES = tiers.NO_PRICES
FIRST_COME = PolicyName.CENTRAL_FCFS.value
LEAST = PolicyName.LEAST_OUTSTANDING.value
FEW_SLOTS, AMPLE_KV = 8, 10_000
"""Few slots, so that a few hundred requests are many generations of them."""
MANY_SLOTS, TIGHT_KV = 32, 5_400
TIE = 0.02
"""Ratios closer to 1 than this are called equal."""
STEPS = (
    ("our prices", FORWARD, NO_PRICES),
    ("the paper's prices", PUBLISHED, ZERO_PRICES),
    ("everything over shortest first", FORWARD, SHORTEST_FIRST),
    ("order (shortest first over first come)", SHORTEST_FIRST, FIRST_COME),
    ("holding requests back (first come over least outstanding)", FIRST_COME, LEAST),
)
"""What a step is worth: (name, with, without)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One load under every rule.

    Attributes:
        title: the load in words.
        prefix: of the measures: those of the first tier where there are tiers.
        lines: one a rule.
        measures: what each step is judged by: (key, name, -1 when less is better).
    """

    title: str
    prefix: str
    lines: tuple[Line, ...]
    measures: tuple[tuple[str, str, int], ...]

    def line(self, label: str) -> Line:
        """One rule by its label."""
        return pick(self.lines, label)


def plan(scale: Scale) -> Plan:
    """Slots bind, KV memory binds, and two tiers: the same rules under each."""
    period = period_control()
    second = ControlConfig(horizon_iterations=LMSYS_HORIZON, queue_max=100_000)
    slots = Case(
        load=Load(load=1.06, requests=scale.requests),
        workers=unit_fleet(4, FEW_SLOTS, AMPLE_KV),
        rule=RuleBook(period).forward(),
    )
    memory = replace(
        slots,
        load=Load(kv_load=1.05, requests=scale.requests),
        workers=a100_fleet(4, MANY_SLOTS, TIGHT_KV),
    )
    trials = [
        _trial("one class, bound by slots, load 1.06", slots, period, scale),
        _trial("one class, bound by KV memory, A100 times, load 1.05", memory, second, scale),
    ]
    for case, base in tiers.plain_cases(scale):
        first, other = case.load.tiers
        title = f"two tiers, interactive {first.load:.2f} + batch {other.load:.2f}"
        trials.append(_trial(title, case, base, scale))
    return Plan(cases_of(trials), partial(_report, scale, tuple(trials)))


def _trial(title: str, case: Case, base: ControlConfig, scale: Scale) -> Trial:
    book = RuleBook(base)
    rules = (
        book.forward(),
        Rule(label=NO_PRICES, control=replace(base, prices=replace(base.prices, zero=True))),
        book.published(),
        book.zero_prices(),
        book.shortest_first(),
        book.first_come(),
        book.plain(PolicyName.LEAST_OUTSTANDING),
    )
    prefix = f"{FIRST_TIER}." if case.load.tiers else ""
    tokens = f"{tiers.BATCH_TIER}.tokens_per_s" if case.load.tiers else "tokens_per_s"
    return Trial(
        title,
        prefix,
        lines_under(case, rules, scale.seeds),
        (
            (f"{prefix}ttft_mean_s", "mean TTFT", -1),
            (f"{prefix}ttft_p99_s", "p99 TTFT", -1),
            (tokens, "batch tokens" if case.load.tiers else "tokens", 1),
        ),
    )


def worth(trial: Trial, step: tuple[str, str, str], results: Results) -> dict[str, float]:
    """Ratio with over without, seed by seed, of every measure of a trial, by the measure's name."""
    _, with_it, without = step
    found = {}
    for key, name, _ in trial.measures:
        over = ratio(
            trial.line(with_it).values(key, results), trial.line(without).values(key, results)
        )
        if over is not None:
            found[name] = over.mean
    return found


def step_claim(trial: Trial, step: tuple[str, str, str], results: Results) -> Claim:
    """Judge whether a step earns its place: something better, nothing worse."""
    name, with_it, without = step
    found = worth(trial, step, results)
    better = [key for _, key, sign in trial.measures if sign * (found.get(key, 1) - 1) > TIE]
    worse = [key for _, key, sign in trial.measures if sign * (found.get(key, 1) - 1) < -TIE]
    verdict = Verdict.NOT_REPRODUCED
    if better:
        verdict = Verdict.CONDITIONS if worse else Verdict.CONFIRMED
    told = ", ".join(f"{key} x{value:.2f}" for key, value in found.items())
    return Claim(
        source=f"ours, ablation, {trial.title}: {name}",
        statement=f"{name[0].upper()}{name[1:]}: better in something, worse in nothing (beyond "
        f"{100 * TIE:.0f} %).",
        verdict=verdict,
        evidence=f"{with_it} over {without}: {told}.",
        chart=NAME,
    )


def sentence(trials: Sequence[Trial], results: Results) -> str:
    """Write the sentence that the table forces: what prices are worth over order alone."""
    told = []
    for trial in trials:
        parts = []
        for label, step in (("ours", STEPS[0]), ("the paper's", STEPS[1])):
            found = worth(trial, step, results)
            parts.append(
                f"{label} " + ", ".join(f"{name} x{value:.2f}" for name, value in found.items())
            )
        told.append(f"{trial.title}: {'; '.join(parts)}")
    return (
        "What prices are worth over the same policy with every price zero, which is order and "
        f"ageing alone: {'. '.join(told)}."
    )


def _report(scale: Scale, trials: Sequence[Trial], results: Results) -> Document:
    claims = tuple(step_claim(trial, step, results) for trial in trials for step in STEPS[:2])
    return Document(
        title="Ablation: what prices, order and holding back are worth",
        asked="On the same requests, what does each part of the policy add: prices, order, and "
        "holding requests back until a worker can start them?",
        answers=(sentence(trials, results), _where_prices_help(trials, results)),
        setting={
            "one class": f"4 workers, B = {FEW_SLOTS}, M = {AMPLE_KV:,}, unit times (slots) or "
            f"B = {MANY_SLOTS}, M = {TIGHT_KV:,} and Llama-3-8B on A100 (KV); LMSYS-like "
            f"lengths, Poisson, exact prediction, {scale.requests} requests",
            "two tiers": "as in tiers: interactive requests are worth 4 batch ones",
            "zero prices": "the same policy with every price forced to zero; for ours that also "
            "drops the price of slots kept for higher tiers",
            "equal": f"within {100 * TIE:.0f} %",
        },
        seeds=scale.seeds,
        tables=tuple(_table(trial, results) for trial in trials),
        charts=(_chart(trials, results),),
        claims=claims,
    )


def _where_prices_help(trials: Sequence[Trial], results: Results) -> str:
    """Count the settings in which our prices, and the paper's, earn their place."""
    counts = []
    for name, step in (("Our prices", STEPS[0]), ("the paper's prices", STEPS[1])):
        verdicts = [step_claim(trial, step, results).verdict for trial in trials]
        counts.append(
            f"{name} are better in something and worse in nothing in "
            f"{verdicts.count(Verdict.CONFIRMED)} of {len(trials)} settings, trade one measure for "
            f"another in {verdicts.count(Verdict.CONDITIONS)}, and help nowhere in "
            f"{verdicts.count(Verdict.NOT_REPRODUCED)}"
        )
    return "; ".join(counts) + "."


def _table(trial: Trial, results: Results) -> Table:
    who = "interactive " if trial.prefix else ""
    columns = [
        Column(f"{trial.prefix}ttft_{key}_s", f"{who}TTFT {key}", "s", compared=True)
        for key in ("mean", "p95", "p99")
    ]
    columns.append(Column("e2e_mean_s", "E2E mean", "s", compared=True))
    key, name, _ = trial.measures[2]
    columns += [Column(key, f"{name}/s", "rate", compared=True, better=1), PREEMPTIONS]
    return tabulate(trial.lines, TableSpec(trial.title, tuple(columns), NO_PRICES), results)


def _chart(trials: Sequence[Trial], results: Results) -> Chart:
    names = tuple(name for name, _, _ in STEPS)
    panels = []
    for place in (0, 1):
        series = tuple(
            Series(
                trial.title,
                names,
                tuple(
                    round(worth(trial, step, results).get(trial.measures[place][1], 1.0), 4)
                    for step in STEPS
                ),
            )
            for trial in trials
        )
        panels.append(
            Panel(
                kind="bars",
                title=f"{trials[0].measures[place][1]}, with over without",
                x_label="part",
                y_label="ratio (log); below 1 is better",
                series=series,
                log_y=True,
                reference=1.0,
            )
        )
    return Chart(NAME, "What each part is worth", tuple(panels))


EXPERIMENT = Experiment(
    name=NAME, summary="prices, order, holding back: what each is worth", plan=plan
)
