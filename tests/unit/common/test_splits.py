"""Names for many numbered things."""

from __future__ import annotations

import pytest

from serve_llm.common.splits import name_numbers


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([4], "node 4"), (range(4), "nodes 0-3"), ([8, 2, 1, 3], "nodes 1-3, 8"), ({1, 3, 5}, "nodes 1, 3, 5")],
)
def test_numbers_are_named_by_their_ends(numbers: list[int], expected: str) -> None:
    assert name_numbers("node", numbers) == expected
