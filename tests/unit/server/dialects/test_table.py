"""The built-in dialects."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from serve_llm.server.dialects.dialect import read_dialect, write_dialect
from serve_llm.server.dialects.table import BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_dialect_can_be_written_and_read(name: str) -> None:
    dialect = BUILT_IN[name]
    assert dialect.name == name
    assert read_dialect(write_dialect(dialect)) == dialect
    assert dialect.calls is not None


def test_the_docs_name_every_built_in_dialect() -> None:
    page = (Path(__file__).parents[4] / "docs" / "dialects.md").read_text(encoding="utf-8")
    table = page[page.index("## Built-in dialects") : page.index("## Your own dialect")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(BUILT_IN)


def test_the_example_of_the_docs_is_a_built_in_dialect() -> None:
    page = (Path(__file__).parents[4] / "docs" / "dialects.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    assert json.loads(example)["name"] == "mine"
    assert msgspec.structs.replace(read_dialect(example), name="qwen3") == BUILT_IN["qwen3"]
