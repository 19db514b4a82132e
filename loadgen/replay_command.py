"""`bidgate-load replay`: flags of a replay against any OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter
from rich.console import Console

from loadgen.arrivals import load_to_rate, parse_arrivals
from loadgen.live import command_line, progress_bar, run, run_with_progress
from loadgen.outcomes import OUTCOMES_FILE, End, OutcomeRecord, write_outcomes
from loadgen.prompts import VOCABULARY_TOKENS, PromptForm
from loadgen.replay import Replay, ReplaySettings
from loadgen.report import tell, write_report
from loadgen.summary import RunContext
from loadgen.traces import Trace, open_trace
from loadgen.workload import Prediction, WorkloadSpec, build_workload, mean_decode_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.summary import JsonValue
    from loadgen.trace_record import TraceRequest

DEFAULT_OUT = Path("out/replay")
INTERRUPTED = 130


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Flags of the requests.

    Attributes:
        trace: lmsys-like, fixed:PROMPTxDECODE, a file, or FORMAT:FILE with csv, azure, burstgpt,
            jsonl, mooncake, timed_trace, lmsys or sharegpt.
        arrivals: poisson, gamma:CV, piecewise:0=0.8,15=1.2, diurnal:AMPLITUDE,PERIOD_S, recorded.
        rate: requests per second; with recorded arrivals their times are stretched to it.
        load: instead of rate: offered decode work over the batch capacity that workers,
            batch_limit and iteration_s describe.
        workers: for load: equal workers.
        batch_limit: for load: requests in one worker's batch.
        iteration_s: for load: seconds of one decode iteration at full batch.
        requests: most requests to send.
        duration_s: send none later than this.
        prediction: whether a forecast of the answer's length goes with each request.
        noise_width: w of a noisy forecast, uniform in 1 - w to 1 + w times the length.
        decode_tokens_max: cut longer answers to this.
        seed: of lengths, arrivals and noise.
    """

    trace: str = "lmsys-like"
    arrivals: str = "poisson"
    rate: float | None = None
    load: float | None = None
    workers: int = 4
    batch_limit: int = 16
    iteration_s: float = 0.0128
    requests: int | None = None
    duration_s: float | None = None
    prediction: Prediction = Prediction.NOISY
    noise_width: float = 0.2
    decode_tokens_max: int | None = None
    seed: int = 0

    def spec(self) -> WorkloadSpec:
        """Turn flags into a workload; what does not fit together is a ValueError."""
        trace = open_trace(self.trace)
        requests, duration_s = self.requests, self.duration_s
        if trace.endless and requests is None and duration_s is None:
            raise ValueError(f"the trace {trace.name} never ends: say --requests or --duration-s")
        return WorkloadSpec(
            trace=trace,
            arrivals=parse_arrivals(self.arrivals),
            rate_per_s=self._rate_per_s(trace),
            requests=requests,
            duration_s=duration_s,
            prediction=self.prediction,
            noise_width=self.noise_width,
            decode_tokens_max=self.decode_tokens_max,
            seed=self.seed,
        )

    def _rate_per_s(self, trace: Trace) -> float | None:
        if self.rate is not None and self.load is not None:
            raise ValueError("say --rate or --load, not both")
        if self.load is None:
            if self.rate is None and self.arrivals != "recorded":
                raise ValueError("say --rate or --load (or --arrivals recorded)")
            return self.rate
        decode_tokens = mean_decode_tokens(
            trace, self.seed, decode_tokens_max=self.decode_tokens_max
        )
        return load_to_rate(
            self.load, decode_tokens, self.workers, self.batch_limit, self.iteration_s
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """Flags of the sender.

    Attributes:
        url: base URL of the server, without /v1.
        label: name of this run in the results, as a policy's name.
        model: model to ask for; the first one the server lists when left out.
        prompt_form: token-ids (exact) or text (one short word per token).
        max_tokens_cap: max_tokens of every request; the length then travels only in
            mock_decode_tokens, which mock workers obey. Left out, max_tokens is the length itself.
        drain_s: how long answers are waited for after the last arrival.
        ttft_bound_s: bound on time to first token that is reported on.
        api_key: bearer token for the server.
        vocabulary_tokens: size of the model's vocabulary, where it is below 21,000.
    """

    url: str = "http://127.0.0.1:8001"
    label: str = "router"
    model: str = ""
    prompt_form: PromptForm = PromptForm.TOKEN_IDS
    max_tokens_cap: int | None = None
    drain_s: float = 60.0
    ttft_bound_s: float = 1.0
    api_key: str | None = None
    vocabulary_tokens: int = VOCABULARY_TOKENS

    def settings(self) -> ReplaySettings:
        """Turn flags into the sender's settings.

        Raises:
            ValueError: the address is no URL.
        """
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url must begin with http:// or https://, got {self.url!r}")
        return ReplaySettings(
            url=self.url.rstrip("/").removesuffix("/v1"),
            model=self.model,
            policy=self.label,
            prompt_form=self.prompt_form,
            max_tokens_cap=self.max_tokens_cap,
            drain_s=self.drain_s,
            api_key=self.api_key,
            vocabulary_tokens=self.vocabulary_tokens,
        )


def replay(
    *,
    out: Path = DEFAULT_OUT,
    workload: WorkloadOptions | None = None,
    send: SendOptions | None = None,
) -> int:
    """Send a trace open loop to a running server, and report how it answered.

    Parameters
    ----------
    out
        Directory for summary.json, outcomes.jsonl, comparison.png and report.html.
    """
    workload, send = workload or WorkloadOptions(), send or SendOptions()
    requests = build_workload(workload.spec())
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    sender = Replay(requests, send.settings())
    interrupted = False
    with progress_bar(console) as progress:
        try:
            run(run_with_progress(sender, len(requests), send.label, progress))
        except KeyboardInterrupt:
            interrupted = True
    summary = _report(sender.records, sender.sent, (workload, send, requests), out)
    tell(summary, f"{len(requests)} requests to {send.url}", out, console)
    if interrupted:
        return INTERRUPTED
    return exit_status(sender.records, sender.sent)


def exit_status(records: Sequence[OutcomeRecord], sent: int) -> int:
    """1 when a request is not accounted for, or not one was answered; else 0."""
    answered = any(record.outcome is End.COMPLETED for record in records)
    return 0 if answered and sent == len(records) else 1


def _report(
    records: Sequence[OutcomeRecord],
    sent: int,
    asked: tuple[WorkloadOptions, SendOptions, Sequence[TraceRequest]],
    out: Path,
) -> dict[str, JsonValue]:
    workload, send, requests = asked
    write_outcomes(records, out / OUTCOMES_FILE)
    last_s = requests[-1].arrival_s
    setting: dict[str, JsonValue] = {
        "title": "bidgate-load replay",
        "asked": f"How does {send.url} answer {len(requests)} requests sent at their own times?",
        "trace": workload.trace,
        "arrivals": workload.arrivals,
        "requests": len(requests),
        "requests_per_s": len(requests) / last_s if last_s > 0 else None,
        "mean_prompt_tokens": sum(r.prompt_tokens for r in requests) / len(requests),
        "mean_decode_tokens": sum(r.decode_tokens for r in requests) / len(requests),
        "prediction_of_decode_length": workload.prediction.value,
        "seed": workload.seed,
    }
    context = RunContext(
        command=command_line(),
        ttft_bound_s=send.ttft_bound_s,
        sent={send.label: sent},
        setting=setting,
    )
    return write_report(records, context, out)
