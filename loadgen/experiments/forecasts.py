"""What length predictors do to time to first token, on recorded requests.

How well they predict is measured by `bidgate-load bench lengths`; here they decide who goes first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import SECOND_TABLE, UTILISATION
from loadgen.experiments.comparisons import Comparison, ratio_chart
from loadgen.experiments.document import Claim, Document, Verdict
from loadgen.experiments.experiment import Experiment, Plan, evidence
from loadgen.experiments.fleets import a100_fleet
from loadgen.experiments.judge import number, percent
from loadgen.experiments.lines import Results, cases_of, line
from loadgen.experiments.loads import Load
from loadgen.experiments.recorded import REQUESTS_MAX, find_recordings
from loadgen.experiments.rules import Lengths, RuleBook
from loadgen.workload import Prediction
from service.control.config import ControlConfig, PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.experiment import Scale
    from loadgen.experiments.rules import Rule

NAME = "forecasts"
LOADS, LOADS_FULL = (1.0,), (0.8, 0.95, 1.06)
BATCH_LIMIT = 32
TTFT_BOUND_S = 2.0
UNLEARNT = "no forecast"
POOLED = "one distribution"
SHIPPED = "by prompt length, shrunk (shipped)"
EXACT = "exact lengths"
SLACK = 0.01
WORTH = 0.02
"""A shorter wait than this share of it is none."""
MEAN = "ttft_mean_s"


def plan(scale: Scale) -> Plan:
    """The shipped policy with every predictor on what recordings are there."""
    book = RuleBook(ControlConfig(max_wait_s=600.0, queue_max=100_000))
    forward = book.forward()
    told: tuple[tuple[Rule, Prediction], ...] = (
        (book.plain(PolicyName.LEAST_OUTSTANDING), Prediction.NONE),
        (replace(forward, label=UNLEARNT, lengths=Lengths.UNLEARNT), Prediction.NONE),
        (replace(forward, label=POOLED, lengths=Lengths.POOLED), Prediction.NONE),
        (replace(forward, label=SHIPPED), Prediction.NONE),
        (replace(forward, label=EXACT), Prediction.EXACT),
    )
    found, skipped = find_recordings(scale.data)
    comparisons = []
    for title, trace in found.items():
        for asked in LOADS_FULL if scale.full else LOADS:
            load = Load(
                trace=trace,
                arrivals="recorded",
                load=asked,
                requests=min(scale.requests, REQUESTS_MAX),
            )
            case = Case(
                load=load,
                workers=a100_fleet(4, BATCH_LIMIT),
                rule=forward,
                ttft_bound_s=TTFT_BOUND_S,
            )
            lines = tuple(
                line(
                    replace(case, rule=rule, load=replace(load, prediction=prediction)),
                    scale.fewer_seeds,
                )
                for rule, prediction in told
            )
            comparisons.append(Comparison(f"{title}, load {asked:g}", lines))
    report = partial(_report, scale, tuple(comparisons), skipped)
    missing = "" if comparisons else "; ".join(skipped)
    return Plan(cases_of(comparisons), report, missing)


def forecast_claim(item: Comparison, results: Results) -> Claim:
    """Judge whether the shipped predictor waits less than none, and no longer than one pool."""
    waits_s = {one.label: one.mean(MEAN, results) for one in item.lines}
    less = waits_s[SHIPPED] < (1 - SLACK) * waits_s[UNLEARNT]
    pooled = waits_s[SHIPPED] <= (1 + SLACK) * waits_s[POOLED]
    found = Verdict.CONFIRMED if less and pooled else Verdict.NOT_REPRODUCED
    if less != pooled:
        found = Verdict.CONDITIONS
    one = item.lines[0]
    prompts = one.mean("mean_prompt_tokens", results) / one.mean("mean_decode_tokens", results)
    means = ", ".join(f"{name} {number(wait_s)}" for name, wait_s in waits_s.items())
    p99 = ", ".join(
        f"{one.label} {number(one.mean('ttft_p99_s', results))}" for one in item.lines[1:]
    )
    return Claim(
        source=f"ours, forecasts, {item.title}",
        statement="The shipped predictor waits less than the policy without forecasts, and no "
        "longer than with one distribution for all.",
        verdict=found,
        evidence=f"mean TTFT in s: {means}; p99: {p99}. Prompts are {prompts:.1f} times as long as "
        f"answers; {_exact_helps(waits_s)}.",
        chart=NAME,
    )


def _exact_helps(waits_s: dict[str, float]) -> str:
    """Say what could be gained at all, and how much of it the shipped predictor gains."""
    gap = waits_s[UNLEARNT] - waits_s[EXACT]
    if gap <= WORTH * waits_s[UNLEARNT]:
        return "here not even exact lengths of answers shorten the wait"
    return (
        f"of what exact lengths take off the wait ({number(gap)} s) the shipped predictor takes "
        f"{percent((waits_s[UNLEARNT] - waits_s[SHIPPED]) / gap)}"
    )


def _report(
    scale: Scale, comparisons: Sequence[Comparison], skipped: tuple[str, ...], results: Results
) -> Document:
    claims = tuple(forecast_claim(item, results) for item in comparisons)
    chart = ratio_chart(NAME, "Every predictor over least outstanding", comparisons, results)
    return Document(
        title="What length predictors do to TTFT",
        asked="On recorded requests without hints, what is it worth to predict lengths, and how "
        "much would exact lengths add?",
        answers=evidence(claims),
        setting={
            "fleet": f"4 workers, Llama-3-8B on A100, B = {BATCH_LIMIT}, prompts computed by the "
            "workers",
            "arrivals": "recorded times, stretched evenly until the sample offers the load; every "
            "seed sees another part of the trace",
            "requests": f"{min(scale.requests, REQUESTS_MAX)}, without hint, group or system "
            "prompt; every predictor begins with nothing learnt",
            UNLEARNT: "every request is expected to take decode_tokens_default, for ever; order is "
            "then that of prompts, by what their KV memory costs, and of arrival",
            POOLED: "all requests share one learnt distribution: the same order, but what runs is "
            "known better the longer it runs",
            "order": "the reward counts an answer's iterations, not a prompt's: where prompts are "
            "many times as long as answers, the work is in the prefill",
            SHIPPED: "pools by octave of the prompt's length, shrunk towards the whole",
            "loss of the same predictors": "docs/results/length-prediction.md",
        },
        seeds=scale.fewer_seeds,
        tables=tuple(item.table((*SECOND_TABLE, UTILISATION), results) for item in comparisons),
        charts=(chart,),
        claims=claims,
        skipped=skipped,
    )


EXPERIMENT = Experiment(
    name=NAME, summary="what length predictors do to TTFT on recorded requests", plan=plan
)
