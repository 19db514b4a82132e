"""Every expression of the dashboard and the alerts parses, and asks for series that exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from scripts import reference

ROOT = reference.ROOT
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "bidgate.json"
ALERTS = ROOT / "deploy" / "alerts.yml"
PROMETHEUS = ROOT / "deploy" / "prometheus.yml"
TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus itself adds to what it scrapes."""


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Labels of every series name, as a running application exposes them."""
    known: dict[str, set[str]] = {"up": set()}
    for family in reference.series():
        labels = set(family.labels)
        if family.kind == "histogram":
            known[f"{family.name}_bucket"] = labels | {"le"}
            known[f"{family.name}_sum"] = known[f"{family.name}_count"] = labels
        else:
            known[family.name] = labels
    return known


def _alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _dashboard() -> dict[str, object]:
    dashboard: dict[str, object] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return dashboard


def _expressions() -> Iterator[tuple[str, str]]:
    for panel in _dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "1m")
    for rule in _alerts():
        yield f"alert {rule['alert']}", str(rule["expr"])


def _asked(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Series and labels that one expression selects, groups or joins by."""
    nodes: list[promql.Expr] = []
    tree = promql.parse(expression)
    promql.walk(tree, lambda node: nodes.append(node))
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    for selector in selectors:
        yield selector.name, {matcher.name for matcher in selector.matchers.matchers}
    for node in nodes:
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            inside: list[promql.Expr] = []
            promql.walk(node, lambda below, found=inside: found.append(below))
            for selector in inside:
                if isinstance(selector, promql.VectorSelector):
                    yield selector.name, set(node.modifier.labels)
        if isinstance(node, promql.BinaryExpr) and node.modifier and node.modifier.matching:
            joined = node.modifier.matching.labels
            for selector in selectors:
                yield selector.name, set(joined)


@pytest.mark.parametrize(("where", "expression"), list(_expressions()))
def test_an_expression_asks_for_series_and_labels_that_exist(
    where: str, expression: str, exposed: dict[str, set[str]]
) -> None:
    asked = list(_asked(expression))
    assert asked, f"{where} selects nothing"
    for name, labels in asked:
        assert name in exposed, f"{where} asks for {name}"
        unknown = labels - exposed[name] - TARGET_LABELS
        assert not unknown, f"{where}: {name} has no label {unknown}"


def test_the_check_sees_a_metric_that_does_not_exist(exposed: dict[str, set[str]]) -> None:
    assert [name for name, _ in _asked("rate(bidgate_ghosts_total[5m]) > 0")] == [
        "bidgate_ghosts_total"
    ]
    assert "bidgate_ghosts_total" not in exposed


def test_legends_use_labels_that_their_expression_keeps(exposed: dict[str, set[str]]) -> None:
    for panel in _dashboard()["panels"]:
        for target in panel.get("targets", ()):
            wanted = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            tree = promql.parse(target["expr"].replace("$__rate_interval", "1m"))
            if isinstance(tree, promql.AggregateExpr):
                kept = set(tree.modifier.labels) if tree.modifier else set()
            else:
                kept = {"instance"}.union(*(exposed[name] for name, _ in _asked(str(tree))))
            assert wanted <= kept, f"{panel['title']}: {wanted - kept}"


def test_the_dashboard_shows_what_an_operator_asks_for() -> None:
    shown = " ".join(expression for where, expression in _expressions() if "panel" in where)
    for metric in (
        'bidgate_shadow_price{instance=~"$instance", resource="batch"}',
        'bidgate_shadow_price{instance=~"$instance", resource="kv"}',
        "bidgate_queue_waiting",
        "bidgate_worker_kv_tokens",
        "bidgate_worker_kv_capacity_tokens",
        "bidgate_worker_active",
        "bidgate_ttft_seconds_bucket",
        "bidgate_e2e_seconds_bucket",
        "bidgate_tick_seconds_bucket",
        "bidgate_refusals_total",
        "bidgate_price_age_seconds",
    ):
        assert metric in shown


def test_panels_have_their_own_ids_and_places_and_the_provisioned_source() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, f"{panel['title']} lies on another panel"
        cells |= own
    source = yaml.safe_load(
        (ROOT / "deploy/grafana/datasources/prometheus.yml").read_text(encoding="utf-8")
    )["datasources"][0]
    used = {target["datasource"]["uid"] for panel in panels for target in panel.get("targets", ())}
    assert used == {source["uid"]}


def test_every_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    rules = _alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]


def test_prometheus_scrapes_the_job_that_alerts_name_and_loads_the_rules() -> None:
    config = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))
    assert "bidgate" in {job["job_name"] for job in config["scrape_configs"]}
    for file in config["rule_files"]:
        assert (PROMETHEUS.parent / Path(file)).is_file()
