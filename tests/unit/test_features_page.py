"""docs/features.md: every pair of features has a test that uses both, or is refused."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from support.engine import generate, greedy, make_engine
from support.observed import Observer, find_missing
from support.pooled import pooling_request
from support.scripts import load_script
from support.tiny import make_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def features_page() -> ModuleType:
    return load_script(ROOT / "tools" / "features_page.py")


def test_every_pair_is_tested_or_refused(features_page: ModuleType) -> None:
    pairs = features_page.read_pairs()
    assert pairs.list_unknown() == []
    assert pairs.list_untested() == []
    assert not set(pairs.tested) & set(pairs.refused)


def test_the_marks_of_a_pair(features_page: ModuleType) -> None:
    pairs = features_page.FeaturePairs(
        ("a", "b", "c", "d"), (("c", "d"),), {"a + b": ["t"], "x + y": ["t"]}, {"a + c": "m"}
    )
    assert pairs.list_expected() == ["a + b", "a + c", "a + d", "b + c", "b + d"]
    assert [pairs.find_mark(f"a + {other}") for other in "bcd"] == ["yes", "no", "?"]
    assert pairs.find_mark("c + d") == ""
    assert pairs.list_unknown() == ["x + y"]
    assert pairs.list_untested() == ["a + d", "b + c", "b + d"]


def test_markers_are_found(features_page: ModuleType) -> None:
    source = """
@pytest.mark.slow
@pytest.mark.pairs("a + b", "a + c")
def test_one(): ...
class TestTwo:
    @pytest.mark.pairs("b + c")
    def test_three(self): ...
"""
    found = list(features_page.find_marks(ast.parse(source).body, "f.py::"))
    assert found == [("a + b", "f.py::test_one"), ("a + c", "f.py::test_one"), ("b + c", "f.py::TestTwo::test_three")]


def test_a_pair_is_seen_only_where_both_features_are_in_use(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    options = {"block_size": 8, "runner": "generate", "convert": "embed"}
    with Observer() as observer:
        engine = make_engine(tmp_path, tensor=2, **options)
        ids = [5, 17, 101, 44] * 4
        generate(engine, [greedy(0, ids, 3, logprobs=1), greedy(1, [9, 8], 3, temperature=1.0, choice=1)])
        generate(engine, [pooling_request(2, ids)])
        generate(make_engine(tmp_path, quantization="int8", **options), [greedy(3, [7], 2)])
    seen = observer.find_pairs()
    assert find_missing(["logprobs + TP", "n + TP", "prefix cache + embeddings", "TP + embeddings"], seen) == []
    wrong = [
        "logprobs + n",
        "int8 + TP",
        "int8 + logprobs",
        "prefix cache + logprobs",
        "speculation + TP",
        "TP + replay",
    ]
    assert find_missing(wrong, seen) == wrong
