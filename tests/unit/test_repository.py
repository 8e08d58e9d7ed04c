"""Rules for the repository as a whole: names, comments, packaging, and which modules a process imports when it
starts."""

import ast
import graphlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cli", "common", "server", "engine", "kernels", "serve_llm")
PRODUCT = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_class_name_is_defined_twice() -> None:
    """Private names count too: `_Packed` and `Packed` are as confusing as two classes of one name."""
    places = defaultdict(list)
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_modules_import_each_other() -> None:
    """Imports for types and inside functions count too."""
    modules = {}
    for path in PRODUCT:
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = () if parts[0] == "serve_llm" else ("serve_llm",)
        modules[".".join((*package, *parts)).removesuffix(".__init__")] = path
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        imports[name] = (found & modules.keys()) - {name}
    assert sum(map(len, imports.values())) > 1000
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_comments_are_sentences() -> None:
    """A comment that begins with "of" depends on the code before it for its noun."""
    found = []
    for path in PRODUCT:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and token.string.startswith("# of "):
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]}")
    assert found == []


@pytest.mark.parametrize("phrase", ["leave it away", "leave away", "Whoever"])
def test_phrases_that_are_not_english_or_not_plain(phrase: str) -> None:
    assert [str(path.relative_to(ROOT)) for path in PRODUCT if phrase in path.read_text()] == []


def test_every_folder_of_code_is_in_the_wheel() -> None:
    """An editable install, which tests use, would not notice."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT)
        for top in ("cli", "common", "server", "engine", "kernels")
        for path in ROOT.glob(f"{top}/**/*.py")
    }
    assert {f"serve_llm.{'.'.join(folder.parts)}" for folder in folders} <= set(listed)


def test_make_serve_installs_nothing_for_tests() -> None:
    def plan(target: str) -> str:
        command = ["make", "--dry-run", target, "VENV=.absent"]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout

    serve = plan("serve")
    assert "--editable .\n" in serve and "[dev]" not in serve
    assert "--editable '.[dev]'" in plan("test")
    assert plan("test").count("pip ") == 2, "one installation"


class FakeEnvironment:
    """The folder that `make serve` installs into, with programs that only record their arguments."""

    def __init__(self, folder: Path, failing_word: str = "none") -> None:
        self.folder = folder
        self._log = folder / "log"
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(sys.executable)
        self._add("serve-llm", f'echo "serve-llm $*" >>{self._log}')
        self._add("pip", f'echo "$PIP_NO_COMPILE $CPU_KERNELS $*" >>{self._log}\n[ {failing_word} != "$5" ]')

    def _add(self, name: str, script: str) -> None:
        program = self.folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def serve(self) -> tuple[int, list[str]]:
        """Run `make serve`. Returns the exit code and the calls, sorted."""
        command = ["make", "serve", f"VENV={self.folder}", "PYTHON=true", "ARGS=--version"]
        environ = {name: value for name, value in os.environ.items() if name not in ("CPU_KERNELS", "MAKEFLAGS")}
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env=environ, timeout=60)
        return done.returncode, sorted(self._log.read_text().splitlines())


def test_make_serve_installs_dependencies_and_package(tmp_path: Path) -> None:
    requirements = tmp_path / "dependencies.txt"
    pip = "--quiet --disable-pip-version-check install"
    assert FakeEnvironment(tmp_path).serve() == (
        0,
        [
            f"0  {pip} --requirement {requirements}",
            f"0 native {pip} --no-deps --editable .",
            "serve-llm demo --version",
        ],
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements.read_text().splitlines() == project["dependencies"]
    assert (tmp_path / ".serving").exists()


@pytest.mark.parametrize("which", ["--editable", "dependencies.txt"])
def test_make_serve_ends_if_an_installation_fails(tmp_path: Path, which: str) -> None:
    word = which if which.startswith("--") else str(tmp_path / which)
    code, calls = FakeEnvironment(tmp_path, word).serve()
    assert code != 0 and not any(call.startswith("serve-llm") for call in calls)
    assert not (tmp_path / ".serving").exists()


def test_make_sbom_lists_a_new_environment() -> None:
    """Not .venv, which may hold development tools."""
    command = ["make", "--dry-run", "sbom", "VENV=.absent"]
    plan = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout
    assert ".absent" not in plan and "[dev]" not in plan and "--clear --without-pip build/sbom/serving" in plan
    assert "--python build/sbom/serving/bin/python install .\n" in plan


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert len(targets) > 20 and [target for target in targets if not (ROOT / target).exists()] == []


def test_our_kernels_folder_is_not_importable_as_kernels() -> None:
    """Hugging Face has a package of that name, and transformers checks whether it exists."""
    spec = importlib.util.find_spec("kernels")
    found = [] if spec is None else [*(spec.submodule_search_locations or []), spec.origin or ""]
    assert not any(Path(place).is_relative_to(ROOT / "kernels") for place in found), "run with PYTHONSAFEPATH=1"


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "common.types common.options.sources common.errors common.messages common.hub common.logs "
            "server.engines.client engine.config engine.model.spec engine.model.registry",
            "torch transformers",
        ),
        ("common.options.sources", "torch transformers numpy huggingface_hub zmq yaml"),  # --help waits for these
    ],
)
def test_modules_load_without(modules: str, unwanted: str) -> None:
    loaded = loaded_by("; ".join(f"import serve_llm.{name}" for name in modules.split()))
    assert loaded.isdisjoint(unwanted.split())


def test_server_loads_without_torch() -> None:
    """Checks third-party packages too, which import-linter does not inspect."""
    loaded = loaded_by("import serve_llm.server.app, serve_llm.server.daemon, serve_llm.cli.main")
    assert loaded.isdisjoint({"torch", "transformers"}) and "fastapi" in loaded


def test_public_face_loads_without_torch() -> None:
    assert loaded_by("from serve_llm import LLM, SamplingParams").isdisjoint({"torch", "transformers", "fastapi"})
    assert "pydantic" not in loaded_by("import serve_llm")


def test_public_face_answers_for_the_names_of_vllm() -> None:
    with pytest.raises(ImportError, match="serve_llm has no StructuredOutputsParams: use StructuredOutputs"):
        from serve_llm import StructuredOutputsParams  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from serve_llm import Nonsense  # type: ignore[attr-defined]  # noqa: F401


def loaded_by(statements: str) -> set[str]:
    """Return the names of the top-level modules that a fresh interpreter has loaded after the statements."""
    code = f"{statements}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())
