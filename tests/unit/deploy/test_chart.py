"""The Helm chart: its renderings satisfy the schemas, match the daemon, and equal those in the repository.

The renderings under deploy/helm/rendered are checked everywhere. The extra `deploy` installs Helm as a library, which
renders them anew, and Kubernetes' own schemas.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serve_llm.cli.front_end import read_options as read_front_end_options
from serve_llm.common.options.sources import parse_args
from support.manifests import CRDS, ROOT, crd_schema, documents

Json = dict[str, Any]
HELM = ROOT / "deploy" / "helm"
CHART = HELM / "serve-llm"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NAMES = sorted(path.stem for path in (HELM / "examples").glob("*.yaml"))
RENDERED = {name: documents(HELM / "rendered" / f"{name}.yaml") for name in NAMES}
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")

every_example = pytest.mark.parametrize("name", NAMES)
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"no KubeRay schemas in {CRDS}")
needs_helm = pytest.mark.skipif(importlib.util.find_spec("helm_python") is None, reason="needs helm-python-sdk")


def find(name: str, *kinds: str) -> list[Json]:
    return [resource for resource in RENDERED[name] if resource["kind"] in kinds]


def find_server(name: str) -> Json:
    """Return the workload that has the engines."""
    (found,) = [one for one in find(name, *WORKLOADS) if one["metadata"]["labels"]["app"] == "serve-llm"]
    return found


def pod_templates(name: str) -> list[Json]:
    """Return the server's pod templates, the one that serves HTTP first."""
    workload = find_server(name)
    group = workload["spec"].get("leaderWorkerTemplate")
    return [group["leaderTemplate"], group["workerTemplate"]] if group else [workload["spec"]["template"]]


def container(template: Json) -> Json:
    (found,) = template["spec"]["containers"]
    return dict(found)


def read_options(name: str) -> list[str]:
    """Return the options of serve-llm on the pod that serves HTTP, except those that depend on the node's number."""
    arguments = list(map(str, container(pod_templates(name)[0])["args"]))
    return arguments[2:] if arguments[1] == "serve-llm" else arguments


def test_there_is_an_example_of_each_kind() -> None:
    kinds = {resource["kind"] for name in NAMES for resource in RENDERED[name]}
    assert kinds == {
        *WORKLOADS,
        "Service",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "HorizontalPodAutoscaler",
        "ScaledObject",
        "ServiceMonitor",
    }


def test_the_schema_names_every_value_and_no_other() -> None:
    def compare(values: Json, schema: Json, where: str) -> None:
        if schema.get("additionalProperties") is False:
            assert set(values) == set(schema["properties"]) - {"global"}, where
            for key, value in values.items():
                if isinstance(value, dict):
                    compare(value, schema["properties"][key], f"{where}.{key}")

    compare(VALUES, SCHEMA, "values")
    jsonschema.validate(VALUES, SCHEMA)


@every_example
def test_the_options_are_those_of_the_daemon(name: str) -> None:
    values = yaml.safe_load((HELM / "examples" / f"{name}.yaml").read_text())
    jsonschema.validate(VALUES | values, SCHEMA)
    options = parse_args(read_options(name), {"SERVE_LLM_CLUSTER_SECRET": "s"})
    parallel = VALUES["parallel"] | values.get("parallel", {})
    assert options.model == values.get("model", VALUES["model"])
    assert (options.tensor_parallel_size, options.pipeline_parallel_size) == (parallel["tensor"], parallel["pipeline"])
    assert options.front_ends == values.get("frontEnds", 1)
    gpus = container(pod_templates(name)[0])["resources"]["limits"].get("nvidia.com/gpu")
    ranks = parallel["tensor"] * parallel["pipeline"] * parallel["data"]
    assert gpus == (str(ranks // parallel["nodes"]) if options.device == "cuda" else None)


def test_its_version_is_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def labels_of(template: Json) -> Json:
    """Return a pod's labels, with those that Kubernetes adds to the first pod."""
    added = {"apps.kubernetes.io/pod-index": "0", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    return dict(template["metadata"]["labels"]) | added


def test_pods_of_front_ends_join_the_server() -> None:
    """They use the server's name, port and secret, through a network policy that admits them alone."""
    server, front_ends = find("front-ends", "Deployment")
    template = front_ends["spec"]["template"]
    program = container(template)
    command, *arguments = map(str, program["args"])
    assert command == "front-end"
    secret = {"SERVE_LLM_CLUSTER_SECRET": "s"}
    options = read_front_end_options(arguments, secret)
    assert options.front_ends == VALUES["frontEndPods"]["frontEnds"] and options.front_end_addr is not None
    host, port = options.front_end_addr.split(":")
    served = parse_args(read_options("front-ends"), secret)
    assert served.front_end_addr == f"0.0.0.0:{port}"
    services = {service["metadata"]["name"]: service["spec"] for service in find("front-ends", "Service")}
    joining = services[host]
    assert joining["publishNotReadyAddresses"], "front ends load while the server loads"
    assert joining["selector"].items() <= labels_of(server["spec"]["template"]).items()
    assert int(port) in {one["port"] for one in joining["ports"]}
    assert services["llm"]["selector"].items() <= labels_of(template).items(), "clients reach the front ends"
    environ = [{one["name"]: one["valueFrom"] for one in found["env"]} for found in (program, container(pod("server")))]
    assert environ[0]["SERVE_LLM_CLUSTER_SECRET"] == environ[1]["SERVE_LLM_CLUSTER_SECRET"]
    assert "nvidia.com/gpu" not in program["resources"]["limits"]
    (policy,) = [one for one in find("front-ends", "NetworkPolicy") if one["metadata"]["name"] == "llm"]
    (rule,) = policy["spec"]["ingress"][1:]
    assert rule["ports"] == [{"port": "front-ends", "protocol": "TCP"}]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= labels_of(template).items()


def pod(kind: str) -> Json:
    """Return a pod template of the example with front ends: "server" or "front-end"."""
    found: Json = find("front-ends", "Deployment")[kind == "front-end"]["spec"]["template"]
    return found


def test_what_selects_pods_selects_one_kind_only() -> None:
    kinds = [labels_of(pod("server")), labels_of(pod("front-end"))]
    counts: dict[str, list[int]] = {}
    for resource in RENDERED["front-ends"]:
        spec = resource["spec"]
        selector = spec.get("podSelector", spec.get("selector", {}))
        selector = selector.get("matchLabels", selector)
        if selector and resource["kind"] != "ServiceMonitor":
            selected = [selector.items() <= labels.items() for labels in kinds]
            assert sum(selected) == 1, resource["metadata"]["name"]
            counts.setdefault(resource["kind"], [0, 0])[selected.index(True)] += 1
    both = {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    assert counts == {kind: [1, 1] for kind in both}
    (scaler,) = find("front-ends", "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == find("front-ends", "Deployment")[1]["metadata"]["name"]
    assert "replicas" not in find("front-ends", "Deployment")[1]["spec"]


@needs_crds
@every_example
def test_the_schema_of_a_pod_accepts_it(name: str) -> None:
    head = crd_schema("rayclusters")["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]
    front_ends = [pod("front-end")] if name == "front-ends" else []
    for template in pod_templates(name) + front_ends:
        jsonschema.validate(template, head["template"])
    for service in find(name, "Service"):
        jsonschema.validate(service, head["headService"])


@every_example
def test_kubernetes_schemas_accept_it(name: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    custom = ("LeaderWorkerSet", "ScaledObject", "ServiceMonitor")
    checked = [resource for resource in RENDERED[name] if resource["kind"] not in custom]
    for resource in checked:
        kubernetes.validate(resource, kubernetes.latest_version(), strict=True)
    assert len(checked) >= 3


@every_example
def test_who_selects_finds(name: str) -> None:
    if name == "front-ends":  # see `test_what_selects_pods_selects_one_kind_only`
        return
    templates = pod_templates(name)
    labels = labels_of(templates[0])
    ports = {port["name"] for port in container(templates[0])["ports"]}
    for service in find(name, "Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port.get("targetPort", port["name"]) for port in service["spec"]["ports"]} <= ports
    for policy in find(name, "NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["spec"]["ingress"][0]["ports"] == [{"port": "http", "protocol": "TCP"}]
        assert (len(policy["spec"]["ingress"]) == 2) == ("nodes" in ports)
    (budget,) = find(name, "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    workload = find_server(name)
    for scaler in find(name, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (workload["apiVersion"], workload["kind"])
        assert target["name"] == workload["metadata"]["name"] and "replicas" not in workload["spec"]
        assert "serve_llm_num_requests_waiting" in yaml.safe_dump(scaler)


@every_example
def test_prometheus_finds_the_server_once(name: str) -> None:
    """Front ends would also return the server's figures."""
    for monitor in find(name, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in find(name, "Service") if wanted <= one["metadata"]["labels"].items()]
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "serve-llm"
        assert service["spec"]["selector"].items() <= labels_of(pod_templates(name)[0]).items()
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("name", ["statefulset", "leaderworkerset"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_runs_its_part(name: str, rank: int, tmp_path: Path) -> None:
    """Runs the pod's own command, with a serve-llm that prints its arguments."""
    program = tmp_path / "serve-llm"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    found = container(pod_templates(name)[min(rank, len(pod_templates(name)) - 1)])
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOSTNAME": f"llm-{rank}",
        "LWS_WORKER_INDEX": str(rank),
        "LWS_LEADER_ADDRESS": "llm-0.llm.serve-llm",
    }
    command = [*found["command"], *map(str, found["args"])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    options = parse_args(run.stdout.splitlines(), {})
    assert (options.nnodes, options.node_rank) == (2, rank)
    assert options.master_addr in ("llm-0.llm-nodes:29500", "llm-0.llm.serve-llm:29500")
    assert options.tensor_parallel_size == (8 if rank == 0 else 1), "the others need nothing else"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_pod_of_a_stateful_set_is_asked(rank: int, tmp_path: Path) -> None:
    (tmp_path / "wget").write_text("#!/bin/bash\nexit 7\n")
    (tmp_path / "wget").chmod(0o755)
    command = container(pod_templates("statefulset")[0])["readinessProbe"]["exec"]["command"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": f"llm-{rank}"}
    assert subprocess.run(command, env=environment, timeout=60).returncode == (7 if rank == 0 else 0)


@needs_helm
def test_the_renderings_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "tools" / "render_chart.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "x"}, "modle"),
        ({"parallel": {"tensor": 0}}, "tensor"),
        ({"parallel": {"tensor": 3, "nodes": 2}}, "3 ranks cannot be spread evenly over 2 nodes"),
        ({"parallel": {"tensor": 2, "nodes": 2}, "replicas": 2}, "a StatefulSet is one copy"),
        ({"frontEndPods": {"replicas": 2}, "replicas": 2}, "they join one server"),
        ({"frontEndPods": {"replicas": 2}, "autoscaling": {"kind": "hpa"}}, "they join one server"),
    ],
)
def test_values_that_cannot_work_are_refused(values: Json, message: str) -> None:
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart, pytest.raises(helm_python.HelmError, match=re.escape(message)):
        chart.render(values, name="llm", namespace="serve-llm")
