"""The work lists of attention: every key of every tile once, in equal shares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from serve_llm.kernels.attention import Lengths
from support.triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import attention
from serve_llm.kernels.triton.attend import SplitPlan
from serve_llm.kernels.triton.work_list import MAX_SPLITS

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16


def make_items(
    counts: Sequence[int], contexts: Sequence[int], single_query: bool, window: int = 0, batch_invariant: bool = False
) -> tuple[list[list[int]], SplitPlan, int]:
    """Return the used items, their inputs, and the number of items that share all keys equally."""
    starts = [0, *accumulate(counts)]
    query = torch.empty((starts[-1], HEADS, HEAD_DIM), dtype=torch.bfloat16)
    cache = torch.empty((1, 2, KV_HEADS, 16, HEAD_DIM), dtype=torch.bfloat16)
    tiles = attention._choose_tiles(query, cache, None, single_query, batch_invariant)
    fixed_split = attention.BATCH_INVARIANT_SPLIT if batch_invariant else 0
    plan = attention._make_plan(query, cache, None, window, None, False, single_query, tiles, fixed_split)
    on_device = Lengths(torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32))
    launch = attention._prepare(plan, tiles, query, cache, starts, max(contexts), on_device)
    target = attention.PROGRAMS_PER_MULTIPROCESSOR * attention.NUM_MULTIPROCESSORS // KV_HEADS
    rows = launch.items.tolist()
    used = [row for row in rows if row[0] >= 0]
    assert rows[len(used) :] == [[-1, *row[1:7], 0] for row in rows[len(used) :]], "unused items come last"
    assert sum(row[7] != 1 for row in used) <= len(launch.split_values)
    return used, launch.plan, target


def check_coverage(
    items: list[list[int]], plan: SplitPlan, counts: Sequence[int], contexts: Sequence[int]
) -> dict[tuple[int, int], list[int]]:
    """Check that each tile's keys are covered once, in order. Returns the keys of each tile's items."""
    starts = [0, *accumulate(counts)]
    keys: dict[tuple[int, int], list[int]] = {}
    ends: dict[tuple[int, int], int] = {}
    expected: dict[tuple[int, int], int] = {}
    for index, (sequence, start, count, context, first, begin, end, splits) in enumerate(items):
        assert (start, count, context) == (starts[sequence], counts[sequence], contexts[sequence])
        tile = (sequence, first)
        position = context - count + first
        if tile not in keys:
            lowest = max(0, position - plan.window + 1) if plan.window else 0
            assert begin == lowest // plan.unit * plan.unit and splits >= 1
            keys[tile], expected[tile] = [], splits
            assert splits == 1 or all(other[7] != 1 for other in items[:index]), "splits come first"
        else:
            assert begin == ends[tile] and splits == 0
        assert begin % plan.unit == 0
        keys[tile].append(end - begin)
        ends[tile] = end
    tiles = {
        (sequence, first)
        for sequence, count in enumerate(counts)
        if (count == 1) == plan.single_query
        for first in range(0, count, plan.queries_per_tile)
    }
    assert set(keys) == tiles
    for (sequence, first), end in ends.items():
        last = contexts[sequence] - counts[sequence] + first + plan.queries_per_tile
        assert end == min(contexts[sequence], last)
    assert {tile: len(lengths) for tile, lengths in keys.items()} == expected
    return keys


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("single_query", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_key_once(seed: int, single_query: bool, batch_invariant: bool) -> None:
    rng = random.Random(seed)
    counts = [1 if rng.random() < 0.5 else rng.randint(2, 300) for _ in range(rng.randint(1, 40))]
    counts += [1, 2]  # some of each kind
    contexts = [count + rng.choice([0, rng.randint(0, 500), rng.randint(0, 60_000)]) for count in counts]
    window = rng.choice([0, 0, 100, 5000])
    items, plan, target = make_items(counts, contexts, single_query, window, batch_invariant)
    keys = check_coverage(items, plan, counts, contexts)
    if plan.split and not batch_invariant:
        units = sum(-(-length // plan.unit) for lengths in keys.values() for length in lengths)
        share = -(-units // target)
        for lengths in keys.values():
            assert max(lengths) <= share * plan.unit or len(lengths) > MAX_SPLITS.value // 2


def test_one_long_context_among_short_ones_is_shared() -> None:
    contexts = [1000] * 63 + [64_000]
    items, plan, target = make_items([1] * 64, contexts, single_query=True)
    keys = check_coverage(items, plan, [1] * 64, contexts)
    assert max(keys[63, 0]) <= sum(contexts) / target + 2 * plan.unit
    assert len(keys[63, 0]) > 50 and len(items) < 64 + 2 * target


def test_a_short_chunk_behind_a_long_context_is_split() -> None:
    items, plan, target = make_items([100], [64_100], single_query=False)
    keys = check_coverage(items, plan, [100], [64_100])
    assert all(len(lengths) > 16 for lengths in keys.values()) and len(items) > target / 2


def test_many_long_contexts_are_not_split_further() -> None:
    items, _, _ = make_items([1] * 512, [30_000] * 512, single_query=True)
    assert len(items) == 512 and all(row[7] == 1 for row in items)


def test_fixed_splits_are_merged_into_whole_items_when_room_is_short() -> None:
    contexts = [20_000] * 20 + [140_000]
    items, plan, target = make_items([1] * 21, contexts, single_query=True, batch_invariant=True)
    keys = check_coverage(items, plan, [1] * 21, contexts)
    longest = -(-140_000 // plan.fixed_split)
    assert len(keys[20, 0]) == longest > 2 * target, "the longest is always split"
    assert all(len(lengths) == 1 for tile, lengths in keys.items() if tile[0] < 20)


def test_a_padding_sequence_has_one_empty_item() -> None:
    items, _, _ = make_items([1, 1], [700, 0], single_query=True)
    assert [row[5:] for row in items if row[0] == 1] == [[0, 0, 1]]
