"""The Kubernetes manifests satisfy KubeRay's own schemas, and match the daemon and each other.

KubeRay's schema of a RayCluster contains those of a pod template and of a Service, so these check the plain Deployments
and Services as well.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import jsonschema
import pytest
import yaml

from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import parse_args
from serve_llm.server.engines.process import STOP_SECONDS
from support.manifests import CRDS, ROOT, clusters, crd_schema, manifests, pods

Json = dict[str, Any]
MANIFESTS = manifests()
PODS = [(f"{name}:{role}", role, template) for name, resource in MANIFESTS for role, template in pods(resource)]
CLUSTERS = [(name, cluster) for name, resource in MANIFESTS for cluster in clusters(resource)]

every_manifest = pytest.mark.parametrize("resource", [one for _, one in MANIFESTS], ids=[name for name, _ in MANIFESTS])
every_pod = pytest.mark.parametrize(("role", "template"), [pod[1:] for pod in PODS], ids=[pod[0] for pod in PODS])
every_cluster = pytest.mark.parametrize("cluster", [one for _, one in CLUSTERS], ids=[name for name, _ in CLUSTERS])
needs_crds = pytest.mark.skipif(not CRDS.is_dir(), reason=f"no KubeRay schemas in {CRDS}")


@pytest.fixture(scope="module")
def validators() -> dict[str, Any]:
    """Return the validators by kind; `Pod` is a pod template."""
    cluster, service = crd_schema("rayclusters"), crd_schema("rayservices")
    head = cluster["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]
    schemas = {"RayCluster": cluster, "RayService": service, "Service": head["headService"], "Pod": head["template"]}
    return {kind: jsonschema.Draft202012Validator(schema) for kind, schema in schemas.items()}


def container(template: Json) -> Json:
    (found,) = template["spec"]["containers"]
    return dict(found)


def environ(template: Json) -> dict[str, Json]:
    return {entry["name"]: entry for entry in container(template).get("env", [])}


def test_there_is_what_the_readme_promises() -> None:
    kinds = [name for name, _ in MANIFESTS]
    assert {"raycluster.yaml:RayCluster", "rayservice.yaml:RayService", "podmonitor.yaml:PodMonitor"} <= set(kinds)
    assert {"serve-llm.yaml:Deployment", "serve-llm.yaml:Service", "raycluster.yaml:Deployment"} <= set(kinds)


@needs_crds
@every_manifest
def test_the_schema_accepts_it(resource: Json, validators: dict[str, Any]) -> None:
    kind = resource["kind"]
    if kind in validators:
        validators[kind].validate(resource)
    for _, template in pods(resource):
        validators["Pod"].validate(template)


FAULTS = {
    "a typo in a key": ("RayCluster", ["spec", "headGroupSpecs"], {}),
    "a number as text": ("RayCluster", ["spec", "workerGroupSpecs", 0, "replicas"], "two"),
    "text as a number": ("RayCluster", ["spec", "headGroupSpec", "rayStartParams", "num-cpus"], 0),
    "a typo deep down": ("RayService", ["spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "volume"], []),
    "a typo in a probe": ("Pod", ["spec", "containers", 0, "readinessProbe", "periodSecond"], 5),
    "a list for a map": ("Pod", ["spec", "containers", 0, "resources", "limits"], ["8Gi"]),
    "a port without number": ("Service", ["spec", "ports", 0], {"name": "http"}),
}


@needs_crds
@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_refuses(fault: str, validators: dict[str, Any]) -> None:
    kind, path, value = FAULTS[fault]
    whole = next(one for _, one in MANIFESTS if one["kind"] == ("Deployment" if kind == "Pod" else kind))
    resource = copy.deepcopy(whole["spec"]["template"] if kind == "Pod" else whole)
    validators[kind].validate(resource)
    at: Any = resource
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validators[kind].validate(resource)


@every_cluster
def test_what_kuberays_operator_demands(cluster: Json) -> None:
    """The operator validates specs after the schema."""
    (default,) = re.findall(r"^ARG RAY_VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert cluster["rayVersion"] == default
    for group in cluster["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        assert "num-gpus" not in group["rayStartParams"], "Ray takes it from the limits"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"


@every_manifest
def test_names_fit(resource: Json) -> None:
    """KubeRay appends to names; RayService names have at most 47 characters."""
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", resource["metadata"]["name"])


@every_pod
def test_a_pod_is_locked_down(role: str, template: Json) -> None:
    spec, security = template["spec"], container(template)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
    assert spec["automountServiceAccountToken"] is False
    assert security["allowPrivilegeEscalation"] is False and security["capabilities"]["drop"] == ["ALL"]
    assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}


@every_pod
def test_gpus_shared_memory_and_models(role: str, template: Json) -> None:
    resources = container(template)["resources"]
    gpus = resources["limits"].get("nvidia.com/gpu")
    assert resources["requests"].get("nvidia.com/gpu") == gpus, "Kubernetes refuses GPUs that differ"
    assert (gpus is None) == (role == "head" or "RAY_ADDRESS" in environ(template))
    if role == "head":
        return
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(template)["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory" and mounts["/dev/shm"]["emptyDir"]["sizeLimit"]
    assert "persistentVolumeClaim" in mounts["/home/serve/.cache/huggingface"]
    if gpus is not None:
        assert container(template)["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


@every_pod
def test_secrets_come_from_secrets(role: str, template: Json) -> None:
    for name, entry in environ(template).items():
        if re.search("TOKEN|KEY|SECRET", name):
            assert set(entry["valueFrom"]) == {"secretKeyRef"}, name
    wanted = {"daemon": {"HF_TOKEN", "SERVE_LLM_API_KEY"}}.get(role, set())
    assert wanted <= set(environ(template))


DAEMONS = [(name, template) for name, role, template in PODS if role == "daemon"]


@pytest.mark.parametrize("template", [one for _, one in DAEMONS], ids=[name for name, _ in DAEMONS])
def test_probes_and_drain(template: Json) -> None:
    daemon = container(template)
    paths = {kind: daemon[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    ports = {port["name"] for port in daemon["ports"]}
    assert all(daemon[f"{kind}Probe"]["httpGet"]["port"] in ports for kind in paths)
    assert daemon["startupProbe"]["periodSeconds"] * daemon["startupProbe"]["failureThreshold"] >= 3600
    (command, seconds) = daemon["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert (
        template["spec"]["terminationGracePeriodSeconds"] >= float(seconds) + Options.drain_timeout + 2 * STOP_SECONDS
    )


@pytest.mark.parametrize("file", ["serve-llm.yaml", "raycluster.yaml"])
def test_who_selects_finds(file: str) -> None:
    """Deployment, Service and PodMonitor select the same pods and the same port."""
    mine = {name.partition(":")[2]: one for name, one in MANIFESTS if name.startswith(file)}
    monitor = next(one for name, one in MANIFESTS if name.endswith(":PodMonitor"))
    template = mine["Deployment"]["spec"]["template"]
    labels, ports = template["metadata"]["labels"], {port["name"] for port in container(template)["ports"]}
    assert mine["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert mine["Service"]["spec"]["selector"].items() <= labels.items()
    assert {port["targetPort"] for port in mine["Service"]["spec"]["ports"]} <= ports
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items() and endpoint["port"] in ports
    assert (
        endpoint["authorization"]["credentials"] == environ(template)["SERVE_LLM_API_KEY"]["valueFrom"]["secretKeyRef"]
    )


def test_the_single_nodes_arguments_are_options() -> None:
    template = next(one for name, one in DAEMONS if name.startswith("serve-llm.yaml"))
    options = parse_args(container(template)["args"], {})
    assert isinstance(options, Options) and options.device == "cuda"


def test_what_kubernetes_says_of_its_services_is_not_taken_for_options() -> None:
    """A Service called serve-llm puts these variables into every pod."""
    said = {
        "SERVE_LLM_SERVICE_HOST": "10.1.1.1",
        "SERVE_LLM_SERVICE_PORT_HTTP": "80",
        "SERVE_LLM_PORT": "tcp://10.1.1.1:80",
    }
    assert parse_args(["demo"], said).port == 8000


def test_the_ray_service_runs_the_example() -> None:
    """Its import_path is in the image, and on the path of the pods that import it."""
    service = next(one for _, one in MANIFESTS if one["kind"] == "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    assert f"\ndef {function}(" in (ROOT / "examples" / f"{module}.py").read_text()
    assert "COPY examples /opt/serve-llm/examples\n" in (ROOT / "Dockerfile").read_text()
    for _, template in pods(service):
        assert environ(template)["PYTHONPATH"]["value"] == "/opt/serve-llm/examples"
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    gpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    arguments = application["args"]
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (gpus, group["replicas"])


def test_the_daemon_joins_the_cluster_that_is_there() -> None:
    mine = {name.partition(":")[2]: one for name, one in MANIFESTS if name.startswith("raycluster.yaml")}
    cluster, template = mine["RayCluster"], mine["Deployment"]["spec"]["template"]
    name, env = cluster["metadata"]["name"], environ(template)
    assert env["RAY_ADDRESS"]["value"] == f"{name}-head-svc:6379"
    assert cluster["spec"]["authOptions"]["mode"] == env["RAY_AUTH_MODE"]["value"] == "token"
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    assert "RAY_ADDRESS" in container(template)["args"][0]
    group = cluster["spec"]["workerGroupSpecs"][0]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"-tp {gpus} -pp {group['replicas']} --distributed-executor-backend ray" in container(template)["args"][0]
