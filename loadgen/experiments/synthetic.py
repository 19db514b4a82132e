"""Figures 17 to 24 of the paper: synthetic prompt-to-answer ratios 1:4 and 4:1."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments import panels, paper_figures
from loadgen.experiments.document import Chart, Claim, Document, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.judge import number
from loadgen.experiments.lines import Results, all_cases, pick
from loadgen.experiments.panels import PaperPanel
from loadgen.experiments.rules import PUBLISHED, ROUND_ROBIN
from loadgen.workload import Prediction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.experiments.lines import Line
    from loadgen.experiments.paper_figures import Drawn

NAME = "synthetic"


def figures() -> dict[int, tuple[str, tuple[PaperPanel, ...]]]:
    """Figure number to (focus, panels), as in appendix C.2."""
    found: dict[int, tuple[str, tuple[PaperPanel, ...]]] = {}
    groups = (
        (17, "1:4", Prediction.EXACT),
        (19, "1:4", Prediction.NOISY),
        (21, "4:1", Prediction.EXACT),
        (23, "4:1", Prediction.NOISY),
    )
    for first, ratio, prediction in groups:
        for figure, focus, texts, rates in (
            (first, "average latency", (panels.AVERAGE, panels.AVERAGE_ONLY), (0.4, 0.4)),
            (first + 1, "tail latency", (panels.TAIL, panels.TAIL_ONLY), (0.4, 0.5)),
        ):
            found[figure] = (
                focus,
                tuple(
                    PaperPanel(
                        figure=figure,
                        part=part,
                        rate=rate,
                        weight_text=text,
                        prediction=prediction,
                        trace=f"ratio:{ratio}",
                    )
                    for part, rate, text in zip("ab", rates, texts, strict=True)
                ),
            )
    return found


def plan(scale: Scale) -> Plan:
    """Choose the cases of every panel."""
    drawn = {
        figure: tuple(
            (panel, panel.lines(scale.fewer_seeds, scale.fewer, bound=scale.full))
            for panel in parts
        )
        for figure, (_, parts) in figures().items()
    }
    cases = [case for parts in drawn.values() for _, lines in parts for case in all_cases(lines)]
    return Plan(tuple(cases), partial(_report, scale, drawn))


def _report(scale: Scale, drawn: Mapping[int, Sequence[Drawn]], results: Results) -> Document:
    about = figures()
    claims = [
        panels.figure_claim(figure, about[figure][0], parts, results)
        for figure, parts in drawn.items()
    ]
    ratios = {figure: parts[0][0].trace.removeprefix("ratio:") for figure, parts in drawn.items()}
    return Document(
        title="Synthetic prompt-to-answer ratios: figures 17 to 24",
        asked="Does the comparison hold when answers are four times as long as prompts, and when "
        "prompts are four times as long as answers?",
        answers=tuple(
            f"{claim.source} (P/D {ratios[figure]}, {about[figure][0]}): {claim.verdict.value}."
            for figure, claim in zip(drawn, claims, strict=True)
        ),
        setting=paper_figures.setting(scale, drawn, results)
        | {
            "lengths": "prompt plus answer uniform in 64 to 448 tokens, split 1:4 or 4:1; the "
            "paper gives only the ratio (and calls 1:4 both prefill- and decode-heavy)",
            "offered load, decode work over slots": _loads(drawn, results),
        },
        seeds=scale.fewer_seeds,
        tables=tuple(
            panels.panel_table(panel, lines, results)
            for parts in drawn.values()
            for panel, lines in parts
        ),
        charts=_charts(drawn, results),
        claims=(*claims, decode_light_claim(drawn, results)),
    )


def _charts(drawn: Mapping[int, Sequence[Drawn]], results: Results) -> tuple[Chart, ...]:
    about = figures()
    return tuple(
        panels.figure_chart(
            f"figure-{figure:02}",
            f"Figure {figure}: P/D {parts[0][0].trace.removeprefix('ratio:')}, {about[figure][0]}",
            parts,
            results,
        )
        for figure, parts in drawn.items()
    )


def decode_light_claim(drawn: Mapping[int, Sequence[Drawn]], results: Results) -> Claim:
    """Judge appendix C.2's remark that the router matters less when answers are short."""
    gains = {}
    for figure in (17, 21):
        _, lines = drawn[figure][0]
        ours, base = (_mean(lines, label, results) for label in (PUBLISHED, ROUND_ROBIN))
        gains[figure] = base - ours
    holds = abs(gains[21]) < abs(gains[17])
    return Claim(
        source="Appendix C.2",
        statement="When prompts are long and answers short (P/D 4:1) the router matters less.",
        verdict=Verdict.CONFIRMED if holds else Verdict.NOT_REPRODUCED,
        evidence=f"mean TTFT falls against round robin by {number(gains[17])} periods at 1:4 and "
        f"by {number(gains[21])} at 4:1 (λ = 0.4, figures 17(a) and 21(a)).",
    )


def _mean(lines: Sequence[Line], label: str, results: Results) -> float:
    return pick(lines, label).mean(panels.TTFT_MEAN.key, results) * panels.TTFT_MEAN.factor


def _loads(drawn: Mapping[int, Sequence[Drawn]], results: Results) -> str:
    told = {}
    for parts in drawn.values():
        for panel, lines in parts:
            offered = [results[case].values["offered_load"] for case in lines[0].cases]
            name = f"P/D {panel.trace.removeprefix('ratio:')}, λ = {panel.rate:g}"
            told[name] = f"{sum(offered) / len(offered):.2f}"
    return "; ".join(f"{name}: {load}" for name, load in sorted(told.items()))


EXPERIMENT = Experiment(
    name=NAME, summary="figures 17-24: prompt-to-answer ratios 1:4 and 4:1", plan=plan
)
