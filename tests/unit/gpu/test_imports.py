"""The GPU check's imports are available on its machine: each part is imported with everything else hidden."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.gpu_check import ROOT, load_module

check, wheels = load_module("check"), load_module("wheels")

# Finders that see only the standard library and the allowed names. Prints what could not be imported, and why.
IMPORT_ALL = """
import ast, importlib, json, pkgutil, sys, sysconfig, types

allowed = {*json.loads(sys.argv[1]), *sys.stdlib_module_names}
sysconfig.get_config_vars()  # from a module that is no name of the standard library


class Visible:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return self._finder.find_spec(name, path, target) if name.partition(".")[0] in allowed else None

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = [Visible(finder) for finder in sys.meta_path]
names = json.loads(sys.argv[2])
if not names:
    import parts, serve_llm.engine, serve_llm.kernels, serve_llm.server

    for package in (parts, serve_llm.server, serve_llm.engine, serve_llm.kernels):
        names += [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
failed = {}
for name in names:
    if name.endswith("__main__") and not name.startswith("serve_llm."):
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = repr(error)
for name, module in list(sys.modules.items()):
    if name.startswith("parts.") and module.__file__:
        with open(module.__file__) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = vars(module).get(node.value.id)
                if isinstance(owner, types.ModuleType) and not hasattr(owner, node.attr):
                    failed[f"{name}, line {node.lineno}"] = f"there is no {node.value.id}.{node.attr}"
print(json.dumps([len(names), failed]))
"""


NO_MODULES = {"serve_llm.kernels.cpu.compiled"}  # a library of C functions
# Packages of extras that the check does not need; OpenTelemetry's exporter needs protobuf, which is `google`.
OPTIONAL = tuple(f"No module named '{name}" for name in ("ray", "opentelemetry", "google"))


def is_optional(why: str) -> bool:
    return any(reason in why for reason in OPTIONAL)


def with_needs(names: Iterable[str]) -> set[str]:
    """Return the distributions and their dependencies, except for those that are not installed here."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in needs:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(canonicalize_name(need.name))
    return found


def import_names(distributions: set[str]) -> set[str]:
    owners = importlib.metadata.packages_distributions()
    return {top for top, names in owners.items() if distributions & {canonicalize_name(name) for name in names}}


def import_all(tmp_path: Path, allowed: set[str], names: Iterable[str] = ()) -> tuple[int, dict[str, str]]:
    """Import modules. Returns their number, and why some failed. names: defaults to parts and product."""
    tree = {path.stem for folder in ("tests", "tests/gpu") for path in (ROOT / folder).iterdir()}
    words = [json.dumps(sorted(allowed | tree | {"serve_llm"})), json.dumps(list(names))]
    environ = check.environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", IMPORT_ALL, *words], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    count, failed = json.loads(done.stdout.splitlines()[-1])
    return count, failed


@pytest.mark.slow
def test_each_part_imports_with_what_the_machine_has_and_the_wheels(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    allowed = import_names(with_needs([*wheels.PRESENT, *wheels.PACKAGES]))
    assert {"torch", "triton", "uvloop", "prometheus_client"} <= allowed and not {"pytest", "ray"} & allowed
    count, failed = import_all(tmp_path, allowed)
    missed = {name: why for name, why in failed.items() if name not in NO_MODULES and not is_optional(why)}
    assert count > 100 and missed == {}


def test_a_package_that_is_not_brought_is_missed(tmp_path: Path) -> None:
    allowed = import_names(with_needs([*wheels.PRESENT, *wheels.PACKAGES]))
    _, failed = import_all(tmp_path, allowed - {"uvloop"}, ["bench.load", "bench.roofline"])
    assert list(failed) == ["bench.load"] and "uvloop" in failed["bench.load"]


def test_wheels_are_fetched_in_the_versions_that_the_product_asks_for() -> None:
    found = {Requirement(text).name: Requirement(text).specifier for text in wheels.requirements()}
    assert list(found) == list(wheels.PACKAGES)
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        assert found.get(requirement.name, requirement.specifier) == requirement.specifier
    assert all(found.values()), "every package has a lower bound"


def test_wheels_of_packages_that_are_installed_here_would_be_found() -> None:
    """pip only accepts wheels with the tags that it is given."""
    told = {*wheels.PLATFORMS, "any"}
    for name in wheels.PACKAGES:
        lines = (importlib.metadata.distribution(name).read_text("WHEEL") or "").splitlines()
        platforms = {word for line in lines if line.startswith("Tag:") for word in line.rsplit("-", 1)[1].split(".")}
        assert platforms & told or not any("manylinux" in one and "x86_64" in one for one in platforms), (
            name,
            platforms,
        )
