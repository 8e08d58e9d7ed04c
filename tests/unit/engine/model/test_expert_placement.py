"""Which experts ranks hold at the start, and where experts move when some have more rows than others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.splits import split_evenly
from serve_llm.engine.model.expert_placement import Placement, balance, count_rows, fill_slots


def check(placement: Placement, before: Placement, num_experts: int, first: int) -> None:
    """Check that every expert is placed, no rank has two copies, and no rank has more or fewer slots than before."""
    assert [len(slots) for slots in placement] == [len(slots) for slots in before]
    assert set(sum(placement, ())) == set(range(first, first + num_experts))
    assert all(len(set(slots)) == len(slots) for slots in placement)


@pytest.mark.parametrize(
    ("spans", "num_redundant", "expected"),
    [
        ((range(3), range(3, 5)), 0, ((0, 1, 2), (3, 4))),
        ((range(3), range(3, 5)), 1, ((0, 1, 2), (3, 4, 0))),
        ((range(3), range(3, 5)), 2, ((0, 1, 2, 3), (3, 4, 0))),
        ((range(8, 10), range(10, 12)), 2, ((8, 9, 10), (10, 11, 8))),
        ((range(1), range(1, 2), range(2, 2)), 0, ((0,), (1,), ())),
        ((range(1), range(1, 2), range(2, 2)), 1, ((0,), (1,), (0,))),
        ((range(4, 4), range(4, 4)), 3, ((), ())),
    ],
)
def test_the_start(spans: tuple[range, ...], num_redundant: int, expected: Placement) -> None:
    assert fill_slots(spans, num_redundant) == expected


def test_busy_experts_go_apart() -> None:
    before: Placement = ((0, 1, 2, 3), (4, 5, 6, 7))
    rows = [100, 100, 10, 10, 10, 10, 10, 10]
    after = balance(before, rows, 0)
    assert count_rows(before, rows, 0) == [220, 40]
    assert count_rows(after, rows, 0) == [130, 130]


def test_a_busy_expert_gets_the_redundant_slot() -> None:
    before = fill_slots((range(10, 12), range(12, 14)), 2)
    rows = [12, 12, 300, 12]
    after = balance(before, rows, 10)
    assert all(12 in slots for slots in after)
    assert max(count_rows(after, rows, 10)) < 0.6 * sum(rows)


@pytest.mark.parametrize("rows", [[0, 0, 0, 0], [5, 5, 5, 5], [50, 51, 50, 50]])
def test_nothing_moves_for_little(rows: list[int]) -> None:
    before: Placement = ((0, 1), (2, 3))
    assert balance(before, rows, 0) is before


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_rows(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 6))
    num_experts = data.draw(st.integers(1, 20))
    first = data.draw(st.integers(0, 5))
    spans = tuple(range(first + span.start, first + span.stop) for span in split_evenly(num_experts, ranks))
    placement = fill_slots(spans, data.draw(st.integers(0, num_experts * (ranks - 1))))
    check(placement, placement, num_experts, first)
    for _ in range(3):
        rows = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
        after = balance(placement, rows, first)
        check(after, placement, num_experts, first)
        assert sum(count_rows(after, rows, first)) == pytest.approx(sum(rows))
        assert max(count_rows(after, rows, first)) <= max(count_rows(placement, rows, first))
        placement = after
    assert all(count <= ranks for count in Counter(sum(placement, ())).values())
