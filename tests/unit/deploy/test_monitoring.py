"""Prometheus' rules and Grafana's dashboard use existing metrics, in valid expressions."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.manifests import ROOT
from support.monitoring import (
    DEPLOY,
    alert_rules,
    check_metrics,
    dashboards,
    expressions,
    metric_names,
    needs_promtool,
)

EXPRESSIONS = expressions()
SUFFIXES = ("_bucket", "_sum", "_count", "_total")
HERE = Path(__file__).parent


def literals(path: Path) -> set[str]:
    """Return every string in a Python file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def documented() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


METRICS = ROOT / "server" / "metrics"
KNOWN = literals(METRICS / "meter.py") | literals(METRICS / "prometheus.py")


def is_served(name: str) -> bool:
    return name in KNOWN or any(name.removesuffix(suffix) in KNOWN for suffix in SUFFIXES if name.endswith(suffix))


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression(where: str) -> None:
    text = EXPRESSIONS[where]
    names = metric_names(text)
    assert names or re.search(r"\b(up|process_\w+)\{", text), "about nothing"
    assert [name for name in sorted(names) if not is_served(name)] == []
    assert is_balanced(text)


def is_balanced(text: str) -> bool:
    """Return whether brackets outside of strings are balanced."""
    open_ones = []
    for sign in re.sub(r'"[^"]*"', "", text):
        if sign in "([{":
            open_ones.append(sign)
        elif sign in ")]}" and (not open_ones or open_ones.pop() + sign not in ("()", "[]", "{}")):
            return False
    return not open_ones and text.count('"') % 2 == 0


def test_faults_are_found() -> None:
    assert metric_names("rate(serve_llm_nonsense_total[5m])") == {"nonsense_total"} and not is_served("nonsense_total")
    assert is_served("time_to_first_token_seconds_bucket") and not is_served("time_to_first_token_seconds_p95")
    assert is_balanced('sum(rate(a{b="("}[5m]))')
    assert not any(map(is_balanced, ["sum(a", "a)", "a{b]", 'a{b="}']))


def test_the_documents_name_metrics_that_exist() -> None:
    """Each metric that docs/metrics.md lists is also on a dashboard."""
    assert len(documented()) > 10
    assert [name for name in sorted(documented()) if not is_served(name)] == []
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    modules = {
        f"{page.name}: {name}" for page in pages for name in metric_names(page.read_text()) if not is_served(name)
    }
    assert modules == set()
    shown = set().union(*(metric_names(text) for text in EXPRESSIONS.values()))
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert documented() - families == set()


@pytest.mark.parametrize("shown", dashboards(), ids=lambda shown: shown["uid"])
def test_a_dashboard(shown: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in shown["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one in places:
        assert not any(overlap(one, other) for other in places if other is not one)
    assert all(panel["description"] for panel in shown["panels"] if panel["type"] != "row")


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))


def test_the_alerts() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["for"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_every_alert_is_tested() -> None:
    """There is a test that it fires, and one that it does not."""
    tests = yaml.safe_load((HERE / "alerts_test.yaml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alert_rules()}
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == names
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == names


def test_compose_puts_the_files_where_they_are_looked_for() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    services = compose["services"]
    mounted = {}
    for service in services.values():
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), volume
                mounted[target] = source
    assert mounted["/etc/prometheus/prometheus.yml"] == "./prometheus.yaml"
    assert [f"/etc/prometheus/{name}" in mounted for name in prometheus["rule_files"]] == [True]
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["serve-llm:8000"]}] and "serve-llm" in services
    (secret,) = services["prometheus"]["secrets"]
    assert secret["target"] == job["authorization"]["credentials_file"]
    assert compose["secrets"][secret["source"]] == {"environment": "SERVE_LLM_API_KEY"}
    assert all("=" not in name for name in services["serve-llm"]["environment"]), "a key belongs into no file here"
    assert services["serve-llm"]["build"]["target"] in (ROOT / "Dockerfile").read_text()
    assert all(re.search(r":v?\d+\.\d+\.\d+$", one["image"]) for one in services.values() if "image" in one)
    assert job["job_name"] in EXPRESSIONS["alert ServeLlmDown"]


@pytest.mark.parametrize("page", ["README.md", "docs/deployment.md", "deploy/compose.yaml"])
def test_lines_that_start_compose_set_its_secret(page: str) -> None:
    """Without the variable, Compose refuses to start."""
    lines = [line for line in (DEPLOY.parent / page).read_text().splitlines() if "docker compose up" in line]
    assert lines and all("SERVE_LLM_API_KEY=" in line.partition("docker compose")[0] for line in lines)


def test_grafana_finds_the_dashboards() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "serve-llm.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    volumes = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    found = {Path(volume.split(":")[1]) for volume in volumes}
    for path in (DEPLOY / "grafana").glob("*.json"):
        assert Path(provider["options"]["path"]) / path.name in found
    assert len({shown["uid"] for shown in dashboards()}) == len(dashboards()) == 2
    for shown in dashboards():
        variable = shown["templating"]["list"][0]
        assert (variable["type"], variable["current"]["value"]) == ("datasource", source["uid"])


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", str(DEPLOY / "alerts.yaml")],
        ["check", "config", "--syntax-only", str(DEPLOY / "prometheus.yaml")],
        ["test", "rules", str(HERE / "alerts_test.yaml")],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool(arguments: list[str]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_no_fault_in_metrics_but_a_name_of_vllm() -> None:
    scrape = (ROOT / "docs" / "metrics-example.txt").read_text()
    check_metrics(scrape)
    for worse in (scrape + "broken line\n", scrape + "# TYPE other_total gauge\nother_total 1\n"):
        with pytest.raises(AssertionError):
            check_metrics(worse)


@needs_promtool
def test_promtool_reads_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    """The expressions are checked as rules, with Grafana's variables filled in."""
    rules = []
    for where, text in EXPRESSIONS.items():
        if where.startswith("panel"):
            filled = text.replace("$__rate_interval", "1m").replace("$model_name", ".*").replace("$instance", ".*")
            rules.append({"record": f"panel_{len(rules)}", "expr": filled})
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stdout + done.stderr
