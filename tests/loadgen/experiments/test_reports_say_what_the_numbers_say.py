"""Reports from results nobody simulated: every page renders, and verdicts follow the numbers."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from loadgen.experiments import (
    affinity,
    forecasts,
    hindsight,
    panels,
    paper_figures,
    synthetic,
    tail_weight,
    tiers,
)
from loadgen.experiments.document import (
    Chart,
    Panel,
    Series,
    Verdict,
    read_document,
    rounded,
    write_document,
)
from loadgen.experiments.experiment import Scale, finished
from loadgen.experiments.judge import TIE, Comparison, Target, verdict
from loadgen.experiments.lines import Line, pick
from loadgen.experiments.pictures import draw_chart, label_log
from loadgen.experiments.recorded import RECORDINGS
from loadgen.experiments.registry import all_experiments, choose
from loadgen.experiments.render import read_documents, write_html, write_pages
from loadgen.experiments.rules import (
    FIRST_COME,
    FORWARD,
    HINDSIGHT,
    OFFLINE,
    PUBLISHED,
    SHORTEST_FIRST,
)
from tests.loadgen.experiments.invented import invented_results

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.experiments.document import Document

SCALE = Scale(seeds=(1, 2), requests=100)
UNSIMULATED = ("live-twin", "forecasts")
"""One has no cases, the other none without recorded data."""
SIMULATED = [name for name in all_experiments() if name not in UNSIMULATED]


def report(name: str, waits_s: dict[str, float], scale: Scale = SCALE) -> Document:
    plan = all_experiments()[name].plan(scale)
    return finished(name, plan, scale, invented_results(plan.cases, waits_s))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every experiment's document, and one picture in place of all of them."""
    folder = tmp_path_factory.mktemp("pages")
    for name in SIMULATED:
        document = report(name, {PUBLISHED: 0.5, FORWARD: 0.4})
        write_document(document, folder / f"{name}.json")
    without = [
        replace(each, charts=each.charts if each.name == "tiers" else ())
        for each in read_documents(folder, SIMULATED)
    ]
    write_pages(without, folder)
    return folder


@pytest.mark.parametrize("name", SIMULATED)
def test_every_experiment_has_a_page_with_each_row_of_its_tables(pages: Path, name: str) -> None:
    document = read_document(pages / f"{name}.json")
    page = (pages / f"{name}.md").read_text()
    assert document.name == name
    assert document.asked in page
    assert document.command in page
    for table in document.tables:
        widths = {len(row.cells) for row in table.rows} | {len(table.columns)}
        assert len(widths) == 1
        for row in table.rows:
            assert f"| {row.label} |" in page


def test_a_document_is_read_back_as_it_was_written(pages: Path, tmp_path: Path) -> None:
    for name in SIMULATED:
        document = read_document(pages / f"{name}.json")
        write_document(document, tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == (pages / f"{name}.json").read_bytes()


def test_something_else_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="no experiment document"):
        read_document(path)


def test_the_index_lists_every_figure_and_table_of_the_paper_once_and_in_order(
    pages: Path,
) -> None:
    index = (pages / "README.md").read_text()
    figures = [int(number) for number in re.findall(r"^\| Figure (\d+) \|", index, re.MULTILINE)]
    assert figures == list(range(2, 25))
    assert re.findall(r"^\| (Table \d) \|", index, re.MULTILINE) == ["Table 1", "Table 2"]


def test_the_page_for_people_holds_pictures_and_commands(pages: Path) -> None:
    documents = [
        replace(each, charts=each.charts if each.name == "tiers" else ())
        for each in read_documents(pages, SIMULATED)
    ]
    page = write_html(documents, pages).read_text()
    assert page.count("data:image/png;base64,") == 1
    for document in documents:
        assert document.command in page


def test_every_chart_can_be_drawn_and_is_small(tmp_path: Path) -> None:
    for name in ("yardsticks", "trade-off", "failure"):
        for chart in report(name, {PUBLISHED: 0.5}).charts:
            picture = draw_chart(chart, tmp_path)
            assert 2_000 < picture.stat().st_size < 100_000


@pytest.mark.parametrize("name", SIMULATED)
def test_a_page_names_the_seeds_that_ran(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "azure2023_code.csv.gz"
    trace.write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,40,8\n1,40,8\n"))
    scale = replace(SCALE, data=tmp_path)
    document = report(name, {}, scale)
    ran = {case.load.seed for case in all_experiments()[name].plan(scale).cases}
    assert ran == set(document.seeds) or any("seeds" in told for told in document.setting.values())


@pytest.mark.parametrize("name", SIMULATED)
def test_every_axis_says_what_it_shows(pages: Path, name: str) -> None:
    for chart in read_document(pages / f"{name}.json").charts:
        assert chart.title
        assert all(panel.x_label and panel.y_label for panel in chart.panels)


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_long_names_are_broken_and_a_wide_legend_is_not_cut_off(
    tmp_path: Path, panels: int
) -> None:
    names = tuple(f"group {n} with a long name (and more of it)" for n in range(5))
    series = tuple(Series(f"a policy with a long name, {n}", names, (1.0,) * 5) for n in range(7))
    panel = Panel(kind="bars", title="t", x_label="x", y_label="y", series=series, log_y=True)
    pixels = imread(draw_chart(Chart("wide", "t", (panel,) * panels), tmp_path))[..., :3]
    for edge in (pixels[:, 0], pixels[:, -1], pixels[0], pixels[-1]):
        assert (edge == 1.0).all()


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (0.6, 2.0), (0.05, 20.0)])
def test_a_log_axis_has_labels_however_little_it_spans(low: float, high: float) -> None:
    axes = Figure().subplots()
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    label_log(axes.xaxis)
    told = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert 3 <= len(told) <= 12


def test_a_chart_with_holes_is_drawn(tmp_path: Path) -> None:
    series = (Series("a", (1.0, 2.0, 5.0), (1.0, None, 2.0)), Series("b", (1.0,), (None,)))
    panel = Panel(kind="lines", title="t", x_label="x", y_label="y", series=series, log_x=True)
    assert draw_chart(Chart("holes", "t", (panel,)), tmp_path).is_file()


def test_recorded_traces_that_are_not_there_are_skipped_and_said_so() -> None:
    document = report("recorded", {})
    assert len(document.skipped) == len(RECORDINGS)
    assert "azure2023_conv.csv.gz" in document.skipped[0]
    assert document.tables == ()


def test_the_papers_router_is_confirmed_where_it_wins_everything() -> None:
    document = report("real-data", {PUBLISHED: 0.5})
    assert {claim.verdict for claim in document.claims} == {Verdict.CONFIRMED}


def test_the_papers_router_is_not_reproduced_where_it_loses_everything() -> None:
    document = report("real-data", {PUBLISHED: 2.0})
    assert {claim.verdict for claim in document.claims} == {Verdict.NOT_REPRODUCED}


def test_losing_to_one_baseline_is_losing() -> None:
    document = report("table-1", {PUBLISHED: 0.5, "least_outstanding": 0.4})
    assert document.claims[0].verdict is Verdict.NOT_REPRODUCED
    assert "least_outstanding" in document.claims[0].evidence


def test_improvement_is_relative_to_round_robin_and_positive_when_better() -> None:
    table = report("table-1", {PUBLISHED: 0.5}).tables[0]
    row = next(row for row in table.rows if row.label == PUBLISHED)
    gains = {
        column.title: cell.value for column, cell in zip(table.columns, row.cells, strict=True)
    }
    ttft, tokens = gains["mean TTFT"], gains["tokens per period"]
    assert ttft is not None
    assert ttft.mean == pytest.approx(50.0)
    assert tokens is not None
    assert tokens.mean == pytest.approx(100 * (2 / 1.5 - 1), rel=1e-3)


@pytest.mark.parametrize(
    ("ours_s", "expected"),
    [(0.1, Verdict.CONFIRMED), (5.0, Verdict.NOT_REPRODUCED)],
)
def test_a_reserve_that_is_better_in_both_beats_the_shipped_policy(
    ours_s: float, expected: Verdict
) -> None:
    document = report("tiers", {tiers.point_label(*point): ours_s for point in tiers.POINTS})
    assert {claim.verdict for claim in document.claims} == {expected}
    assert len(document.claims) == 2 * len(tiers.MIXES)


@pytest.mark.parametrize(
    ("ours_s", "met"),
    [(0.3, True), (0.7, False)],
)
def test_the_frontier_is_met_only_below_the_stated_ratios(ours_s: float, met: bool) -> None:
    document = report("frontier", {FORWARD: ours_s})
    asked = [claim for claim in document.claims if "frontier" not in claim.source]
    assert {claim.verdict is Verdict.CONFIRMED for claim in asked} == {met}


def test_a_rule_that_is_better_in_both_takes_ours_off_the_frontier() -> None:
    document = report("frontier", {FORWARD: 0.5, "central_fcfs": 0.4})
    judged = [claim for claim in document.claims if "frontier" in claim.source]
    assert {claim.verdict for claim in judged} == {Verdict.NOT_REPRODUCED}
    assert all("central_fcfs" in claim.evidence for claim in judged)


@pytest.mark.parametrize(("ours_s", "harmless"), [(1.02, True), (1.2, False)])
def test_harm_is_judged_against_the_better_of_both_pushing_baselines(
    ours_s: float, harmless: bool
) -> None:
    document = report("harm", {FORWARD: ours_s, "least_outstanding": 1.5})
    assert {claim.verdict is Verdict.CONFIRMED for claim in document.claims} == {harmless}


def test_prices_earn_their_place_only_where_something_is_better_and_nothing_worse() -> None:
    for ours_s, verdict_of_ours in ((0.5, Verdict.CONFIRMED), (2.0, Verdict.NOT_REPRODUCED)):
        document = report("ablation", {FORWARD: ours_s})
        ours = [claim for claim in document.claims if claim.source.endswith("our prices")]
        assert {claim.verdict for claim in ours} == {verdict_of_ours}
        assert f"ours mean TTFT x{ours_s:.2f}" in document.answers[0]


@pytest.mark.parametrize(
    ("ours_s", "hits", "expected"),
    [
        (0.5, 0.6, Verdict.CONFIRMED),
        (0.5, 0.1, Verdict.NOT_REPRODUCED),
        (1.1, 0.6, Verdict.NOT_REPRODUCED),
    ],
)
def test_affinity_is_harmless_only_where_it_finds_no_less_and_hurts_nothing(
    ours_s: float, hits: float, expected: Verdict
) -> None:
    plan = all_experiments()["affinity"].plan(SCALE)
    results = invented_results(plan.cases, {FORWARD: ours_s})
    for case, measured in results.items():
        measured.values["hit_rate"] = hits if case.rule.label == FORWARD else 0.3
    judged = [claim for claim in plan.report(results).claims if claim.source.endswith("no harm")]
    assert {claim.verdict for claim in judged} == {expected}


def test_a_hot_worker_and_a_better_rival_are_told() -> None:
    plan = all_experiments()["affinity"].plan(SCALE)
    results = invented_results(plan.cases, {affinity.STICKY_RULE: 0.2})
    for case, measured in results.items():
        measured.values["busiest_share"] = 0.4 if case.rule.label == FORWARD else 0.25
    told = [claim for claim in plan.report(results).claims if "no difference" not in claim.source]
    spots = [claim for claim in told if claim.source.endswith("no hot spot")]
    rivals = [claim for claim in told if claim.source.endswith("against other routers")]
    assert {claim.verdict for claim in spots + rivals} == {Verdict.NOT_REPRODUCED}
    assert all(affinity.STICKY_RULE in claim.evidence for claim in rivals)


def test_affinity_must_change_nothing_where_nothing_is_shared() -> None:
    for ours_s, expected in ((1.0, Verdict.CONFIRMED), (1.0001, Verdict.NOT_REPRODUCED)):
        claims = report("affinity", {FORWARD: ours_s}).claims
        same = {claim.verdict for claim in claims if claim.source.endswith("no difference")}
        assert same == {expected}


@pytest.mark.parametrize(("ours_s", "reached"), [(0.02, True), (0.3, False)])
def test_the_aim_is_judged_on_the_reward_over_its_bound(ours_s: float, reached: bool) -> None:
    document = report("hindsight", {HINDSIGHT: 0.0, FORWARD: ours_s})
    assert {claim.verdict is Verdict.CONFIRMED for claim in document.claims} == {reached}
    assert f"{100 / (1 + ours_s):.1f} % of the bound" in document.claims[0].evidence


def test_the_rest_is_split_among_its_causes() -> None:
    waits = {HINDSIGHT: 0.1, OFFLINE: 0.2, hindsight.NO_GUARD_SHORTEST: 0.4}
    document = report("hindsight", waits | {hindsight.NO_GUARD: 0.4, FORWARD: 0.5})
    parts = re.findall(r"([\d.]+) periods \((-?\d+) %\)", document.answers[-1])
    assert parts == [("10", "25"), ("20", "50"), ("0", "0"), ("10", "25")]


@pytest.mark.parametrize(
    ("quantile_s", "verdict_of_it"),
    [(1.0, Verdict.CONFIRMED), (2.0, Verdict.CONDITIONS)],
)
def test_a_quantile_must_preempt_less_and_cost_nothing(
    quantile_s: float, verdict_of_it: Verdict
) -> None:
    plan = all_experiments()["columns"].plan(SCALE)
    waits = {"quantile 0.7": quantile_s, "quantile 0.9": 3.0}
    results = invented_results(plan.cases, waits)
    for case, measured in results.items():
        measured.values["preemptions"] = 5.0 if case.rule.label.startswith("mean") else 1.0
    assert {claim.verdict for claim in plan.report(results).claims} == {verdict_of_it}


def test_a_quantile_that_preempts_as_often_is_worth_nothing() -> None:
    verdicts = {claim.verdict for claim in report("columns", {"quantile 0.7": 0.5}).claims}
    assert verdicts == {Verdict.NOT_REPRODUCED}


def test_forecasts_are_judged_against_none_and_against_one_for_all(tmp_path: Path) -> None:
    rows = "\n".join(f"{second},40,8" for second in range(30))
    trace = tmp_path / "azure2023_code.csv.gz"
    trace.write_bytes(gzip.compress(f"arrival_s,prompt_tokens,output_tokens\n{rows}".encode()))
    scale = replace(SCALE, data=tmp_path)
    for shipped_s, expected in (
        (0.5, Verdict.CONFIRMED),
        (0.9, Verdict.CONDITIONS),
        (2.0, Verdict.NOT_REPRODUCED),
    ):
        waits = {forecasts.SHIPPED: shipped_s, forecasts.POOLED: 0.8, forecasts.EXACT: 0.2}
        (claim,) = report("forecasts", waits, scale).claims
        assert claim.verdict is expected


def test_a_rising_share_confirms_figure_13_and_a_falling_one_does_not() -> None:
    plan = tail_weight.plan(SCALE)
    rising = {
        label: 1.0 / (1 + step)
        for name in (PUBLISHED, FORWARD)
        for step, label in enumerate(f"{name}, ζ2 = {zeta:g}" for zeta in tail_weight.ZETAS)
    }
    falling = {label: 1.0 / wait for label, wait in rising.items()}
    for waits, expected in ((rising, Verdict.CONFIRMED), (falling, Verdict.NOT_REPRODUCED)):
        document = plan.report(invented_results(plan.cases, waits))
        assert {claim.verdict for claim in document.claims} == {expected}


def comparison(*gains: float) -> Comparison:
    mean = sum(gains) / len(gains)
    return Comparison(Target("x", "x"), 1.0 - mean, "rival", 1.0, gains)


def test_verdicts_need_a_margin_and_every_seed() -> None:
    assert verdict([comparison(0.2, 0.1)]) is Verdict.CONFIRMED
    assert verdict([comparison(0.2, -0.1)]) is Verdict.CONDITIONS
    assert verdict([comparison(0.2), comparison(TIE / 2)]) is Verdict.CONDITIONS
    assert verdict([comparison(0.2), comparison(-0.2)]) is Verdict.CONDITIONS
    assert verdict([comparison(0.2), comparison(-0.2), comparison(-0.2)]) is Verdict.NOT_REPRODUCED
    assert verdict([comparison(TIE / 2)]) is Verdict.NOT_REPRODUCED


def test_every_panel_of_the_papers_comparison_figures_is_there() -> None:
    real, made = paper_figures.figures(), synthetic.figures()
    assert sorted(real) == [2, *range(4, 13), 14, 15, 16]
    assert sorted(made) == list(range(17, 25))
    assert all(len(parts) == 2 for _, parts in (real | made).values())
    noisy = [f for f, (_, parts) in real.items() if parts[0].prediction.value == "noisy"]
    assert noisy == [10, 11, 12, 14, 15, 16]
    assert {panel.rate for _, parts in real.values() for panel in parts} == {0.4, 0.5}


def test_weights_are_read_as_the_paper_writes_them() -> None:
    found = panels.weights("1/27,1/2048,1/2048,5,1,1")
    assert found.throughput == pytest.approx(1 / 27)
    assert found.e2e == found.ttft == 1 / 2048
    assert (found.queries, found.tail_e2e, found.tail_ttft) == (5.0, 1.0, 1.0)
    assert found.ttft_bound_s == pytest.approx(0.49)


def test_an_unknown_experiment_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'tiers'"):
        choose(["tier"])


def test_a_line_without_the_measure_says_so() -> None:
    plan = all_experiments()["table-1"].plan(SCALE)
    item = Line("nobody", plan.cases[:1])
    with pytest.raises(KeyError, match="nobody has no colour"):
        item.mean("colour", invented_results(plan.cases, {}))


OTHER_CONTESTS = ("prices", "harm", "columns", "scaling", "overhead", "affinity")
"""One part of one policy, pushing or caches as the yardstick, or times alone."""


@pytest.mark.parametrize("name", [name for name in SIMULATED if name not in OTHER_CONTESTS])
def test_the_strong_baselines_stand_beside_the_policies(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "azure2023_code.csv.gz"
    trace.write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,40,8\n1,40,8\n"))
    tables = report(name, {}, replace(SCALE, data=tmp_path)).tables
    labels = {row.label for table in tables for row in table.rows}
    for wanted in (FIRST_COME, SHORTEST_FIRST, "zero prices"):
        assert any(wanted in label for label in labels), wanted
    if name in ("yardsticks", "hindsight", "real-data", "trade-off", "tail-weight", "price-step"):
        assert HINDSIGHT in labels
    if name == "tiers":
        assert sum("reserve" in label for label in labels) >= 4


def test_a_line_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="no line 'tier'"):
        pick([Line("tiers", ())], "tier")


def test_ticks_in_which_a_policy_failed_are_counted_once_a_simulation() -> None:
    plan = all_experiments()["table-1"].plan(SCALE)
    results = invented_results(plan.cases, {})
    for measured in results.values():
        measured.values["faults"] = 2.0
    doubled = replace(plan, cases=plan.cases * 2)
    assert finished("table-1", doubled, SCALE, results).faults == 2 * len(results)


def test_numbers_are_kept_to_four_digits() -> None:
    assert [rounded(v) for v in (0.0, 1234567.0, 0.000123456)] == [0.0, 1235000.0, 0.0001235]
