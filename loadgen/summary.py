"""From outcome records to summary.json: counts, latency quantiles, throughput, ratios.

Latencies are of requests that completed; a refused, cancelled or failed request counts against the
share within the bound. Percentiles interpolate linearly. null stands for "no such request".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import orjson

from loadgen.outcomes import End, OutcomeRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SUMMARY_FILE = "summary.json"
BASE_POLICY = "round_robin"
QUANTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
REASONS_MAX = 8
"""Distinct reasons of refusals and failures listed a policy."""

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a reader must know about a run beside its outcomes; kept inside summary.json.

    Attributes:
        command: the command line that made it.
        ttft_bound_s: bound on time to first token where a request brings none.
        sent: requests sent under each policy, as the sender counted them.
        setting: everything else worth telling: trace, load, workers, seed; JSON values.
    """

    command: str = ""
    ttft_bound_s: float = 1.0
    sent: Mapping[str, int] = field(default_factory=dict)
    setting: Mapping[str, JsonValue] = field(default_factory=dict)


def summarize(records: Iterable[OutcomeRecord], context: RunContext) -> dict[str, JsonValue]:
    """Make the content of summary.json; policies keep the order in which they first occur."""
    by_policy: dict[str, list[OutcomeRecord]] = {name: [] for name in context.sent}
    for record in records:
        by_policy.setdefault(record.policy, []).append(record)
    policies: dict[str, JsonValue] = {}
    for name, ended in by_policy.items():
        policies[name] = policy_summary(ended, context.sent.get(name, len(ended)), context)
    return {
        "command": context.command,
        "ttft_bound_s": context.ttft_bound_s,
        "setting": dict(context.setting),
        "policies": policies,
        "ratio_to_round_robin": ratios(policies, BASE_POLICY),
    }


def policy_summary(
    records: Sequence[OutcomeRecord], entered: int, context: RunContext
) -> dict[str, JsonValue]:
    """Sum up the records of one policy.

    Args:
        records: every request that ended.
        entered: requests sent; equals the sum of the four ends when each is accounted for.
        context: gives the bound on time to first token.
    """
    ends = Counter(record.outcome for record in records)
    completed = [record for record in records if record.outcome is End.COMPLETED]
    tokens = sum(record.output_tokens for record in records)
    span_s = _span_s(records)
    return {
        "entered": entered,
        **{end.value: ends[end] for end in End},
        "accounted": entered == len(records),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / span_s if span_s > 0 else None,
        "span_s": span_s,
        "ttft_s": stats([r.ttft_s for r in completed if r.ttft_s is not None]),
        "e2e_s": stats([record.e2e_s for record in completed]),
        "queue_s": stats([r.queue_s for r in completed if r.queue_s is not None]),
        "send_lateness_s": stats([record.sent_s - record.arrival_s for record in records]),
        "share_ttft_within_bound": _share_within(records, entered, context.ttft_bound_s),
        "answers_of_wrong_length": sum(r.output_tokens != r.decode_tokens for r in completed),
        "reasons": _reasons(records),
    }


def stats(values: Sequence[float]) -> dict[str, JsonValue]:
    """Mean, p50, p95, p99 and maximum, in the unit of the values; null when there is none."""
    if not values:
        return {name: None for name in ("mean", *QUANTILES, "max")}
    array = np.asarray(values, dtype=float)
    quantiles = np.percentile(array, list(QUANTILES.values()))
    found: dict[str, JsonValue] = {"mean": float(array.mean())}
    found.update(zip(QUANTILES, map(float, quantiles), strict=True))
    found["max"] = float(array.max())
    return found


def ratios(policies: Mapping[str, JsonValue], base: str) -> dict[str, JsonValue]:
    """Divide each policy's latencies and throughput by the base policy's; {} without a base."""
    reference = policies.get(base)
    if not isinstance(reference, dict):
        return {}
    found: dict[str, JsonValue] = {}
    for name, policy in policies.items():
        if isinstance(policy, dict):
            found[name] = {
                "output_tokens_per_s": _ratio(policy, reference, "output_tokens_per_s"),
                "ttft_s": _ratios_of(policy, reference, "ttft_s"),
                "e2e_s": _ratios_of(policy, reference, "e2e_s"),
            }
    return found


def write_json(value: Mapping[str, JsonValue], path: Path) -> None:
    """Write indented JSON with a final newline."""
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_context(path: Path) -> RunContext:
    """Take the context back out of a summary.json, so that a report can be made again.

    Raises:
        ValueError: when the file is no summary.
    """
    try:
        found = orjson.loads(path.read_bytes())
        sent = {name: int(policy["entered"]) for name, policy in found["policies"].items()}
        return RunContext(
            command=str(found["command"]),
            ttft_bound_s=float(found["ttft_bound_s"]),
            sent=sent,
            setting=dict(found["setting"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a summary: {error}") from error


def _ratios_of(
    policy: dict[str, JsonValue], reference: dict[str, JsonValue], name: str
) -> JsonValue:
    mine, base = policy.get(name), reference.get(name)
    if not isinstance(mine, dict) or not isinstance(base, dict):
        return None
    return {key: _ratio(mine, base, key) for key in ("mean", *QUANTILES)}


def _ratio(mine: dict[str, JsonValue], base: dict[str, JsonValue], key: str) -> JsonValue:
    value, reference = mine.get(key), base.get(key)
    if not isinstance(value, int | float) or not isinstance(reference, int | float):
        return None
    return value / reference if reference else None


def _span_s(records: Sequence[OutcomeRecord]) -> float:
    """Seconds from the first send to the last end."""
    if not records:
        return 0.0
    first_s = min(record.sent_s for record in records)
    return max(record.sent_s + record.e2e_s for record in records) - first_s


def _share_within(records: Sequence[OutcomeRecord], entered: int, bound_s: float) -> float | None:
    within = sum(
        record.outcome is End.COMPLETED
        and record.ttft_s is not None
        and record.ttft_s <= (record.ttft_bound_s or bound_s)
        for record in records
    )
    return within / entered if entered else None


def _reasons(records: Sequence[OutcomeRecord]) -> dict[str, JsonValue]:
    found = Counter(record.detail for record in records if record.detail)
    return dict(found.most_common(REASONS_MAX))
