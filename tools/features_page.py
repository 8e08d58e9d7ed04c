"""The tables of docs/features.md: which features go together, from the tests.

A test with the marker `pairs` uses pairs of features (tests/conftest.py checks that it does), and
tests/support/refused_pairs.py has the pairs that the product refuses, which a test tries.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent / "tests"
REFUSALS = TESTS / "support" / "refused_pairs.py"
LISTS = ("REFUSALS", "REFUSED_OPTIONS")  # in that file
FEATURES = (
    "speculation",
    "LoRA",
    "grammar",
    "tools",
    "int8",
    "int4",
    "fp8",
    "prefix cache",
    "logprobs",
    "n",
    "TP",
    "PP",
    "DP",
    "EP",
    "replay",
    "embeddings",
    "KV offload",
    "draft model",
    "draft head",
    "several hosts",
    "linear attention",
)
ALTERNATIVES = (("int8", "int4", "fp8"), ("speculation", "draft model", "draft head"))  # an engine has one of each


class FeaturePairs(NamedTuple):
    """What is known of every pair of features. A pair is "LoRA + tools", in the order of `features`."""

    features: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]  # groups of features of which an engine has one
    tested: dict[str, list[str]]  # pair -> tests, their paths relative to tests/
    refused: dict[str, str]  # pair -> message of the product

    def list_expected(self) -> list[str]:
        """All pairs that there are."""
        pairs = itertools.combinations(self.features, 2)
        return [
            f"{one} + {other}"
            for one, other in pairs
            if not any({one, other} <= set(group) for group in self.alternatives)
        ]

    def list_unknown(self) -> list[str]:
        """Pairs in tests and refusals that there are not."""
        return sorted({*self.tested, *self.refused} - set(self.list_expected()))

    def list_untested(self) -> list[str]:
        return [pair for pair in self.list_expected() if pair not in self.tested and pair not in self.refused]

    def find_mark(self, pair: str) -> str:
        """For the matrix; empty for alternatives."""
        if pair in self.refused:
            return "no"
        if pair in self.tested:
            return "yes"
        return "?" if pair in self.list_expected() else ""


def find_marks(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    """Pairs of features and the tests that use them, named with this prefix."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from find_marks(node.body, f"{prefix}{node.name}::")
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.pairs":
                for argument in decorator.args:
                    yield ast.literal_eval(argument), f"{prefix}{node.name}"


def read_pairs() -> FeaturePairs:
    tested: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "pytest.mark.pairs" not in text:
            continue
        for pair, test in find_marks(ast.parse(text).body, f"{path.relative_to(TESTS)}::"):
            tested.setdefault(pair, []).append(test)
    return FeaturePairs(FEATURES, ALTERNATIVES, tested, read_refusals())


def read_refusals() -> dict[str, str]:
    """Pair -> message."""
    refused = {}
    for node in ast.parse(REFUSALS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in LISTS and node.value is not None:
            refused |= {pair: message for pair, _, message in ast.literal_eval(node.value)}
    return refused


def make_matrix() -> str:
    """The counts, and a table with a mark for each pair."""
    pairs = read_pairs()
    expected = pairs.list_expected()
    num_refused = len(pairs.refused)
    num_untested = len(pairs.list_untested())
    lines = [
        f"{len(expected)} pairs: {len(expected) - num_refused - num_untested} tested, {num_refused} refused, "
        f"**{num_untested} not tested**.",
        "",
        "| |" + "".join(f" {feature} |" for feature in pairs.features[1:]),
        "|---" * len(pairs.features) + "|",
    ]
    for number, one in enumerate(pairs.features[:-1], start=1):
        marks = [pairs.find_mark(f"{one} + {other}") for other in pairs.features[number:]]
        lines.append(f"| {one} |" + " |" * (number - 1) + "".join(f" {mark} |" for mark in marks))
    return "\n".join(lines)


def make_evidence() -> str:
    """One row per pair: its tests, its refusal, or that there is neither."""
    pairs = read_pairs()
    lines = ["| Pair | Test, or answer |", "|---|---|"]
    for pair in pairs.list_expected():
        evidence = "not tested"
        if pair in pairs.refused:
            evidence = f'refused: "{pairs.refused[pair]}"'
        elif pair in pairs.tested:
            evidence = ", ".join(f"`{test}`" for test in pairs.tested[pair])
        lines.append(f"| {pair} | {evidence} |")
    return "\n".join(lines)
