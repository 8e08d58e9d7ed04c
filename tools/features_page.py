"""The tables of docs/features.md: which features go together, from tests/features.toml."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent.parent / "tests" / "features.toml"


class FeaturePairs(NamedTuple):
    """What is known of every pair of features. A pair is "LoRA + tools", in the order of `features`."""

    features: list[str]
    alternatives: list[str]  # features of which a model has one
    tested: dict[str, str]  # pair -> test, its path relative to tests/
    refused: dict[str, str]  # pair -> message of the product, with {} for what differs
    untested: list[str]

    def list_expected(self) -> list[str]:
        """All pairs that there are."""
        pairs = itertools.combinations(self.features, 2)
        return [f"{one} + {other}" for one, other in pairs if not {one, other} <= set(self.alternatives)]

    def find_mark(self, pair: str) -> str:
        """For the matrix; empty for alternatives."""
        if pair in self.tested:
            return "yes"
        if pair in self.refused:
            return "no"
        return "?" if pair in self.untested else ""


def read_pairs() -> FeaturePairs:
    return FeaturePairs(**tomllib.loads(TABLE.read_text(encoding="utf-8")))


def make_matrix() -> str:
    """The counts, and a table with a mark for each pair."""
    pairs = read_pairs()
    lines = [
        f"{len(pairs.list_expected())} pairs: {len(pairs.tested)} tested, {len(pairs.refused)} refused, "
        f"**{len(pairs.untested)} not tested**.",
        "",
        "| |" + "".join(f" {feature} |" for feature in pairs.features[1:]),
        "|---" * len(pairs.features) + "|",
    ]
    for number, one in enumerate(pairs.features[:-1], start=1):
        marks = [pairs.find_mark(f"{one} + {other}") for other in pairs.features[number:]]
        lines.append(f"| {one} |" + " |" * (number - 1) + "".join(f" {mark} |" for mark in marks))
    return "\n".join(lines)


def make_evidence() -> str:
    """One row per pair: its test, its refusal, or that there is neither."""
    pairs = read_pairs()
    lines = ["| Pair | Test, or answer |", "|---|---|"]
    for pair in pairs.list_expected():
        evidence = "not tested"
        if pair in pairs.tested:
            evidence = f"`{pairs.tested[pair]}`"
        elif pair in pairs.refused:
            evidence = f'refused: "{pairs.refused[pair].replace("{}", "...")}"'
        lines.append(f"| {pair} | {evidence} |")
    return "\n".join(lines)
