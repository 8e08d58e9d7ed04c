"""`make sdist`, and a wheel from its archive: nothing is missing, and neither needs torch or a compiler."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from serve_llm.kernels.cpu import library

ROOT = Path(__file__).parents[2]
FOLDERS = ("serve_llm/", "cli/", "common/", "server/", "engine/", "kernels/")
BUILD = """
import sys
sys.modules["torch"] = None
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


def list_tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip("not a git repository")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def build(hook: str, source: Path, target: Path) -> Path:
    """Build as pip and `python -m build` do, with this environment's setuptools, as if there were no compiler."""
    environ = os.environ | {"CC": "false", "CXX": "false", "CPU_KERNELS": "native", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", BUILD, hook, str(target)]
    done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


@pytest.mark.slow
def test_the_archive_and_its_wheel_are_complete(tmp_path: Path) -> None:
    tracked = list_tracked()
    source = tmp_path / "source"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(build("build_sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    kernels = {name for name in tracked if name.startswith("kernels/cpu/")}
    assert {f"kernels/cpu/{path.name}" for path in (unpacked / "kernels" / "cpu").iterdir()} == kernels
    with zipfile.ZipFile(build("build_wheel", unpacked, tmp_path / "wheel")) as wheel:
        found = set(wheel.namelist())
    modules = [name for name in tracked if name.endswith(".py") and name.startswith(FOLDERS)]
    data = [name for name in tracked if name.startswith(("serve_llm/demo/", "server/web_ui/"))]
    expected = {f"serve_llm/{name.removeprefix('serve_llm/')}" for name in modules + data}
    assert expected - found == set() and len(modules) > 400


def test_the_command_that_tries_a_wheel(tmp_path: Path) -> None:
    """`make wheels` runs it on each wheel. This test runs it with this environment's kernels, and then without any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    program, *arguments = shlex.split(settings["test-command"])
    assert program == "python"
    here = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (here.returncode == 0) == (library.find_variant() is not None), here.stderr
    without = arguments[-1].replace("find_variant as find;", "find_variant as find; find = lambda: None;")
    none = subprocess.run([sys.executable, "-P", "-c", without], capture_output=True, text=True, timeout=60)
    assert none.returncode == 1 and "AssertionError" in none.stderr
