"""What deploy/ asks Prometheus for: the expressions of the alert rules and of the Grafana dashboards."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from support.manifests import ROOT

DEPLOY = ROOT / "deploy"
PREFIX = "serve_llm_"


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))]


def expressions() -> dict[str, str]:
    """PromQL by where it stands."""
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
    """Our metrics in an expression, without the prefix."""
    return set(re.findall(rf"\b{PREFIX}(\w+)", text))
