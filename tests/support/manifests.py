"""The YAML files under deploy/, and the schemas of Kubernetes resources that they are checked against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CRDS = ROOT.parent / "shared" / "kuberay-crds"  # the kuberay project's own, so not in this repository

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a CRD has a megabyte


def documents(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return list(yaml.load_all(file, _Loader))


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Return every resource under deploy/kubernetes and deploy/kuberay: (name for a test, resource)."""
    found = []
    for folder in ("kubernetes", "kuberay"):
        for path in sorted((ROOT / "deploy" / folder).glob("*.yaml")):
            found += [(f"{path.name}:{resource['kind']}", resource) for resource in documents(path)]
    return found


def clusters(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of the Ray clusters in a resource: none or one."""
    if resource["kind"] == "RayCluster":
        return [resource["spec"]]
    return [resource["spec"]["rayClusterConfig"]] if resource["kind"] == "RayService" else []


def pods(resource: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (role, pod template) of each kind of pod that a resource creates; the role is daemon, head or worker."""
    if resource["kind"] == "Deployment":
        yield "daemon", resource["spec"]["template"]
    for cluster in clusters(resource):
        yield "head", cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield "worker", group["template"]


def crd_schema(plural: str) -> dict[str, Any]:
    """Return the strict JSON schema of a ray.io/v1 resource, which refuses unknown fields."""
    (crd,) = documents(CRDS / f"ray.io_{plural}.yaml")
    (version,) = (version for version in crd["spec"]["versions"] if version["name"] == "v1")
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert a structural OpenAPI schema, as Kubernetes writes them, to a JSON schema that refuses unknown fields.

    Fields with a default are not required: the API server fills them in before it validates.
    """
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {name: schema[name] for name in ("type", "enum", "pattern", "maxLength", "minLength") if name in schema}
    if "properties" in schema:
        properties = schema["properties"]
        result["properties"] = {name: strict(value) for name, value in properties.items()}
        result["required"] = [name for name in schema.get("required", ()) if "default" not in properties[name]]
        result["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = strict(schema["items"])
    return result
