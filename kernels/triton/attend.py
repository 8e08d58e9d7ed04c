"""The kernels of `attention.py`: a tile of queries over the keys that it sees, and the sum over splits of the keys.

A program holds `rows` rows, each one query of one head: consecutive queries times heads that share a KV head. It visits
the keys a tile at a time, at positions that are multiples of the tile, with the online softmax of Milakov and
Gimelshein (arXiv:1805.02867); exponents are of 2. Splits of the keys among programs are flash-decoding's (Dao et al.,
2023). What a part of the keys adds up to is a state of three: of each row the highest score, the total weight, and the
values mixed by weight. Before any key the highest score is LOWEST: finite, so that no NaN arises.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from serve_llm.kernels.triton.product import dot

LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
ABREAST = tl.constexpr(8)  # splits whose loads `combine` has under way at once


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for. Strides are in elements; the last dimension of each tensor is contiguous."""

    single: bool  # it serves sequences with one query, else those with more
    split: bool  # a program's third number is a split of the keys, else it visits all
    fixed: int  # keys in a split, which then starts at a multiple of that; 0: equal shares of what is seen
    group: int  # heads for each KV head
    chunk: int  # of them in a program
    rows: int
    tile: int
    head_dim: int
    value_dim: int
    main: int  # padded numbers of a key that are read at once; with `shared` those that are the value
    rest: int  # and of what remains
    shared: bool  # the first numbers of a key are the value
    block_size: int
    window: int  # 0: none
    softcap: float  # 0: none
    query_token: int  # strides
    query_head: int
    cache_block: int
    cache_part: int
    cache_head: int
    cache_token: int

    @property
    def chunks(self) -> int:
        return -(-self.group // self.chunk)

    @property
    def queries(self) -> int:
        """In a tile."""
        return self.rows // self.chunk


# What differs from step to step must not make Triton compile again.
_any_value = triton.jit(
    do_not_specialize=["sequences", "splits", "table_row"],
    do_not_specialize_on_alignment=["block_table", "starts", "contexts"],
)


@_any_value
def attend(
    query,
    cache,
    block_table,
    starts,
    contexts,
    sinks,
    output,
    sums,
    states,
    sequences,
    table_row,
    scale,
    PLAN: tl.constexpr,
):
    """One program: (tile of queries, KV head and chunk of its heads, split of the keys).

    query: (tokens, heads, head_dim). cache, block_table, starts, contexts, sinks: as `paged_attention` has them.
    output: (tokens, heads, value_dim), contiguous; with `split` sums instead, (sequences, heads, splits, main) float32,
    and states, (sequences, heads, splits, 2) float32: the highest score and the total weight.
    """
    sequence, start, count, first = _find_tile(starts, sequences, PLAN)
    if (first >= count) | ((count == 1) != PLAN.single):
        return
    context = tl.load(contexts + sequence)
    place = context - count + first  # the first query's position
    end = tl.minimum(context, place + PLAN.queries)
    lowest = _lowest(place, PLAN)
    low, length = _borders(lowest, end, tl.num_programs(2), PLAN)
    if PLAN.split:
        low += tl.program_id(2) * length
        if low >= end:
            return
        end = tl.minimum(low + length, end)

    heads, kv_head, head, index, real = _rows(first, count, PLAN)
    positions = tl.where(real, context - count + index, -1)
    token = (start + index).to(tl.int64)
    main, rest = _load_queries(query + token * PLAN.query_token + head * PLAN.query_head, real, PLAN)
    keys, blocks = cache + kv_head * PLAN.cache_head, block_table + sequence.to(tl.int64) * table_row

    nothing = _nothing(PLAN.rows, PLAN)
    if PLAN.split:
        state = _visit(nothing, main, rest, keys, blocks, positions, lowest, low, end, scale, True, PLAN)
        slot = (sequence.to(tl.int64) * heads + head) * tl.num_programs(2) + tl.program_id(2)
        _store_state(sums, states, slot, real, state, PLAN)
    else:
        state = _with_sinks(nothing, sinks, head, real)
        if PLAN.fixed:
            for border in range(low, end, PLAN.fixed):
                high = tl.minimum(border + PLAN.fixed, end)
                part = _visit(nothing, main, rest, keys, blocks, positions, lowest, border, high, scale, True, PLAN)
                state = _fold(state, part)
        else:
            if not (PLAN.single or PLAN.window):  # the keys that every row sees
                whole = tl.maximum((place + 1) // PLAN.tile * PLAN.tile, 0)
                state = _visit(state, main, rest, keys, blocks, positions, lowest, low, whole, scale, False, PLAN)
                low = whole
            state = _visit(state, main, rest, keys, blocks, positions, lowest, low, end, scale, True, PLAN)
        _store_result(output, token * heads + head, real, state, PLAN)


@_any_value
def combine(sums, states, starts, contexts, sinks, output, splits, PLAN: tl.constexpr):
    """Add up the splits of `attend`, in their order. One program: (sequence, head)."""
    sequence, head = tl.program_id(0), tl.program_id(1) + tl.arange(0, 1)
    start = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - start != 1:
        return
    context = tl.load(contexts + sequence)
    low, length = _borders(_lowest(context - 1, PLAN), context, splits, PLAN)
    used = tl.cdiv(context - low, length)
    real = head >= 0
    state = _with_sinks(_nothing(1, PLAN), sinks, head, real)
    slot = (sequence.to(tl.int64) * tl.num_programs(1) + head) * splits
    for first in range(0, used, ABREAST):
        for other in tl.static_range(ABREAST):
            split = first + other + tl.arange(0, 1)
            state = _fold(state, _load_state(sums, states, slot + split, split < used, PLAN))
    _store_result(output, start.to(tl.int64) * tl.num_programs(1) + head, real, state, PLAN)


@triton.jit
def _find_tile(starts, sequences, PLAN: tl.constexpr):
    """The program's sequence, that one's first token and count of queries, and the first query's number there, which
    may be past the last.

    Tile starts[s] // queries + s is the first of sequence s: at least as many as it needs lie before the next one's.
    """
    if PLAN.single:
        sequence = tl.program_id(0)
        first = 0
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: they begin first
        sequence = 0
        after = sequences
        while after - sequence > 1:
            middle = (sequence + after) // 2
            reached = tl.load(starts + middle) // PLAN.queries + middle <= tile
            sequence = tl.where(reached, middle, sequence)
            after = tl.where(reached, after, middle)
        first = (tile - tl.load(starts + sequence) // PLAN.queries - sequence) * PLAN.queries
    start = tl.load(starts + sequence)
    return sequence, start, tl.load(starts + sequence + 1) - start, first


@triton.jit
def _rows(first, count, PLAN: tl.constexpr):
    """How many heads there are, the program's KV head; of each row the head, the query's number, if there is one."""
    row = tl.arange(0, PLAN.rows)
    member = tl.program_id(1) % PLAN.chunks * PLAN.chunk + row % PLAN.chunk
    heads = tl.num_programs(1) // PLAN.chunks * PLAN.group
    kv_head = (tl.program_id(1) // PLAN.chunks).to(tl.int64)
    index = first + row // PLAN.chunk
    real = (row // PLAN.chunk < PLAN.queries) & (index < count) & (member < PLAN.group)
    return heads, kv_head, kv_head * PLAN.group + member, index, real


@triton.jit
def _lowest(position, PLAN: tl.constexpr):
    """The first key that a query at the position sees."""
    return tl.maximum(position - PLAN.window + 1, 0) if PLAN.window else 0


@triton.jit
def _borders(lowest, end, splits, PLAN: tl.constexpr):
    """Where the first split of the keys lowest .. end - 1 starts, and the length of all: multiples of the tile."""
    if PLAN.fixed:
        low = lowest // PLAN.fixed * PLAN.fixed
        length = PLAN.fixed
    else:
        low = lowest // PLAN.tile * PLAN.tile
        length = tl.maximum(tl.cdiv(tl.cdiv(end - low, PLAN.tile), splits), 1) * PLAN.tile
    return low, length


@triton.jit
def _load_queries(rows, real, PLAN: tl.constexpr):
    """(rows, main) and, where there is one, (rows, rest)."""
    lane = tl.arange(0, PLAN.main)[None, :]
    width: tl.constexpr = PLAN.value_dim if PLAN.shared else PLAN.head_dim
    main = tl.load(rows[:, None] + lane, mask=real[:, None] & (lane < width), other=0.0)
    rest = main
    if PLAN.rest:
        lane = width + tl.arange(0, PLAN.rest)[None, :]
        rest = tl.load(rows[:, None] + lane, mask=real[:, None] & (lane < PLAN.head_dim), other=0.0)
    return main, rest


@triton.jit
def _load_keys(rows, live, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHECKED: tl.constexpr):
    """(tile, padded): zeros where a key does not count, since what the cache holds there may be NaN."""
    lane = tl.arange(0, PADDED)[None, :]
    if CHECKED or WIDTH != PADDED:
        mask = lane < WIDTH
        if CHECKED:
            mask = mask & live[:, None]
        found = tl.load(rows[:, None] + lane, mask=mask, other=0.0)
    else:
        found = tl.load(rows[:, None] + lane)
    return found


@triton.jit
def _visit(
    state, main, rest, keys, blocks, positions, lowest, low, high, scale, CHECKED: tl.constexpr, PLAN: tl.constexpr
):
    """The state after the keys low .. high - 1, low a multiple of the tile; those below `lowest` no row sees.

    CHECKED: some rows may not see some of the keys. positions: of each row's query, -1: none.
    """
    highest, total, mixed = state
    width: tl.constexpr = PLAN.value_dim if PLAN.shared else PLAN.head_dim
    for first in range(low, high, PLAN.tile):
        key = first + tl.arange(0, PLAN.tile)
        live = (key >= lowest) & (key < high)
        if CHECKED:
            block = tl.load(blocks + key // PLAN.block_size, mask=live, other=0)
        else:
            block = tl.load(blocks + key // PLAN.block_size)
        rows = keys + (block.to(tl.int64) * PLAN.cache_block + key % PLAN.block_size * PLAN.cache_token)
        found = _load_keys(rows, live, width, PLAN.main, CHECKED)
        scores = dot(main, tl.trans(found), None)
        if PLAN.rest:
            more = _load_keys(rows + width, live, PLAN.head_dim - width, PLAN.rest, CHECKED)
            scores = dot(rest, tl.trans(more), scores)
        scores *= scale
        if PLAN.softcap > 0:  # softcap * tanh, by way of exp2
            scores = PLAN.softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if CHECKED:
            seen = key[None, :] <= positions[:, None]
            if PLAN.window:
                seen = seen & (key[None, :] > positions[:, None] - PLAN.window)
            scores = tl.where(seen, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        correction = tl.exp2(highest - raised)
        total = tl.fma(total, correction, tl.sum(weights, 1))
        if not PLAN.shared:
            found = _load_keys(rows + PLAN.cache_part, live, PLAN.value_dim, PLAN.main, CHECKED)
        mixed = dot(weights.to(found.dtype), found, mixed * correction[:, None])
        highest = raised
    return highest, total, mixed


@triton.jit
def _nothing(ROWS: tl.constexpr, PLAN: tl.constexpr):
    """The state before any key."""
    width: tl.constexpr = PLAN.main
    return tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, width), tl.float32)


@triton.jit
def _with_sinks(state, sinks, head, real):
    """The state after the heads' sinks, each a score without a value."""
    highest, total, mixed = state
    if sinks is not None:
        highest = tl.maximum(tl.load(sinks + head, mask=real, other=LOWEST) * LOG2_E, LOWEST)
        total = tl.full(total.shape, 1.0, tl.float32)
    return highest, total, mixed


@triton.jit
def _fold(state, part):
    """The state after the keys of both. `part` of nothing changes no bit."""
    highest, total, mixed = state
    other_highest, other_total, other_mixed = part
    raised = tl.maximum(highest, other_highest)
    ours, theirs = tl.exp2(highest - raised), tl.exp2(other_highest - raised)
    total = tl.fma(total, ours, other_total * theirs)
    mixed = tl.fma(mixed, tl.broadcast_to(ours[:, None], mixed.shape), other_mixed * theirs[:, None])
    return raised, total, mixed


@triton.jit
def _store_state(sums, states, slot, real, state, PLAN: tl.constexpr):
    highest, total, mixed = state
    lane = tl.arange(0, PLAN.main)[None, :]
    tl.store(states + slot * 2, highest, mask=real)
    tl.store(states + slot * 2 + 1, total, mask=real)
    tl.store(sums + slot[:, None] * PLAN.main + lane, mixed, mask=real[:, None])


@triton.jit
def _load_state(sums, states, slot, real, PLAN: tl.constexpr):
    lane = tl.arange(0, PLAN.main)[None, :]
    highest = tl.load(states + slot * 2, mask=real, other=LOWEST)
    total = tl.load(states + slot * 2 + 1, mask=real, other=0.0)
    return highest, total, tl.load(sums + slot[:, None] * PLAN.main + lane, mask=real[:, None], other=0.0)


@triton.jit
def _store_result(output, rows, real, state, PLAN: tl.constexpr):
    """Without any key and sink the result is 0."""
    _, total, mixed = state
    lane = tl.arange(0, PLAN.main)[None, :]
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    at = output + rows[:, None] * PLAN.value_dim + lane
    tl.store(at, result.to(output.dtype.element_ty), mask=real[:, None] & (lane < PLAN.value_dim))
