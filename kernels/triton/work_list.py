"""Divide a step's attention among programs, on the device.

A tile of queries is an item of the work list, or several when its keys are split. An item has ITEM_FIELDS numbers:

    sequence, its first token, its number of queries, its context length, first query of the tile,
    first key, one past the last key, splits

`splits` is 1 for an item with all keys of its tile; for a tile's first split it is their number, for the others 0. The
splits of all tiles come first, those of a tile one after the other, so that an item's index is also the index of its
partial result. In prefill, tiles with later queries come before those with earlier ones: they have the most keys. Items
that are not used have the sequence -1 and no splits.

The list is made by one program and depends on the lengths alone, so that the layers of a KV group share it, and a
captured step makes a new one in each replay. Nothing waits for the device: the host knows only bounds on the number of
items.

The keys of all tiles are shared equally among `target` items, and a tile with more than such a share is cut into equal
parts. So there are at most 2 * target splits. With `fixed_split` a tile with more than its share is cut at multiples of
that; if this makes more splits than there is room for, the share is doubled until they fit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from serve_llm.kernels.triton.attend import ITEM_FIELDS, first_visible_key

MAX_SPLITS = tl.constexpr(128)  # for each tile
BLOCK = tl.constexpr(1024)  # tiles that the program processes at a time
NO_SPLITS = tl.constexpr(1 << 30)  # a share that exceeds any tile


@triton.jit(do_not_specialize=["sequences", "num_tiles", "num_items", "num_splits", "target"])
def make_work_list(starts, contexts, items, sequences, num_tiles, num_items, num_splits, target, PLAN: tl.constexpr):
    """Fill `items`, (num_items, ITEM_FIELDS) int32. Grid: (1,).

    starts, contexts: see `Lengths`. num_tiles: at least those that the sequences need. num_splits: room for splits.
    """
    num_used_splits = 0
    if not PLAN.split:
        share = NO_SPLITS
    else:
        total = 0
        for first in range(0, num_tiles, BLOCK):
            total += tl.sum(_find_tiles(starts, contexts, sequences, num_tiles, first, PLAN)[6], 0)
        share = tl.maximum(tl.cdiv(total, target), 1)
        num_used_splits = _count_all_splits(starts, contexts, sequences, num_tiles, share, PLAN)
        while num_used_splits > num_splits:
            share *= 2
            num_used_splits = _count_all_splits(starts, contexts, sequences, num_tiles, share, PLAN)
    next_split = 0
    next_whole = num_used_splits
    for first in range(0, num_tiles, BLOCK):
        sequence, start, count, context, query, begin, units = _find_tiles(
            starts, contexts, sequences, num_tiles, first, PLAN
        )
        splits, units_of_split = _cut(units, share, PLAN)
        num_own = tl.where(splits > 1, splits, 0)
        is_whole = tl.where(splits == 1, 1, 0)
        index = tl.where(
            splits > 1, next_split + tl.cumsum(num_own, 0) - num_own, next_whole + tl.cumsum(is_whole, 0) - is_whole
        )
        end = tl.minimum(context, context - count + query + PLAN.queries_per_tile)
        for split in range(tl.max(splits, 0)):
            item = items + (index + split) * ITEM_FIELDS
            is_there = split < splits
            split_begin = begin + split * units_of_split * PLAN.unit
            split_end = tl.minimum(split_begin + units_of_split * PLAN.unit, end)
            tl.store(item, sequence, mask=is_there)
            tl.store(item + 1, start, mask=is_there)
            tl.store(item + 2, count, mask=is_there)
            tl.store(item + 3, context, mask=is_there)
            tl.store(item + 4, query, mask=is_there)
            tl.store(item + 5, split_begin, mask=is_there)
            tl.store(item + 6, split_end, mask=is_there)
            tl.store(item + 7, tl.where(split == 0, splits, 0), mask=is_there)
        next_split += tl.sum(num_own, 0)
        next_whole += tl.sum(is_whole, 0)
    for first in range(next_whole, num_items, BLOCK):
        index = first + tl.arange(0, BLOCK)
        item = items + index * ITEM_FIELDS
        tl.store(item, -1, mask=index < num_items)
        tl.store(item + 7, 0, mask=index < num_items)


@triton.jit
def _count_all_splits(starts, contexts, sequences, num_tiles, share, PLAN: tl.constexpr):
    """The number of splits of tiles that are split."""
    found = 0
    for first in range(0, num_tiles, BLOCK):
        splits, _ = _cut(_find_tiles(starts, contexts, sequences, num_tiles, first, PLAN)[6], share, PLAN)
        found += tl.sum(tl.where(splits > 1, splits, 0), 0)
    return found


@triton.jit
def _cut(units, share, PLAN: tl.constexpr):
    """Return the number of items of each tile, 0 if it has no units, and the units of each but the last."""
    if PLAN.fixed_split:
        units_of_split = tl.where(units > share, 1, units)
    else:
        splits = tl.minimum(tl.cdiv(units, share), MAX_SPLITS)
        units_of_split = tl.cdiv(units, tl.maximum(splits, 1))
    return tl.cdiv(units, tl.maximum(units_of_split, 1)), units_of_split


@triton.jit
def _find_tiles(starts, contexts, sequences, num_tiles, first, PLAN: tl.constexpr):
    """Return for BLOCK tiles from `first` on the sequence, its first token, its number of queries and its context
    length, the tile's first query and first key, and its number of units of keys: 0 for a tile that is not in this
    list, at least 1 for any other.

    Sequence s owns the tiles from starts[s] // queries_per_tile + s up to the first one of the next sequence, which are
    at least as many as it needs.
    """
    index = first + tl.arange(0, BLOCK)
    is_there = index < num_tiles
    if PLAN.single_query:
        sequence = index
        query = tl.zeros((BLOCK,), tl.int32)
    else:
        tile = num_tiles - 1 - index
        sequence = tl.zeros((BLOCK,), tl.int32)
        after = sequence + sequences
        while tl.max(after - sequence, 0) > 1:
            middle = (sequence + after) // 2
            is_reached = tl.load(starts + middle) // PLAN.queries_per_tile + middle <= tile
            sequence = tl.where(is_reached, middle, sequence)
            after = tl.where(is_reached, after, middle)
        query = (tile - tl.load(starts + sequence) // PLAN.queries_per_tile - sequence) * PLAN.queries_per_tile
    start = tl.load(starts + sequence, mask=is_there, other=0)
    count = tl.load(starts + sequence + 1, mask=is_there, other=0) - start
    context = tl.load(contexts + sequence, mask=is_there, other=0)
    is_there = is_there & (query < count) & ((count == 1) == PLAN.single_query)
    position = context - count + query
    end = tl.minimum(context, position + PLAN.queries_per_tile)
    begin = (tl.zeros((BLOCK,), tl.int32) + first_visible_key(position, PLAN)) // PLAN.unit * PLAN.unit
    units = tl.where(is_there, tl.maximum(tl.cdiv(end - begin, PLAN.unit), 1), 0)
    return sequence, start, count, context, query, begin, units
