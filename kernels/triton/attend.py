"""The Triton kernels behind `attention.py`: `attend` and, for split keys, `combine`.

A program holds `rows` rows, each one query of one head: consecutive queries times heads that share a KV head. It takes
one item of a work list (`work_list.py`) and visits its keys one tile at a time, at multiples of the tile size, with the
online softmax of Milakov and Gimelshein (arXiv:1805.02867) in base 2. Keys are split among programs as in
flash-decoding (Dao et al., 2023).

The state of the softmax is a tuple (row_max, row_sum, acc): the highest score of each row, (rows,); the sum of its
weights, (rows,); and the weighted sum of the values, (rows, main_dim); all float32. row_max starts at LOWEST, which is
finite so that no NaN arises.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from serve_llm.kernels.triton.product import dot

LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
SPLITS_IN_FLIGHT = tl.constexpr(4)  # splits that `combine` loads at once
ITEM_FIELDS = tl.constexpr(8)  # numbers of an item of a work list


@dataclass(frozen=True)
class SplitPlan:
    """Compile-time parameters. Strides are in elements; the last dimension of each tensor is contiguous."""

    single_query: bool  # for sequences with one new query (decode); otherwise for those with more (prefill)
    split: bool  # some items are splits of the keys; otherwise each item has all keys of its queries
    fixed_split: int  # keys in a split, which starts at a multiple of it; 0: the work list chooses
    group_size: int  # query heads of one KV head
    heads_per_tile: int
    rows: int
    key_tile: int
    head_dim: int
    value_dim: int
    main_dim: int  # padded; the part of a key that is loaded first, with values_in_keys the part that is the value
    rest_dim: int  # padded; the remaining part of a key, 0 if there is none
    values_in_keys: bool  # the first value_dim numbers of a key are its value
    block_size: int
    window: int  # 0: no window
    softcap: float  # 0: no cap
    has_alibi: bool
    query_token_stride: int
    query_head_stride: int
    cache_block_stride: int
    cache_part_stride: int
    cache_head_stride: int
    cache_token_stride: int

    @property
    def head_tiles(self) -> int:
        """Tiles of heads for each KV head."""
        return -(-self.group_size // self.heads_per_tile)

    @property
    def queries_per_tile(self) -> int:
        return self.rows // self.heads_per_tile

    @property
    def unit(self) -> int:
        """Keys that a work list never divides; splits start at multiples of it."""
        return self.fixed_split or self.key_tile

    @property
    def rows_to_combine(self) -> int:
        """Rows that a program of `combine` merges."""
        most = triton.next_power_of_2(self.heads_per_tile) if self.single_query else self.rows
        return min(most, 2048 // self.main_dim)


# Do not recompile when only these arguments change.
_any_value = triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["block_table"],
)


@_any_value
def attend(
    query,
    cache,
    block_table,
    items,
    sinks,
    alibi_slopes,
    cache_scales,
    output,
    split_values,
    split_stats,
    table_row,
    scale,
    PLAN: tl.constexpr,
):
    """Attention of one tile of queries over its keys or a split of them. Grid: (items, KV heads * head_tiles).

    query: (tokens, heads, head_dim). cache, block_table, sinks, alibi_slopes, cache_scales: see `paged_attention`; a
    cache in fp8 is converted to the query's dtype. items: see `work_list`. An item with all keys of its queries is
    written to output (tokens, heads, value_dim), contiguous. A split is written to split_values (splits, KV heads *
    head_tiles, rows, main_dim), without the scale of the values, and split_stats (.., rows, 2), row_max and row_sum;
    float32.
    """
    item = items + tl.program_id(0) * ITEM_FIELDS
    sequence = tl.load(item)
    start = tl.load(item + 1)
    count = tl.load(item + 2)
    context = tl.load(item + 3)
    first = tl.load(item + 4)
    begin = tl.load(item + 5)
    end = tl.load(item + 6)
    splits = tl.load(item + 7)
    if sequence < 0:
        return
    position = context - count + first  # position of the first query
    first_key = first_visible_key(position, PLAN)

    row = tl.arange(0, PLAN.rows)
    heads, kv_head, head, query_index, is_valid = _locate_rows(row, first, count, PLAN)
    positions = tl.where(is_valid, context - count + query_index, -1)
    token = (start + query_index).to(tl.int64)
    main, rest = _load_queries(query + token * PLAN.query_token_stride + head * PLAN.query_head_stride, is_valid, PLAN)
    slope = _load_slopes(alibi_slopes, head, is_valid, PLAN.rows, PLAN)
    keys = cache + kv_head * PLAN.cache_head_stride
    blocks = block_table + sequence.to(tl.int64) * table_row
    if cache_scales is not None:
        scale *= tl.load(cache_scales + kv_head)

    empty = _empty_state(PLAN.rows, PLAN)
    has_all_keys = row * 0 + splits == 1
    state = _add_sinks(empty, sinks, head, is_valid & has_all_keys)
    if PLAN.fixed_split:
        for split_begin in range(begin, end, PLAN.fixed_split):
            stop = tl.minimum(split_begin + PLAN.fixed_split, end)
            part = _accumulate_keys(
                empty, main, rest, keys, blocks, positions, slope, first_key, split_begin, stop, scale, True, PLAN
            )
            state = _merge_states(state, part)
    else:
        if not (PLAN.single_query or PLAN.window):  # keys that every row sees need no mask
            whole = tl.maximum(tl.minimum((position + 1) // PLAN.key_tile * PLAN.key_tile, end), begin)
            state = _accumulate_keys(
                state, main, rest, keys, blocks, positions, slope, first_key, begin, whole, scale, False, PLAN
            )
            begin = whole
        state = _accumulate_keys(
            state, main, rest, keys, blocks, positions, slope, first_key, begin, end, scale, True, PLAN
        )
    if PLAN.split:
        if splits == 1:
            _store_result(output, token * heads + head, is_valid, state, cache_scales, kv_head, PLAN)
        else:
            slot = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * PLAN.rows + row
            _store_state(split_values, split_stats, slot, is_valid, state, PLAN)
    else:
        _store_result(output, token * heads + head, is_valid, state, cache_scales, kv_head, PLAN)


@_any_value
def combine(split_values, split_stats, items, sinks, cache_scales, output, PLAN: tl.constexpr):
    """Merge the splits of `attend` in order. Grid: (splits, KV heads * head_tiles, tiles of rows_to_combine rows).

    Programs of a tile's first split do it; the others return.
    """
    item = items + tl.program_id(0) * ITEM_FIELDS
    start = tl.load(item + 1)
    count = tl.load(item + 2)
    first = tl.load(item + 4)
    splits = tl.load(item + 7)
    if splits < 2:
        return
    row = tl.program_id(2) * PLAN.rows_to_combine + tl.arange(0, PLAN.rows_to_combine)
    heads, kv_head, head, query_index, is_valid = _locate_rows(row, first, count, PLAN)
    state = _add_sinks(_empty_state(PLAN.rows_to_combine, PLAN), sinks, head, is_valid)
    slot = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * PLAN.rows + row
    stride = tl.num_programs(1) * PLAN.rows  # between a row's splits
    for index in range(0, splits, SPLITS_IN_FLIGHT):
        for other in tl.static_range(SPLITS_IN_FLIGHT):
            split = row * 0 + index + other
            is_there = is_valid & (split < splits)
            state = _merge_states(state, _load_state(split_values, split_stats, slot + split * stride, is_there, PLAN))
    token = (start + query_index).to(tl.int64)
    _store_result(output, token * heads + head, is_valid, state, cache_scales, kv_head, PLAN)


@triton.jit
def _locate_rows(row, first, count, PLAN: tl.constexpr):
    """Return the number of heads, the program's KV head, and for each row its head, query index and validity.

    row: indices in the tile, whose first query is the sequence's query `first` of `count`."""
    member = tl.program_id(1) % PLAN.head_tiles * PLAN.heads_per_tile + row % PLAN.heads_per_tile
    heads = tl.num_programs(1) // PLAN.head_tiles * PLAN.group_size
    kv_head = (tl.program_id(1) // PLAN.head_tiles).to(tl.int64)
    query_index = first + row // PLAN.heads_per_tile
    is_valid = (row // PLAN.heads_per_tile < PLAN.queries_per_tile) & (query_index < count) & (member < PLAN.group_size)
    return heads, kv_head, kv_head * PLAN.group_size + member, query_index, is_valid


@triton.jit
def first_visible_key(position, PLAN: tl.constexpr):
    """The first key that a query at `position` sees."""
    return tl.maximum(position - PLAN.window + 1, 0) if PLAN.window else 0


@triton.jit
def _load_queries(rows, is_valid, PLAN: tl.constexpr):
    """Return (rows, main_dim) and, if rest_dim is not 0, (rows, rest_dim)."""
    dim = tl.arange(0, PLAN.main_dim)[None, :]
    width: tl.constexpr = PLAN.value_dim if PLAN.values_in_keys else PLAN.head_dim
    main = tl.load(rows[:, None] + dim, mask=is_valid[:, None] & (dim < width), other=0.0)
    rest = main
    if PLAN.rest_dim:
        dim = width + tl.arange(0, PLAN.rest_dim)[None, :]
        rest = tl.load(rows[:, None] + dim, mask=is_valid[:, None] & (dim < PLAN.head_dim), other=0.0)
    return main, rest


@triton.jit
def _load_slopes(alibi_slopes, head, is_valid, ROWS: tl.constexpr, PLAN: tl.constexpr):
    """(ROWS,) float32, for scores in base 2. Zeros without ALiBi."""
    slope = tl.zeros((ROWS,), tl.float32)
    if PLAN.has_alibi:
        slope = tl.load(alibi_slopes + head, mask=is_valid, other=0.0) * LOG2_E
    return slope


@triton.jit
def _load_keys(rows, is_valid, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHECKED: tl.constexpr):
    """(key_tile, PADDED) keys or values. Invalid rows are 0, since the cache may hold NaN there."""
    dim = tl.arange(0, PADDED)[None, :]
    if CHECKED or WIDTH != PADDED:
        mask = dim < WIDTH
        if CHECKED:
            mask = mask & is_valid[:, None]
        loaded = tl.load(rows[:, None] + dim, mask=mask, other=0.0)
    else:
        loaded = tl.load(rows[:, None] + dim)
    return loaded


@triton.jit
def _accumulate_keys(
    state,
    main,
    rest,
    keys,
    blocks,
    positions,
    slope,
    first_key,
    begin,
    stop,
    scale,
    CHECKED: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Return the state after the keys begin .. stop - 1, where begin is a multiple of key_tile.

    positions: of each row's query, -1 for an invalid row. slope: of each row, see `_load_slopes`. No row sees keys
    below first_key.
    CHECKED: some rows may not see some of the keys, so mask them.
    """
    row_max, row_sum, acc = state
    width: tl.constexpr = PLAN.value_dim if PLAN.values_in_keys else PLAN.head_dim
    for first in range(begin, stop, PLAN.key_tile):
        key = first + tl.arange(0, PLAN.key_tile)
        is_valid = (key >= first_key) & (key < stop)
        if CHECKED:
            block = tl.load(blocks + key // PLAN.block_size, mask=is_valid, other=0)
        else:
            block = tl.load(blocks + key // PLAN.block_size)
        rows = keys + (block.to(tl.int64) * PLAN.cache_block_stride + key % PLAN.block_size * PLAN.cache_token_stride)
        loaded = _load_keys(rows, is_valid, width, PLAN.main_dim, CHECKED).to(main.dtype)
        scores = dot(main, tl.trans(loaded), None)
        if PLAN.rest_dim:
            rest_keys = _load_keys(rows + width, is_valid, PLAN.head_dim - width, PLAN.rest_dim, CHECKED)
            rest_keys = rest_keys.to(main.dtype)
            scores = dot(rest, tl.trans(rest_keys), scores)
        scores *= scale
        if PLAN.softcap > 0:  # softcap * tanh(score / softcap), by exp2
            scores = PLAN.softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if PLAN.has_alibi:
            scores += slope[:, None] * (key[None, :] - positions[:, None]).to(tl.float32)
        if CHECKED:
            visible = key[None, :] <= positions[:, None]
            if PLAN.window:
                visible = visible & (key[None, :] > positions[:, None] - PLAN.window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = tl.fma(row_sum, correction, tl.sum(weights, 1))
        if not PLAN.values_in_keys:
            loaded = _load_keys(rows + PLAN.cache_part_stride, is_valid, PLAN.value_dim, PLAN.main_dim, CHECKED)
            loaded = loaded.to(main.dtype)
        acc = dot(weights.to(loaded.dtype), loaded, acc * correction[:, None])
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _empty_state(ROWS: tl.constexpr, PLAN: tl.constexpr):
    """Return the state before any key."""
    width: tl.constexpr = PLAN.main_dim
    return tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, width), tl.float32)


@triton.jit
def _add_sinks(state, sinks, head, is_valid):
    """Return the state after the sinks of valid rows' heads, each a score without a value. `state` is empty."""
    row_max, row_sum, acc = state
    if sinks is not None:
        row_max = tl.maximum(tl.load(sinks + head, mask=is_valid, other=LOWEST) * LOG2_E, LOWEST)
        row_sum = tl.where(is_valid, 1.0, 0.0)
    return row_max, row_sum, acc


@triton.jit
def _merge_states(state, part):
    """Return the state after the keys of both. Merging an empty `part` changes no bit."""
    row_max, row_sum, acc = state
    other_max, other_sum, other_acc = part
    new_max = tl.maximum(row_max, other_max)
    correction = tl.exp2(row_max - new_max)
    other_correction = tl.exp2(other_max - new_max)
    row_sum = tl.fma(row_sum, correction, other_sum * other_correction)
    acc = tl.fma(acc, tl.broadcast_to(correction[:, None], acc.shape), other_acc * other_correction[:, None])
    return new_max, row_sum, acc


@triton.jit
def _store_state(split_values, split_stats, slot, is_valid, state, PLAN: tl.constexpr):
    row_max, row_sum, acc = state
    dim = tl.arange(0, PLAN.main_dim)[None, :]
    tl.store(split_stats + slot * 2, row_max, mask=is_valid)
    tl.store(split_stats + slot * 2 + 1, row_sum, mask=is_valid)
    tl.store(split_values + slot[:, None] * PLAN.main_dim + dim, acc, mask=is_valid[:, None])


@triton.jit
def _load_state(split_values, split_stats, slot, is_valid, PLAN: tl.constexpr):
    dim = tl.arange(0, PLAN.main_dim)[None, :]
    row_max = tl.load(split_stats + slot * 2, mask=is_valid, other=LOWEST)
    row_sum = tl.load(split_stats + slot * 2 + 1, mask=is_valid, other=0.0)
    acc = tl.load(split_values + slot[:, None] * PLAN.main_dim + dim, mask=is_valid[:, None], other=0.0)
    return row_max, row_sum, acc


@triton.jit
def _store_result(output, rows, is_valid, state, cache_scales, kv_head, PLAN: tl.constexpr):
    """Store 0 for a row without keys and sinks."""
    _, row_sum, acc = state
    dim = tl.arange(0, PLAN.main_dim)[None, :]
    result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if cache_scales is not None:
        kv_heads = tl.num_programs(1) // PLAN.head_tiles
        result *= tl.load(cache_scales + kv_head + (0 if PLAN.values_in_keys else kv_heads))
    target = output + rows[:, None] * PLAN.value_dim + dim
    tl.store(target, result.to(output.dtype.element_ty), mask=is_valid[:, None] & (dim < PLAN.value_dim))
