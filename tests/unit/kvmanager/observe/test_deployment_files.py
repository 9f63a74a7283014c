"""The files in kvmanager/observe (Prometheus' configuration, alert rules, the dashboard): valid, tested, and about
metrics that exist.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import pagekv.kvmanager

KVMANAGER = Path(pagekv.kvmanager.__file__).parents[2]
OBSERVE = KVMANAGER / "observe"
DASHBOARD = OBSERVE / "grafana" / "dashboards" / "pagekv.json"
METRIC = re.compile(r"\b(?:vllm:|pagekv[_:])[a-z_]+")
# A metric with its selectors, and what a sum is made by.
SELECTED = re.compile(r"\b((?:vllm:|pagekv[_:])[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|without|ignoring) ?\(([^)]*)\)")
# Labels that Prometheus adds, that histograms have, and that all metrics under vLLM's names have.
COMMON = frozenset({"instance", "job", "le"})
OF_VLLM = frozenset({"model_name", "engine"})


def promtool(*args: str, text: str = "") -> None:
    """Runs promtool, which must succeed; `text` is its /dev/stdin."""
    tool = shutil.which("promtool")
    if tool is None and "CI" not in os.environ:
        pytest.skip("alert rules need promtool: apt-get install prometheus")
    assert tool is not None, "promtool is not installed: Debian's package prometheus has it"
    done = subprocess.run([tool, *args], input=text, capture_output=True, text=True, cwd=OBSERVE)
    assert done.returncode == 0, done.stdout + done.stderr


def known_metrics() -> set[str]:
    """Metrics of docs/metrics.md, whose table is held against the registry elsewhere, and what the rules record."""
    known = set()
    page = KVMANAGER.parent / "docs" / "metrics.md"
    for name, kind in re.findall(r"^\| `([a-z:_0-9]+)[^`]*` \| (\w+) \|", page.read_text(), re.M):
        known |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return known | {rule["record"] for rule in rules() if "record" in rule}


def labels_of() -> dict[str, set[str]]:
    """By metric of docs/metrics.md, the labels that it has of its own."""
    page = (KVMANAGER.parent / "docs" / "metrics.md").read_text()
    found = re.findall(r"^\| `([a-z:_0-9]+)(?:\{([a-z_, ]*)\})?` \|", page, re.M)
    return {name: set(labels.split(", ")) - {""} for name, labels in found}


def unknown_labels(expr: str) -> set[str]:
    """Labels by which an expression selects or sums that none of its metrics have."""
    known, wrong, there = labels_of(), set[str](), set(COMMON)
    for name, selectors in SELECTED.findall(expr):
        metric = re.sub("_(bucket|sum|count)$", "", name)
        own = known.get(name, known.get(metric, {"reason"} if ":prefix_miss_share" in name else set()))
        own = own | COMMON | (OF_VLLM if name.startswith("vllm:") else set())
        there |= own
        wrong |= set(re.findall(r"([a-z_]+)(?:=~?|!=|!~)\"", selectors)) - own
    grouped = ", ".join(GROUPED.findall(expr)).split(", ")
    return wrong | set(grouped) - there - {""}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_prometheus_takes_its_configuration() -> None:
    promtool("check", "config", "prometheus.yml")


def test_the_rules_are_valid_and_do_what_they_say() -> None:
    """More than 80 % of the pool held for ten minutes is an alert, and so is a hit rate under 50 %, with its cause."""
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules_test.yml")


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    tests = yaml.safe_load((OBSERVE / "rules_test.yml").read_text())["tests"]
    fired: set[str] = set()
    silent: set[str] = set()
    for case in (case for test in tests for case in test["alert_rule_test"]):
        (fired if case.get("exp_alerts") else silent).add(case["alertname"])
    assert {rule["alert"] for rule in rules() if "alert" in rule} == fired == silent


def test_rules_and_their_tests_ask_for_metrics_that_there_are() -> None:
    known = known_metrics()
    for name in ("rules.yml", "rules_test.yml"):
        text = re.sub(r"^ *- (?:name|job_name):.*$", "", (OBSERVE / name).read_text(), flags=re.M)
        assert set(METRIC.findall(text)) <= known


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    known, asked = known_metrics(), set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            found = set(METRIC.findall(target["expr"]))
            assert found, f"{panel['title']} asks for nothing"
            assert found <= known, panel["title"]
            asked |= found
    assert len(asked) > 30


def test_rules_and_dashboard_select_and_sum_by_labels_that_there_are() -> None:
    """Another label selects nothing, and a sum by it is one sum."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules()]
    assert {expr: wrong for expr in exprs if (wrong := unknown_labels(expr))} == {}
    assert unknown_labels('sum by (kind) (pagekv_evicted_blocks_total{layer="device"})') == {"kind", "layer"}


def test_the_dashboards_queries_are_promql() -> None:
    """promtool knows no way to check a query but as a rule."""
    variables = {"$__rate_interval": "1m", "$instance": ".*"}
    groups: list[dict[str, Any]] = [{"name": "dashboard", "rules": []}]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            expr = target["expr"]
            for variable, value in variables.items():
                expr = expr.replace(variable, value)
            assert "$" not in expr
            groups[0]["rules"].append({"record": f"panel:{panel['id']}:{target['refId']}", "expr": expr})
    # JSON is YAML.
    promtool("check", "rules", "/dev/stdin", text=json.dumps({"groups": groups}))


def test_the_dashboards_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


def test_grafana_finds_what_it_is_provisioned_with() -> None:
    """The mounts of compose.yaml, the provider's folder and the datasource's name go together."""
    compose = yaml.safe_load((KVMANAGER.parent / "compose.yaml").read_text())["services"]
    for service in ("prometheus", "grafana"):
        for mount in compose[service]["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith(".") or (KVMANAGER.parent / source).exists(), mount
    provider = yaml.safe_load((OBSERVE / "grafana/provisioning/dashboards/pagekv.yaml").read_text())["providers"][0]
    assert any(mount.split(":")[1] == provider["options"]["path"] for mount in compose["grafana"]["volumes"])
    (source,) = yaml.safe_load((OBSERVE / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    variables = {v["name"]: v for v in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    assert variables["datasource"]["current"]["value"] == source["uid"]


def test_prometheus_asks_every_manager_where_it_listens() -> None:
    compose = yaml.safe_load((KVMANAGER.parent / "compose.yaml").read_text())["services"]
    jobs = {job["job_name"]: job for job in yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]}
    (static,), (found,) = jobs["pagekv"]["static_configs"], jobs["pagekv"]["dns_sd_configs"]
    ports = dict(target.split(":") for target in static["targets"]) | {
        name: str(found["port"]) for name in found["names"]
    }
    assert set(ports) == {name for name in compose if name.startswith("kvmanager")}
    for name, port in ports.items():
        command = compose[name]["command"]
        assert command[command.index("--http-listen") + 1].endswith(f":{port}")
    (gateway,) = jobs["gateway"]["dns_sd_configs"]
    assert gateway["names"] == ["gateway"]
    assert compose["gateway"]["expose"] == [str(gateway["port"])]


def test_every_panel_says_what_it_shows() -> None:
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    assert len(panels) == 24
    assert [panel["title"] for panel in panels if not panel.get("description", "").endswith(".")] == []
