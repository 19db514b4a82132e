"""Affinity without hot spots: what following prefix caches is worth, and what it costs.

The same requests under our policy with affinity and without, under two rules that are blind for
caches, and under cache-aware routing as other routers do it. Workers compute prompts themselves and
keep them while memory lasts; hits are those that the engines count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from loadgen.cache_aware import STICKY, CacheRule
from loadgen.experiments.cases import Case
from loadgen.experiments.columns import PERCENT, PREEMPTIONS, SECOND_LATENCIES, TOKENS_PER_S
from loadgen.experiments.document import Chart, Claim, Column, Document, Panel, Series, Verdict
from loadgen.experiments.experiment import Experiment, Plan, Scale
from loadgen.experiments.fleets import a100_fleet
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
from loadgen.experiments.loads import CONVERSATIONS, HOT_SYSTEM_PROMPT, NOTHING_SHARED, Load
from loadgen.experiments.recorded import Recording, find_recordings
from loadgen.experiments.rules import AFFINITY_OFF, FORWARD, RuleBook
from loadgen.rebuilt_heads import BLOCK_TOKENS
from loadgen.shared_prefixes import HOT_SHARE, PIECE_TOKENS, SYSTEM_TOKENS
from loadgen.workload import Prediction
from service.control.config import ControlConfig, PolicyName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.experiments.document import Table
    from loadgen.experiments.rules import Rule

NAME = "affinity"
WORKERS, BATCH_LIMIT = 4, 16
LIGHT = 0.3
LOADS, LOADS_FULL = (LIGHT, 1.0), (LIGHT, 0.6, 0.8, 1.0, 1.2)
LIGHT_SHARE = 0.4
"""Requests of a reduced run at light load, over those asked for: it takes so much longer."""
SLACK = 1.02
"""What affinity may make worse, as a ratio."""
LESS = 0.005
"""So much less of all prompt tokens found counts as equal."""
UNEVEN = 0.05
"""So much of all requests more than its equal share makes a worker hot."""
STICKY_RULE = "sticky (longest cached prefix)"
CACHE_AWARE = "cache_aware (0.3, 64, 1.5)"
SCALED_GAP = 64 * BATCH_LIMIT // 256
CACHE_AWARE_SCALED = f"cache_aware, gap scaled ({SCALED_GAP})"
OTHERS = (STICKY_RULE, CACHE_AWARE, CACHE_AWARE_SCALED)
MEAN, P99, TOKENS = "ttft_mean_s", "ttft_p99_s", "tokens_per_s"
HITS, BUSIEST = "hit_rate", "busiest_share"
MOONCAKE = Recording(
    "Mooncake, conversation", ("conversation_trace.jsonl", "mooncake_conversation.csv.gz")
)
COLUMNS = (
    Column(HITS, "prefix hits", "%", PERCENT, better=1),
    Column("guessed_hit_rate", "hits as guessed", "%", PERCENT, better=0),
    *(column for column in SECOND_LATENCIES if column.key in (MEAN, P99, "e2e_mean_s")),
    TOKENS_PER_S,
    Column(BUSIEST, "busiest worker's requests", "%", PERCENT),
    PREEMPTIONS,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic.

    Attributes:
        title: in words. short: the same in pictures.
        trace: of loads.py. piece_tokens: prompt tokens of one of its ids.
        arrivals: of loadgen.arrivals.
        shared: whether prompts have beginnings in common.
    """

    title: str
    short: str
    trace: str
    piece_tokens: int = PIECE_TOKENS
    arrivals: str = "poisson"
    shared: bool = True


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of traffic at one load, under every rule.

    Attributes:
        title: in words. short: the same in pictures.
        shared: whether prompts have beginnings in common.
        lines: one a rule.
    """

    title: str
    short: str
    shared: bool
    lines: tuple[Line, ...]

    def line(self, label: str) -> Line:
        """One rule by its label."""
        return pick(self.lines, label)


def plan(scale: Scale) -> Plan:
    """Every kind of traffic at light and at full load."""
    book = RuleBook(ControlConfig(max_wait_s=600.0, queue_max=100_000))
    rules = (
        book.without_affinity(),
        book.forward(),
        book.plain(PolicyName.ROUND_ROBIN),
        book.plain(PolicyName.LEAST_OUTSTANDING),
        book.cache_aware(STICKY, STICKY_RULE),
        book.cache_aware(CacheRule(), CACHE_AWARE),
        book.cache_aware(CacheRule(load_gap=SCALED_GAP), CACHE_AWARE_SCALED),
    )
    kinds = [
        Kind("conversations", "conv.", CONVERSATIONS),
        Kind("hot system prompt", "hot", HOT_SYSTEM_PROMPT),
        Kind("nothing shared", "nothing", NOTHING_SHARED, shared=False),
    ]
    recorded, skipped = find_recordings(scale.data, (MOONCAKE,))
    for title, trace in recorded.items():
        rebuilt = "" if trace.endswith(".jsonl") else ", block ids rebuilt"
        kinds.insert(0, Kind(title + rebuilt, "Moon.", trace, BLOCK_TOKENS, "recorded"))
    traffics = tuple(
        _traffic(kind, load, rules, scale)
        for kind in kinds
        for load in (LOADS_FULL if scale.full else LOADS)
    )
    return Plan(cases_of(traffics), partial(_report, scale, traffics, skipped))


def _traffic(kind: Kind, load: float, rules: Sequence[Rule], scale: Scale) -> Traffic:
    fleet = tuple(
        replace(worker, piece_tokens=kind.piece_tokens)
        for worker in a100_fleet(WORKERS, BATCH_LIMIT)
    )
    light = load == LIGHT and not scale.full
    requests = max(4, round(LIGHT_SHARE * scale.requests)) if light else scale.fewer
    sent = Load(
        trace=kind.trace,
        arrivals=kind.arrivals,
        load=load,
        requests=requests,
        prediction=Prediction.NOISY,
    )
    case = Case(load=sent, workers=fleet, rule=rules[0])
    seeds = scale.fewer_seeds if light else scale.seeds
    return Traffic(
        title=f"{kind.title}, load {load:g}",
        short=f"{kind.short} {load:g}",
        shared=kind.shared,
        lines=lines_under(case, rules, seeds),
    )


def _ratio(traffic: Traffic, key: str, mine: str, base: str, results: Results) -> float:
    """One rule over another, seed by seed as in the tables."""
    found = ratio(traffic.line(mine).values(key, results), traffic.line(base).values(key, results))
    return 1.0 if found is None else found.mean


def harm_claim(traffic: Traffic, results: Results) -> Claim:
    """Judge whether affinity finds no less and makes nothing worse."""
    hits, plain = (traffic.line(label).mean(HITS, results) for label in (FORWARD, AFFINITY_OFF))
    mean, p99, tokens = (
        _ratio(traffic, key, FORWARD, AFFINITY_OFF, results) for key in (MEAN, P99, TOKENS)
    )
    verdict = Verdict.NOT_REPRODUCED
    if hits >= plain - LESS and mean <= SLACK and tokens >= 1 / SLACK:
        verdict = Verdict.CONFIRMED if p99 <= SLACK else Verdict.CONDITIONS
    return Claim(
        source=f"ours, affinity, {traffic.title}: no harm",
        statement="With affinity engines find no less of the prompts in their caches (beyond "
        f"{100 * LESS:.1f} points), and mean and p99 TTFT and tokens/s are no worse than without "
        f"(beyond {100 * (SLACK - 1):.0f} %).",
        verdict=verdict,
        evidence=f"hits {100 * hits:.1f} % against {100 * plain:.1f} %; mean TTFT x{mean:.2f}, "
        f"p99 x{p99:.2f}, tokens/s x{tokens:.3f}.",
        chart=NAME,
    )


def hot_spot_claim(traffic: Traffic, results: Results) -> Claim:
    """Judge whether a worker got many more requests than the others."""
    shares = {item.label: item.mean(BUSIEST, results) for item in traffic.lines}
    most = 1 / WORKERS + UNEVEN
    others = ", ".join(f"{100 * shares[label]:.0f} % under {label}" for label in OTHERS)
    return Claim(
        source=f"ours, affinity, {traffic.title}: no hot spot",
        statement=f"With affinity no worker gets more than {100 * most:.0f} % of the requests.",
        verdict=Verdict.CONFIRMED if shares[FORWARD] <= most else Verdict.NOT_REPRODUCED,
        evidence=f"the busiest worker gets {100 * shares[FORWARD]:.1f} %; "
        f"{100 * shares[AFFINITY_OFF]:.1f} % without affinity; {others}.",
    )


def rivals_claim(traffic: Traffic, results: Results) -> Claim:
    """Judge us against the best cache-aware rule of others, measure by measure."""
    told, ratios = [], {}
    for key, name, better in (
        (MEAN, "mean TTFT", min),
        (P99, "p99 TTFT", min),
        (TOKENS, "tokens/s", max),
    ):
        means = {label: traffic.line(label).mean(key, results) for label in OTHERS}
        best = better(means, key=lambda label: means[label])
        ratios[key] = _ratio(traffic, key, FORWARD, best, results)
        told.append(f"{name} x{ratios[key]:.2f} of {best}")
    verdict = Verdict.NOT_REPRODUCED
    if ratios[MEAN] <= SLACK and ratios[TOKENS] >= 1 / SLACK:
        verdict = Verdict.CONFIRMED if ratios[P99] <= SLACK else Verdict.CONDITIONS
    return Claim(
        source=f"ours, affinity, {traffic.title}: against other routers",
        statement="Mean and p99 TTFT and tokens/s are no worse than those of the best cache-aware "
        f"rule of other routers (beyond {100 * (SLACK - 1):.0f} %).",
        verdict=verdict,
        evidence="; ".join(told) + ".",
        chart=NAME,
    )


def same_claim(traffic: Traffic, results: Results) -> Claim:
    """Judge whether affinity changes anything where it has nothing to follow."""
    pairs = zip(traffic.line(FORWARD).cases, traffic.line(AFFINITY_OFF).cases, strict=True)
    differing = set()
    for mine, other in pairs:
        with_it, without = results[mine].values, results[other].values
        differing |= {key for key in without if with_it.get(key) != without[key]}
    told = f"different: {', '.join(sorted(differing))}" if differing else "every measure is equal"
    return Claim(
        source=f"ours, affinity, {traffic.title}: no difference",
        statement="Where no prompts begin alike, every measure is the same with affinity and "
        "without, to the last digit.",
        verdict=Verdict.NOT_REPRODUCED if differing else Verdict.CONFIRMED,
        evidence=f"{told}.",
    )


def _claims(traffic: Traffic, results: Results) -> list[Claim]:
    if not traffic.shared:
        return [same_claim(traffic, results)]
    judges = (harm_claim, hot_spot_claim, rivals_claim)
    return [judge(traffic, results) for judge in judges]


def _answer(traffic: Traffic, results: Results) -> str:
    if not traffic.shared:
        return f"{traffic.title}: {same_claim(traffic, results).evidence}"
    lost = [
        f"{claim.source.rpartition(': ')[2]}: {claim.verdict.value}"
        for claim in _claims(traffic, results)
        if claim.verdict is not Verdict.CONFIRMED
    ]
    told = harm_claim(traffic, results).evidence
    return f"{traffic.title}: {told}" + (f" Claims that fail: {'; '.join(lost)}." if lost else "")


def _report(
    scale: Scale, traffics: Sequence[Traffic], skipped: tuple[str, ...], results: Results
) -> Document:
    return Document(
        title="Affinity without hot spots",
        asked="What is it worth to send requests where their prompts are cached, does it ever "
        "hurt, and does a popular prompt make a worker hot?",
        answers=tuple(_answer(traffic, results) for traffic in traffics),
        setting=_setting(scale),
        seeds=scale.seeds,
        tables=tuple(_table(traffic, results) for traffic in traffics),
        charts=(_chart(traffics, results),),
        claims=tuple(claim for traffic in traffics for claim in _claims(traffic, results)),
        skipped=skipped,
    )


def _setting(scale: Scale) -> dict[str, str]:
    return {
        "fleet": f"{WORKERS} workers, Llama-3-8B on A100 (445,000 KV tokens), B = {BATCH_LIMIT}; "
        "prompts are computed there and kept while nobody else wants their memory",
        "not modelled": "answers are not kept in the caches (vLLM keeps them), and prompts that "
        "run side by side do not share memory",
        "load": "1 is what the fleet could do if it computed every prompt, so with hits there is "
        f"room; {scale.fewer} requests, at light load fewer; forecasts within 20 %",
        "conversations": "64 at a time; a turn's prompt repeats all that was said; LMSYS-like "
        "questions and answers after 256 to 1,536 tokens; pieces of 64 tokens",
        "hot system prompt": f"{SYSTEM_TOKENS} tokens, the same for {100 * HOT_SHARE:.0f} % of the "
        "requests, others have their own",
        "nothing shared": "the same lengths, every prompt of its own",
        "Mooncake": "blocks of 512 tokens, recorded times; where only counts of blocks seen before "
        "are there, the earlier prompt is the latest that fits",
        "cache_aware": "as vllm-router and SGLang's gateway: least loaded while loads differ by "
        "more than the gap and the ratio, else where more than 0.3 of the prompt was sent before; "
        f"their gap of 64 is for 256 sequences, so it stands here scaled to {BATCH_LIMIT} as well",
        "all cache-aware rules": "know exact pieces and the engines' memory, which the originals "
        "do not",
    }


def _table(traffic: Traffic, results: Results) -> Table:
    return tabulate(traffic.lines, TableSpec(traffic.title, COLUMNS, AFFINITY_OFF), results)


def _chart(traffics: Sequence[Traffic], results: Results) -> Chart:
    labels = [item.label for item in traffics[0].lines if item.label != AFFINITY_OFF]
    titles = tuple(traffic.short for traffic in traffics)
    panels = (
        (MEAN, "mean TTFT over that without affinity (log)", True),
        (P99, "p99 TTFT over that without affinity (log)", True),
        (HITS, "share of prompt tokens found, %", False),
        (BUSIEST, "requests on the busiest worker, %", False),
    )
    return Chart(
        NAME,
        "Affinity",
        tuple(
            Panel(
                kind="bars",
                title=y_label,
                x_label="traffic",
                y_label="ratio" if compared else "%",
                series=tuple(
                    Series(label, titles, _bars(traffics, label, key, results, compared=compared))
                    for label in labels
                ),
                log_y=compared,
                reference=1.0 if compared else None,
            )
            for key, y_label, compared in panels
        ),
    )


def _bars(
    traffics: Sequence[Traffic], label: str, key: str, results: Results, *, compared: bool
) -> tuple[float, ...]:
    return tuple(
        round(
            _ratio(traffic, key, label, AFFINITY_OFF, results)
            if compared
            else PERCENT * traffic.line(label).mean(key, results),
            4,
        )
        for traffic in traffics
    )


EXPERIMENT = Experiment(
    name=NAME, summary="prefix caches: what following them is worth, hot spots", plan=plan
)
