"""What must hold for the repository as a whole: who imports whom when a process really starts."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_folder_of_code_is_in_the_wheel() -> None:
    """An editable install, which tests use, would not notice."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT) for top in ("server", "engine", "kernels") for path in ROOT.glob(f"{top}/**/*.py")
    }
    assert {f"serve_llm.{'.'.join(folder.parts)}" for folder in folders} <= set(listed)


def test_our_kernels_folder_is_not_importable_as_kernels() -> None:
    """Hugging Face has a package of that name, and transformers looks whether it is there."""
    spec = importlib.util.find_spec("kernels")
    found = [] if spec is None else [*(spec.submodule_search_locations or []), spec.origin or ""]
    assert not any(Path(place).is_relative_to(ROOT / "kernels") for place in found), "run with PYTHONSAFEPATH=1"


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("types options errors wire hub client logs config model.spec model.registry", "torch transformers"),
        ("options", "torch transformers numpy huggingface_hub zmq yaml"),  # what --help waits for
    ],
)
def test_engine_seam_loads_without(modules: str, unwanted: str) -> None:
    loaded = loaded_by("; ".join(f"import serve_llm.engine.{name}" for name in modules.split()))
    assert loaded.isdisjoint(unwanted.split())


def test_server_loads_without_torch() -> None:
    """Third parties included, which import-linter does not look into."""
    loaded = loaded_by("import serve_llm.server.app, serve_llm.server.__main__")
    assert loaded.isdisjoint({"torch", "transformers"}) and "fastapi" in loaded


def test_public_face_loads_without_torch() -> None:
    assert loaded_by("from serve_llm import LLM, SamplingParams").isdisjoint({"torch", "transformers", "fastapi"})
    assert "pydantic" not in loaded_by("import serve_llm")


def loaded_by(statements: str) -> set[str]:
    """Names of the top-level modules in a fresh interpreter after the statements."""
    code = f"{statements}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())
