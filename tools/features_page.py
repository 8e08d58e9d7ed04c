"""Generate the tables of docs/features.md, which show from the tests which features work together.

A test marked `pairs` combines pairs of features (tests/conftest.py checks that it does). tests/support/refused_pairs.py
lists the pairs that the product refuses; a test tries each of them.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent / "tests"
REFUSALS = TESTS / "support" / "refused_pairs.py"
LISTS = ("REFUSALS", "REFUSED_OPTIONS")  # the lists in that file
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
ALTERNATIVES = (("int8", "int4", "fp8"), ("draft model", "draft head"))  # an engine has one per group


class FeaturePairs(NamedTuple):
    """What is known about each pair of features. A pair is written "LoRA + tools", in the order of `features`."""

    features: tuple[str, ...]
    alternatives: tuple[tuple[str, ...], ...]  # groups of features that exclude each other
    tested: dict[str, list[str]]  # pair -> tests, as paths relative to tests/
    refused: dict[str, str]  # pair -> the product's message

    def list_expected(self) -> list[str]:
        """Return all valid pairs."""
        pairs = itertools.combinations(self.features, 2)
        return [
            f"{one} + {other}"
            for one, other in pairs
            if not any({one, other} <= set(group) for group in self.alternatives)
        ]

    def list_unknown(self) -> list[str]:
        """Return pairs named by tests or refusals that are not valid pairs."""
        return sorted({*self.tested, *self.refused} - set(self.list_expected()))

    def list_untested(self) -> list[str]:
        return [pair for pair in self.list_expected() if pair not in self.tested and pair not in self.refused]

    def find_mark(self, pair: str) -> str:
        """Return the pair's mark in the matrix; empty for alternatives."""
        if pair in self.refused:
            return "no"
        if pair in self.tested:
            return "yes"
        return "?" if pair in self.list_expected() else ""


def find_marks(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of features with the tests that combine them; test names get this prefix."""
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
    """Return a mapping from pair to message."""
    refused = {}
    for node in ast.parse(REFUSALS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in LISTS and node.value is not None:
            refused |= {pair: message for pair, _, message in ast.literal_eval(node.value)}
    return refused


def make_matrix() -> str:
    """Render the counts and a table with a mark for each pair."""
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
    """Render one row per pair: its tests, its refusal, or a note that it has neither."""
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
