"""The profile of the host's work in a step: every part is found and measured."""

from __future__ import annotations

import pytest

from bench.host_time import CASES, PARTS, measure, table


@pytest.mark.parametrize("case", CASES)
def test_every_part_of_a_step_is_measured(case: str) -> None:
    found = measure(3, 4, CASES[case])
    parts = [found[part] for part in PARTS]
    assert all(0 < part.low <= part.median <= part.high for part in parts)
    text = "\n".join(table({"3 streams": found}))
    assert all(part in text for part in found)
