"""`bidgate-load bench vllm`: flags of the comparison of routers on real engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from loadgen.live import command_line, run
from loadgen.outcomes import OUTCOMES_FILE, write_outcomes
from loadgen.prompts import VOCABULARY_TOKENS
from loadgen.side_by_side import CONTENDERS, Run, SideBySideSpec, measure, measure_capacity
from loadgen.side_by_side_report import fill, markdown, side_by_side_summary
from loadgen.summary import SUMMARY_FILE, write_json
from loadgen.traces import open_trace

DEFAULT_OUT = Path("out/bench/vllm")
VLLM_ROUTER = Path(".vllm/router/bin/vllm-router")
TABLE_FILE = "table.md"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySideOptions:
    """Flags of the measurement.

    Attributes:
        workers: base URLs of vLLM servers that run already and have nothing else to do.
        max_num_seqs: theirs.
        contenders: which routers; all when left out.
        trace: where lengths come from, as in replay.
        load: offered output tokens over what the saturated engines make.
        duration_s: how long requests arrive, in each run.
        repetitions: runs of each contender.
        drain_s: how long answers are waited for after the last arrival.
        decode_tokens_max: longer answers are cut to this.
        vocabulary_tokens: size of the model's vocabulary, where it is below 21,000.
        seed: of lengths, arrivals and forecasts.
        vllm_router: the vllm-router command.
    """

    workers: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    max_num_seqs: int = 8
    contenders: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = CONTENDERS
    trace: str = "lmsys-like"
    load: float = 1.3
    duration_s: float = 20.0
    repetitions: int = 2
    drain_s: float = 60.0
    decode_tokens_max: int = 512
    vocabulary_tokens: int = VOCABULARY_TOKENS
    seed: int = 0
    vllm_router: Path = VLLM_ROUTER

    def spec(self, log_dir: Path) -> SideBySideSpec:
        """Turn flags into a measurement; what does not fit together is a ValueError."""
        return SideBySideSpec(
            workers=tuple(url.rstrip("/").removesuffix("/v1") for url in self.workers),
            batch_limit=self.max_num_seqs,
            contenders=self.contenders,
            trace=open_trace(self.trace),
            load=self.load,
            duration_s=self.duration_s,
            repetitions=self.repetitions,
            drain_s=self.drain_s,
            decode_tokens_max=self.decode_tokens_max,
            vocabulary_tokens=self.vocabulary_tokens,
            seed=self.seed,
            vllm_router=self.vllm_router,
            log_dir=log_dir,
        )


def vllm(
    *,
    out: Path = DEFAULT_OUT,
    docs: Path | None = None,
    part: str = "",
    options: SideBySideOptions | None = None,
) -> int:
    """Compare routers on real vLLM engines: same requests, same times, runs interleaved.

    Parameters
    ----------
    out
        Directory for summary.json, outcomes.jsonl, table.md and the routers' logs.
    docs
        Page of which one part is replaced by the table.
    part
        Which one; "load L" when left out.
    """
    options = options or SideBySideOptions()
    spec = options.spec(out / "logs")
    out.mkdir(parents=True, exist_ok=True)
    console = Console()

    async def everything() -> tuple[float, list[Run]]:
        console.print("how much the engines make when they are saturated")
        capacity = await measure_capacity(spec)
        console.print(f"{capacity:,.0f} output tokens/s")
        return capacity, await measure(spec, capacity, console.print)

    capacity, runs = run(everything())
    write_outcomes((record for one in runs for record in one.records), out / OUTCOMES_FILE)
    summary = side_by_side_summary(spec, capacity, runs, command_line())
    write_json(summary, out / SUMMARY_FILE)
    table = markdown(summary)
    (out / TABLE_FILE).write_text(table, encoding="utf-8")
    if docs is not None:
        fill(docs, part or f"load {spec.load:g}", table)
    console.print(table, markup=False, soft_wrap=True)
    return 0 if all(one.sent == len(one.records) for one in runs) else 1
