"""The PromQL expressions of the alert rules and Grafana dashboards in deploy/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from support.manifests import ROOT

DEPLOY = ROOT / "deploy"
PREFIX = "serve_llm_"


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


# The only complaint of `promtool check metrics`, which then exits with 3: the name is vLLM's.
COMPLAINT = f'{PREFIX}iteration_tokens_total non-counter metrics should not have "_total" suffix'


def check_metrics(scrape: str) -> None:
    """Raise AssertionError if `promtool check metrics` finds anything else in a reply of /metrics."""
    done = subprocess.run(["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", COMPLAINT + "\n")


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))]


def expressions() -> dict[str, str]:
    """Return PromQL by its location."""
    found = {f"alert {rule['alert']}": str(rule["expr"]) for rule in alert_rules()}
    for shown in dashboards():
        uid = shown["uid"]
        for panel in shown["panels"]:
            for target in panel.get("targets", []):
                found[f"panel {uid} {panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
        for variable in shown["templating"]["list"]:
            if variable["type"] == "query":
                found[f"variable {uid} {variable['name']}"] = variable["query"]
    return found


def metric_names(text: str) -> set[str]:
    """Return our metrics in an expression, without the prefix."""
    return set(re.findall(rf"\b{PREFIX}(\w+)", text))
