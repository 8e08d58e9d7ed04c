"""Shares of ranks: nothing is lost, nothing is held twice, and no rank has more than its share."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.engine.parallel.layout import ParallelLayout, split_heads, split_layers, split_range

WEIGHTS = st.lists(st.floats(0.1, 10), min_size=1, max_size=9)


def test_ranks_are_ordered_with_tensor_innermost() -> None:
    grid = ParallelLayout(tp_size=2, pp_size=3)
    assert [(grid.pp_rank(rank), grid.tp_rank(rank)) for rank in range(grid.size)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert [grid.rank(grid.pp_rank(rank), grid.tp_rank(rank)) for rank in range(6)] == list(range(6))
    assert grid.tp_group(3) == range(2, 4)
    assert grid.output_rank == 4


def test_twenty_eight_heads_over_three() -> None:
    assert [len(share) for share in split_range(28, 3)] == [10, 9, 9]
    found = split_heads(28, 4, 3)
    assert [share.kv_heads for share in found] == [range(2), range(1, 3), range(2, 4)]
    assert [share.before for share in found] == [0, 3, 5]


@given(st.integers(0, 3000), st.integers(1, 12), st.sampled_from([1, 16]))
def test_even_shares_cover_all_once(total: int, parts: int, unit: int) -> None:
    found = split_range(total, parts, unit=unit)
    assert [index for share in found for index in share] == list(range(total))
    sizes = [len(share) for share in found]
    used = unit if total % unit == 0 and total // unit >= parts else 1
    assert max(sizes) - min(sizes) <= used
    assert all(size % used == 0 for size in sizes)


@given(st.integers(0, 3000), WEIGHTS)
def test_weighted_shares_are_off_by_at_most_one(total: int, weights: list[float]) -> None:
    found = split_range(total, len(weights), weights)
    assert [index for share in found for index in share] == list(range(total))
    for share, weight in zip(found, weights, strict=True):
        assert abs(len(share) - total * weight / sum(weights)) <= 1 + 1e-6


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 20))
def test_heads_have_their_kv_head_and_no_more(kv_heads: int, group: int, parts: int) -> None:
    found = split_heads(kv_heads * group, kv_heads, parts)
    assert [head for share in found for head in share.heads] == list(range(kv_heads * group))
    for share in found:
        assert sorted({head // group for head in share.heads}) == list(share.kv_heads)
        for index, head in enumerate(share.heads):
            assert share.kv_heads[(index + share.before) // group] == head // group


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.data())
def test_stages_are_the_best_cut(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.floats(0, 5)), data.draw(st.floats(0, 20))

    def dearest(borders: tuple[int, ...]) -> float:
        sums = [sum(costs[a:b]) for a, b in pairwise(borders)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    found = split_layers(costs, stages, first, last)
    assert [layer for stage in found for layer in stage] == list(range(len(costs)))
    assert all(found)
    every = [(0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), stages - 1)]
    assert dearest((0, *(stage.stop for stage in found))) == pytest.approx(min(map(dearest, every)))
