"""docs/features.md: every pair of features has a test that exists or a refusal that the product gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import load_script

ROOT = Path(__file__).parents[2]
PRODUCT = ("cli", "common", "engine", "kernels", "server", "serve_llm")


@pytest.fixture(scope="module")
def features_page() -> ModuleType:
    return load_script(ROOT / "tools" / "features_page.py")


def find_tests(path: Path) -> set[str]:
    """Names of a file's tests, those of classes as CLASS::NAME."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def list_texts() -> Iterator[str]:
    """Texts in the product's code, with {} for what an f-string puts in."""
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                    yield "".join(parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_pair_is_there_once(features_page: ModuleType) -> None:
    pairs = features_page.read_pairs()
    found = [*pairs.tested, *pairs.refused, *pairs.untested]
    assert sorted(found) == sorted(pairs.list_expected())


def test_the_tests_exist(features_page: ModuleType) -> None:
    known: dict[str, set[str]] = {}
    for pair, test in features_page.read_pairs().tested.items():
        file, _, name = test.partition("::")
        if file not in known:
            known[file] = find_tests(ROOT / "tests" / file)
        assert name in known[file], f"{pair}: there is no {test}"


def test_the_refusals_are_messages_of_the_product(features_page: ModuleType) -> None:
    texts = list(list_texts())
    for pair, message in features_page.read_pairs().refused.items():
        assert any(message in text for text in texts), f"{pair}: nothing says {message!r}"


def test_the_marks_of_a_pair(features_page: ModuleType) -> None:
    pairs = features_page.FeaturePairs(["a", "b", "c", "d"], ["c", "d"], {"a + b": "t"}, {"a + c": "m"}, ["a + d"])
    assert pairs.list_expected() == ["a + b", "a + c", "a + d", "b + c", "b + d"]
    assert [pairs.find_mark(f"a + {other}") for other in "bcd"] == ["yes", "no", "?"]
    assert pairs.find_mark("c + d") == ""
