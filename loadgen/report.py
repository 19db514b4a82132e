"""One page a person can read, with its picture inside, made from outcome records.

write_report makes summary.json, comparison.png and report.html; rebuild does so from
outcomes.jsonl.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from loadgen.comparison import (
    comparison_rows,
    comparison_table,
    policy_names,
    seconds_text,
    value_at,
)
from loadgen.figures import draw_comparison
from loadgen.outcomes import OUTCOMES_FILE, read_outcomes
from loadgen.summary import (
    BASE_POLICY,
    SUMMARY_FILE,
    RunContext,
    read_context,
    summarize,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from loadgen.outcomes import OutcomeRecord
    from loadgen.summary import JsonValue

PICTURE_FILE = "comparison.png"
PAGE_FILE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.j2")
LATENESS_WARN_S = 0.05
CPU_WARN_SHARE = 0.85
CPU_KEY = "share_of_processors_used"
UNIT_WORDS = (("_per_s", " per second"), ("_s", ", seconds"))
DEFAULT_ASKED = "How do the policies compare under the same requests, sent at the same times?"
CAVEATS = (
    "One run with one seed. Runs differ; bidgate-load experiments gives spreads.",
    "A mean hides who pays: read p95 and p99 beside it. A policy that lets short requests "
    "overtake lowers the mean and can raise the tail.",
    "Only the sender's clock is used; client, router and workers shared one machine.",
)


def write_report(
    records: Sequence[OutcomeRecord], context: RunContext, out_dir: Path
) -> dict[str, JsonValue]:
    """Write summary, picture and page into out_dir; returns the summary."""
    summary = summarize(records, context)
    write_json(summary, out_dir / SUMMARY_FILE)
    draw_comparison(records, summary, out_dir / PICTURE_FILE)
    picture = base64.b64encode((out_dir / PICTURE_FILE).read_bytes()).decode()
    (out_dir / PAGE_FILE).write_text(render_page(summary, picture), encoding="utf-8")
    return summary


def rebuild(out_dir: Path) -> dict[str, JsonValue]:
    """Make the report again from outcomes.jsonl, with the context of summary.json if it is there.

    Raises:
        ValueError: when there is no outcomes.jsonl or one of the files is malformed.
    """
    outcomes = out_dir / OUTCOMES_FILE
    if not outcomes.is_file():
        raise ValueError(f"{out_dir}: no {OUTCOMES_FILE} here")
    summary = out_dir / SUMMARY_FILE
    context = read_context(summary) if summary.is_file() else RunContext()
    return write_report(list(read_outcomes(outcomes)), context, out_dir)


def tell(summary: Mapping[str, JsonValue], title: str, out_dir: Path, console: Console) -> None:
    """Print the comparison, what to doubt, and where the files are."""
    console.print(comparison_table(summary, title))
    for warning in warnings(summary):
        console.print(f"[yellow]{warning}[/yellow]")
    console.print(f"\nIn {out_dir}: {SUMMARY_FILE} {OUTCOMES_FILE} {PICTURE_FILE} {PAGE_FILE}")


def render_page(summary: Mapping[str, JsonValue], picture_base64: str) -> str:
    """Fill the page's template; everything shown comes from the summary."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    setting = summary.get("setting")
    shown = dict(setting) if isinstance(setting, dict) else {}
    asked = str(shown.pop("asked", DEFAULT_ASKED))
    own_caveats = shown.pop("caveats", [])
    caveats = [str(text) for text in own_caveats] if isinstance(own_caveats, list) else []
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=str(shown.pop("title", "bidgate: policies compared")),
        asked=asked,
        warnings=warnings(summary),
        findings=findings(summary),
        image=picture_base64,
        policies=policy_names(summary),
        rows=comparison_rows(summary),
        bound=f"{value_at(summary.get('ttft_bound_s'), ()) or 0.0:g} s",
        setting=[(_label(name), _text(value)) for name, value in shown.items()],
        command=str(summary.get("command") or "(not recorded)"),
        caveats=[*caveats, *CAVEATS],
    )


def findings(summary: Mapping[str, JsonValue]) -> list[str]:
    """Say in sentences how each policy did against round robin, what is worse included."""
    policies, base_ratios = summary.get("policies"), summary.get("ratio_to_round_robin")
    if not isinstance(policies, dict) or not isinstance(base_ratios, dict):
        return []
    found = []
    for name, policy in policies.items():
        mean_s = value_at(policy, ("ttft_s", "mean"))
        ratio = value_at(base_ratios.get(name), ("ttft_s", "mean"))
        if mean_s is None or ratio is None:
            continue
        sentence = f"{name}: mean time to first token {seconds_text(mean_s)}"
        if name != BASE_POLICY:
            tail = value_at(base_ratios.get(name), ("ttft_s", "p99"))
            rate = value_at(base_ratios.get(name), ("output_tokens_per_s",))
            sentence += f", {ratio:.2f} times round robin's"
            sentence += f"; p99 {tail:.2f} times" if tail is not None else ""
            sentence += f"; output tokens per second {rate:.2f} times" if rate is not None else ""
        found.append(sentence + ".")
    return found


def warnings(summary: Mapping[str, JsonValue]) -> list[str]:
    """Say what should make a reader doubt the run."""
    policies, setting = summary.get("policies"), summary.get("setting")
    found = []
    for name, policy in (policies if isinstance(policies, dict) else {}).items():
        found += [f"{name}: {doubt}" for doubt in _doubts(policy)]
    shares = setting.get(CPU_KEY) if isinstance(setting, dict) else None
    for name, share in (shares if isinstance(shares, dict) else {}).items():
        if isinstance(share, float) and share > CPU_WARN_SHARE:
            found.append(f"{name}: {share:.0%} of all processors were in use; times are too high.")
    return found


def _doubts(policy: JsonValue) -> list[str]:
    found = []
    if isinstance(policy, dict) and policy.get("accounted") is not True:
        found.append("not every request that was sent is accounted for.")
    failed = value_at(policy, ("failed",)) or 0.0
    if failed > 0:
        found.append(f"{failed:.0f} requests failed; summary.json has the reasons.")
    refused = value_at(policy, ("refused",)) or 0.0
    if refused > 0 and value_at(policy, ("completed",)) == 0:
        found.append(f"all answers are refusals ({refused:.0f}); summary.json has the reasons.")
    late_s = value_at(policy, ("send_lateness_s", "p99"))
    if late_s is not None and late_s > LATENESS_WARN_S:
        found.append(
            f"the client sent late (p99 {seconds_text(late_s)}): this machine was short of CPU, "
            "and times are too high."
        )
    wrong = value_at(policy, ("answers_of_wrong_length",)) or 0.0
    if wrong > 0:
        found.append(f"{wrong:.0f} answers had another length than asked for.")
    return found


def _label(name: str) -> str:
    """Write a key as words: its unit, when it ends in one, goes behind a comma."""
    for suffix, unit in UNIT_WORDS:
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}{unit}".replace("_", " ")
    return name.replace("_", " ")


def _text(value: JsonValue) -> str:
    match value:
        case list():
            return ", ".join(_text(item) for item in value)
        case dict():
            return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)
