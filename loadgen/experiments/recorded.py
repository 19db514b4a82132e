"""Recorded arrivals with their own burstiness: Azure 2023, Mooncake and BurstGPT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from loadgen.experiments.cases import Case
from loadgen.experiments.columns import SECOND_TABLE, UTILISATION
from loadgen.experiments.comparisons import compare_rules, ratio_chart
from loadgen.experiments.document import Document
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import a100_fleet
from loadgen.experiments.judge import number
from loadgen.experiments.lines import Results, cases_of
from loadgen.experiments.loads import Load
from loadgen.experiments.rules import RuleBook
from loadgen.workload import Prediction
from service.control.config import ControlConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadgen.experiments.comparisons import Comparison

NAME = "recorded"
REQUESTS_MAX = 1000
LOADS, LOADS_FULL = (0.9,), (0.7, 0.9, 1.1)
BATCH_LIMIT = 32
TTFT_BOUND_S = 2.0


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded trace and the file names under which people have it."""

    title: str
    files: tuple[str, ...]

    def path(self, folder: Path | None) -> Path | None:
        """Where it lies; None when it does not."""
        if folder is None:
            return None
        return next((folder / name for name in self.files if (folder / name).is_file()), None)


RECORDINGS = (
    Recording(
        "Azure 2023, conversation", ("azure2023_conv.csv.gz", "AzureLLMInferenceTrace_conv.csv")
    ),
    Recording("Azure 2023, code", ("azure2023_code.csv.gz", "AzureLLMInferenceTrace_code.csv")),
    Recording(
        "Mooncake, conversation", ("mooncake_conversation.csv.gz", "conversation_trace.jsonl")
    ),
    Recording("BurstGPT", ("BurstGPT_1.csv", "BurstGPT_without_fails_1.csv")),
)


def find_recordings(
    folder: Path | None, wanted: Sequence[Recording] = RECORDINGS
) -> tuple[dict[str, str], tuple[str, ...]]:
    """({title: path} of the recordings that are there, a sentence for each that is not)."""
    paths = {recording: recording.path(folder) for recording in wanted}
    return (
        {recording.title: str(path) for recording, path in paths.items() if path is not None},
        tuple(
            f"{recording.title}: --data DIR has no {' or '.join(recording.files)}"
            for recording, path in paths.items()
            if path is None
        ),
    )


def plan(scale: Scale) -> Plan:
    """Replay what recordings are there; what is not is told."""
    book = RuleBook(ControlConfig(max_wait_s=600.0, queue_max=100_000))
    rules = [*book.heuristics(), *book.strong()]
    found, skipped = find_recordings(scale.data)
    comparisons = []
    for title, trace in found.items():
        for load in LOADS_FULL if scale.full else LOADS:
            case = Case(
                load=Load(
                    trace=trace,
                    arrivals="recorded",
                    load=load,
                    requests=min(scale.fewer, REQUESTS_MAX),
                    prediction=Prediction.NOISY,
                ),
                workers=a100_fleet(4, BATCH_LIMIT),
                rule=rules[0],
                ttft_bound_s=TTFT_BOUND_S,
            )
            comparisons.append(compare_rules(f"{title}, load {load:g}", case, rules, scale))
    report = partial(_report, scale, tuple(comparisons), skipped)
    return Plan(cases_of(comparisons), report, "" if comparisons else "; ".join(skipped))


def _report(
    scale: Scale, comparisons: Sequence[Comparison], skipped: tuple[str, ...], results: Results
) -> Document:
    charts = (
        (
            ratio_chart(
                NAME, "Recorded arrivals: every policy over round robin", comparisons, results
            ),
        )
        if comparisons
        else ()
    )
    return Document(
        title="Recorded arrivals",
        asked="Do the gains survive real burstiness and real length mixes?",
        answers=tuple(item.answer(results) for item in comparisons),
        setting={
            "fleet": f"4 workers, Llama-3-8B on A100 (445,000 KV tokens), B = {BATCH_LIMIT}, "
            "prompts computed by the workers",
            "arrivals": "recorded times, stretched evenly until the sample offers the load; every "
            "seed sees another part of the trace",
            "burstiness (standard deviation of the gaps over their mean; 1 is Poisson)": "; ".join(
                f"{item.title}: {number(item.lines[0].mean('gap_variation', results))}"
                for item in comparisons
            ),
            "prediction": "uniform in 0.8 to 1.2 times the length",
            "requests": str(min(scale.fewer, REQUESTS_MAX)),
            "prefix cache": "none in the model, so Mooncake's shared prefixes are computed again",
            "bound": f"{TTFT_BOUND_S:g} s to the first token",
        },
        seeds=scale.seeds,
        tables=tuple(item.table((*SECOND_TABLE, UTILISATION), results) for item in comparisons),
        charts=charts,
        skipped=skipped,
    )


EXPERIMENT = Experiment(name=NAME, summary="Azure and Mooncake arrivals as recorded", plan=plan)
