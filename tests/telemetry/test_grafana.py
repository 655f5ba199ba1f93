"""The dashboards and rules: fresh, about metrics that exist, with a word on what to do."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.metric_names import METRICS
from tests.pages.tables import shown_name

COMPOSE = Path(__file__).parents[2] / "compose"
DASHBOARDS = COMPOSE / "grafana" / "dashboards"
PAGES = ("glance", "kv", "ttft", "worker")
FOREIGN = {"up", "ALERTS", "process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Prometheus' own, and those of the client library."""
SHOWN = {
    f"{shown_name(metric)}{suffix}"
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}


def load(name: str) -> dict[str, Any]:
    return json.loads((DASHBOARDS / f"{name}.json").read_text())


def panels_of(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((COMPOSE / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_in(expr: str) -> set[str]:
    """Return the metrics that an expression asks for: a name before a selector, a range or a closing bracket."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    bare = re.sub(r"\b(by|on|group_left|without) \([^)]*\)", "", bare)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    return set(re.findall(r"\b(?:kvmesh_|gen_ai_|process_|up\b|ALERTS)\w*", bare))


def test_what_is_committed_is_what_is_made(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    subprocess.run([sys.executable, COMPOSE / "grafana" / "build.py", tmp_path], check=True, timeout=60)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        path.name: path.read_text() for path in DASHBOARDS.iterdir()
    }, "run python compose/grafana/build.py"


@pytest.mark.parametrize("name", PAGES)
def test_every_panel_has_a_unit_thresholds_queries_and_a_word_on_what_to_do(name: str) -> None:
    page = load(name)
    assert page["uid"] == f"kvmesh-{name}" and page["title"] and not page["editable"]
    panels = panels_of(page)
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
    for panel in panels:
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"] and len(panel["description"]) > 50 and defaults["unit"] and panel["targets"]
        assert defaults["thresholds"]["steps"][0]["value"] is None
        assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "prometheus"
            asked = metrics_in(target["expr"])
            assert asked and asked <= SHOWN | FOREIGN, (panel["title"], asked - SHOWN - FOREIGN)


def test_the_four_titles() -> None:
    assert {load(name)["title"] for name in PAGES} == {
        "Mesh at a glance",
        "Where did TTFT go",
        "KV: who holds what, what moved",
        "One worker",
    }


def test_nearly_every_metric_is_shown_or_watched() -> None:
    exprs = [t["expr"] for name in PAGES for panel in panels_of(load(name)) for t in panel["targets"]]
    asked = set[str]().union(*(metrics_in(expr) for expr in [*exprs, *(rule["expr"] for rule in rules())]))
    unseen = {m.name for m in METRICS if not any(name.startswith(m.name) for name in asked)}
    assert unseen == {
        "kvmesh_progress_asked",
        "kvmesh_gateway_running_requests",
        "kvmesh_bus_connects",
        "kvmesh_policy_fallbacks",
    }, "of interest in a search for causes only"


def test_every_rule_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert len(rule["annotations"]["summary"]) > 20 and len(rule["annotations"]["description"]) > 40
        asked = metrics_in(rule["expr"])
        assert asked and asked <= SHOWN | FOREIGN, (rule["alert"], asked)


def test_labels_of_label_values_exist() -> None:
    labels = {label for metric in METRICS for label in metric.shown_labels} | {
        "le",
        "role",
        "service",
        "instance",
        "name",
    }
    for name in PAGES:
        for panel in panels_of(load(name)):
            for target in panel["targets"]:
                grouped = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", target["expr"])
                named = {label.strip() for group in grouped for label in group.split(",") if label.strip()}
                named |= set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
                assert named <= labels, (panel["title"], named - labels)


def test_exemplars_lead_to_traces_and_traces_to_metrics() -> None:
    folder = COMPOSE / "grafana" / "provisioning"
    sources = {
        source["uid"]: source
        for path in (folder / "datasources").iterdir()
        for source in yaml.safe_load(path.read_text())["datasources"]
    }
    assert set(sources) == {"prometheus", "tempo"}
    destinations = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destinations == [{"name": "trace_id", "datasourceUid": "tempo"}]
    tempo = sources["tempo"]["jsonData"]
    assert tempo["serviceMap"]["datasourceUid"] == tempo["tracesToMetrics"]["datasourceUid"] == "prometheus"
    for query in tempo["tracesToMetrics"]["queries"]:
        assert metrics_in(query["query"].replace("$$__tags", "")) <= SHOWN
    (provider,) = yaml.safe_load((folder / "dashboards" / "kvmesh.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    generator = yaml.safe_load((COMPOSE / "tempo.yaml").read_text())["metrics_generator"]
    assert generator["storage"]["remote_write"][0]["url"].startswith(sources["prometheus"]["url"])
