"""Properties of the Dockerfile that can be checked without building it: no secrets in layers, no root user, and so
on."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from serve_llm.cli import container_health

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text()
SECRET = re.compile(r"token|api_?key|password|secret|credential", re.IGNORECASE)


class Line(NamedTuple):
    instruction: str
    rest: str


def stages(text: str) -> dict[str, list[Line]]:
    """Return the stages by name, each with the lines of its base stages before its own."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    found: dict[str, list[Line]] = {}
    current: list[Line] = []
    for text_line in filter(str.strip, joined.splitlines()):
        line = Line(*re.split(r"\s+", text_line.strip(), maxsplit=1))
        if line.instruction == "FROM":
            base, _, name = line.rest.split()
            current = found[name] = list(found.get(base, []))
        current.append(line)
    return found


STAGES = stages(TEXT)
IMAGES = ("cuda", "cpu")


def all_of(image: str, instruction: str) -> list[str]:
    return [line.rest for line in STAGES[image] if line.instruction == instruction]


def test_the_stages() -> None:
    assert set(STAGES) == {"build", "runtime", *IMAGES}
    bases = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert all(base in STAGES or re.search(r":[\w.-]*\d", base) for base in bases), "a base image without a version"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image(image: str) -> None:
    assert all_of(image, "USER")[-1] == "serve" and STAGES[image][-1].instruction == "USER"
    (check,) = all_of(image, "HEALTHCHECK")
    assert "--start-period" in check
    assert "PYTHONSAFEPATH=1" in " ".join(all_of(image, "ENV"))
    assert any("install" in rest and "wget" in rest for rest in all_of(image, "RUN")), (
        "KubeRay runs it in the container"
    )
    assert all_of(image, "ENTRYPOINT") == ['["serve-llm"]']


def test_the_healthcheck_is_a_program_of_ours() -> None:
    """test_container_health.py runs it."""
    (check,) = all_of("cpu", "HEALTHCHECK")
    assert json.loads(check[check.index("[") :]) == ["python", "-m", container_health.__name__]


@pytest.mark.parametrize("stage", STAGES)
def test_no_secret_in_a_layer(stage: str) -> None:
    for line in STAGES[stage]:
        if line.instruction in ("ENV", "ARG"):
            names = re.findall(r"(\w+)=", line.rest) or [line.rest]
            assert not any(SECRET.search(name) for name in names), line
        if line.instruction in ("COPY", "ADD"):
            assert line.rest.split()[0] != "." and line.instruction == "COPY", "the whole folder may hold secrets"


def test_what_is_copied_exists() -> None:
    for stage in ("build", "runtime"):
        for rest in all_of(stage, "COPY"):
            if not rest.startswith("--from"):
                assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest


def test_versions_are_pinned() -> None:
    """torch and Ray are pinned: they decide whether a GPU works and whether nodes understand each other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(re.fullmatch(r"torch==[\d.]+", dependency) for dependency in project["dependencies"])
    install = next(rest for rest in all_of("build", "RUN") if "pip install" in rest)
    assert '".[ray]"' in install and "ray[default,serve]==${RAY_VERSION}" in install
    assert any(re.fullmatch(r"RAY_VERSION=\d+\.\d+\.\d+", rest) for rest in all_of("build", "ARG"))
    assert "--no-cache-dir" in install


def test_an_image_keeps_no_package_lists() -> None:
    for stage in STAGES:
        for rest in all_of(stage, "RUN"):
            assert "apt-get install" not in rest or (
                "--no-install-recommends" in rest and "rm -rf /var/lib/apt" in rest
            )


def test_faults_are_found() -> None:
    bad = "FROM debian:12 AS cpu\nENV HF_TOKEN=x \\\n  A=1\n# USER serve\nUSER root\n"
    assert stages(bad)["cpu"][1:] == [Line("ENV", "HF_TOKEN=x    A=1"), Line("USER", "root")]
    assert SECRET.search("HF_TOKEN")
