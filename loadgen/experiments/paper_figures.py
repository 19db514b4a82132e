"""Figures 2, 4 to 12 and 14 to 16 of the paper: real-data lengths, two rates, seven weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import panels
from loadgen.experiments.document import Document
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.lines import Results, all_cases
from loadgen.experiments.panels import OVERLOADED, STABLE, PaperPanel
from loadgen.traces import LMSYS_LIKE
from loadgen.workload import Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.experiments.lines import Line

NAME = "real-data"
EXACT, NOISY = Prediction.EXACT, Prediction.NOISY

Drawn = tuple[PaperPanel, tuple["Line", ...]]


def _panels(
    figure: int, rates: tuple[float, float], texts: tuple[str, str], prediction: Prediction
) -> tuple[PaperPanel, ...]:
    return tuple(
        PaperPanel(
            figure=figure,
            part=part,
            rate=rate,
            weight_text=text,
            prediction=prediction,
            trace=LMSYS_LIKE,
        )
        for part, rate, text in zip("ab", rates, texts, strict=True)
    )


def figures() -> dict[int, tuple[str, tuple[PaperPanel, ...]]]:
    """Figure number to (focus, panels), as in section 4 and appendix C.1."""
    average = (panels.AVERAGE, panels.AVERAGE_ONLY)
    tail = (panels.TAIL, panels.TAIL_ONLY)
    throughput = (panels.THROUGHPUT, panels.THROUGHPUT_ONLY)
    second = _panels(2, (STABLE, STABLE), (panels.TAIL, panels.QUERIES_AND_TAIL), EXACT)
    noisy = _panels(2, (STABLE, STABLE), (panels.TAIL, panels.QUERIES_AND_TAIL), NOISY)
    found: dict[int, tuple[str, tuple[PaperPanel, ...]]] = {}
    found[2] = ("TTFT and tail TTFT", (second[0], noisy[1]))
    groups = (
        (4, STABLE, EXACT),
        (7, OVERLOADED, EXACT),
        (10, STABLE, NOISY),
        (14, OVERLOADED, NOISY),
    )
    for first, rate, prediction in groups:
        focused = (("average latency", average), ("tail latency", tail), ("throughput", throughput))
        for step, (focus, texts) in enumerate(focused):
            figure = first + step
            found[figure] = (focus, _panels(figure, (rate, rate), texts, prediction))
    return found


def plan(scale: Scale) -> Plan:
    """Choose the cases of every panel; equal ones are simulated once."""
    drawn = {
        figure: tuple((panel, panel.lines(panel.seeds(scale), scale.fewer)) for panel in parts)
        for figure, (_, parts) in figures().items()
    }
    cases = [case for parts in drawn.values() for _, lines in parts for case in all_cases(lines)]
    return Plan(tuple(cases), partial(_report, scale, drawn))


def _report(scale: Scale, drawn: Mapping[int, Sequence[Drawn]], results: Results) -> Document:
    focus = {figure: name for figure, (name, _) in figures().items()}
    claims = [
        panels.figure_claim(figure, focus[figure], parts, results)
        for figure, parts in drawn.items()
    ]
    return Document(
        title="Real-data comparison: figures 2, 4 to 12, 14 to 16",
        asked="When the weights emphasise a metric, is the paper's router better in it than "
        "Random, Round Robin, Least Outstanding and Power of Two? And than rules that only hold "
        "requests back centrally?",
        answers=tuple(
            f"{claim.source} ({focus[figure]}): {claim.verdict.value}."
            for figure, claim in zip(drawn, claims, strict=True)
        ),
        setting=setting(scale, drawn, results),
        seeds=scale.seeds,
        tables=tuple(
            panels.panel_table(panel, lines, results)
            for parts in drawn.values()
            for panel, lines in parts
        ),
        charts=tuple(
            panels.figure_chart(
                f"figure-{figure:02}", f"Figure {figure}: {focus[figure]}", parts, results
            )
            for figure, parts in drawn.items()
        ),
        claims=tuple(claims),
    )


def setting(scale: Scale, drawn: Mapping[int, Sequence[Drawn]], results: Results) -> dict[str, str]:
    """Say what a reader must know to judge the numbers."""
    loads = {
        panel.rate: results[lines[0].cases[0]].values["offered_load"]
        for parts in drawn.values()
        for panel, lines in parts
    }
    told = "; ".join(f"λ = {rate:g}: {load:.2f}" for rate, load in sorted(loads.items()))
    return {
        "workers": f"{panels.WORKERS}, decode only, one iteration a period of 10 ms",
        "limits of a worker": f"B = {panels.BATCH_LIMIT} slots, M = {panels.KV_TOKENS:,} KV tokens "
        "in blocks of 16; the paper gives neither, these make λ = 0.4 stable and λ = 0.5 a slight "
        "overload, bound by slots",
        "offered load, decode work over slots": told,
        "arrivals": f"Poisson, {scale.fewer} requests from empty to empty; the times of each "
        "sample are stretched until it offers exactly the load that λ means for the mean answer",
        "tail bounds": f"t2' = {panels.TTFT_BOUND_PERIODS} periods (figure 13); "
        f"t1' = {panels.E2E_BOUND_PERIODS} periods (ours, the paper names none)",
        "the paper's policy": "Algorithm 1 with prices refreshed in every period (K = 1, step "
        "size 0.0025, or 0.00025 where alpha is 0.03 or more: the best of price-step), rolling "
        "horizon of 2,048 periods in buckets of 16, rewards normalised so that they do not "
        "saturate",
        "seeds of the noisy figures and of λ = 0.4": ", ".join(map(str, scale.fewer_seeds)),
        "refusals": "a request that waited 4,000 periods is refused and counts with that wait",
    }


EXPERIMENT = Experiment(
    name=NAME, summary="figures 2, 4-12, 14-16: real-data lengths, all weights", plan=plan
)
