"""Every dotted name in ARCHITECTURE.md exists, and there are few of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = sorted(
    set(
        re.findall(
            r"`((?:serve_llm|cli|common|server|engine|kernels)(?:\.\w+)+)`", (ROOT / "ARCHITECTURE.md").read_text()
        )
    )
)


def defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Return the names that a module or class body binds, each with its own body."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node.body
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = []
        elif isinstance(node, ast.Assign):
            found |= {target.id: [] for target in node.targets if isinstance(target, ast.Name)}
    return found


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        path = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if path.is_file():
            body = ast.parse(path.read_text()).body
            for part in parts[length:]:
                names = defined(body)
                if part not in names:
                    return False
                body = names[part]
            return True
    return False


def test_the_page_names_few_things() -> None:
    assert 30 < len(NAMES) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    assert exists(name)


def test_a_name_that_does_not_exist_is_found_out() -> None:
    assert exists("engine.loop.EngineCore.step")
    assert not exists("engine.loop.EngineCore.stride")
    assert not exists("engine.lop.Engine")
