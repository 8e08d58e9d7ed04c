"""Attention over a paged KV cache, in plain torch operations. `tests/reference/attention.py` is its definition.

Batch invariance. The bits of a row depend only on its own query and keys:

- Key tiles start at fixed positions of the sequence (multiples of the tile length), so that the order of every sum is
  the same in a prefill chunk, after a prefix cache hit and in decode.
- Matrix products are `torch.bmm` in float32 with all three sizes padded to multiples of 16. Measured (oneMKL, 1 to 3
  threads, 16 to 4544 rows): only then is a row's result independent of the number of rows and matrices. On processors
  with AVX2 only, oneMKL also needs MKL_CBWR=AUTO,STRICT for that; engine and worker processes start with it.
- A tile in which a row sees no key does not change the row (weights 0, correction exp(0) = 1), so it may be visited for
  another row or skipped.

The softmax is the online softmax of Milakov and Gimelshein (arXiv:1805.02867), in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from serve_llm.kernels import cache_fp8, cache_int8

KEY_TILE = 128  # tokens; a larger cache block is one tile
QUERY_TILE = 64  # queries of one sequence computed together; bounds the memory for scores
INITIAL_MAX = -1e30  # running maximum before any key; finite to avoid NaN


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step's sequences on the GPU; see `paged_attention`."""

    query_starts: Tensor  # (sequences + 1,) int32
    context_lens: Tensor  # (sequences,) int32; 0 for a padding sequence, whose results are 0
    # A backend's cache of values derived from the lengths, shared by the layers with the same KV layout.
    plans: dict[Any, Any] = field(default_factory=dict)

    def without_plans(self) -> Lengths:
        """Copy for another pass over the layers, because the lengths may have changed in place."""
        return Lengths(self.query_starts, self.context_lens)


def write_cache(
    key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor, cache_scales: Tensor | None = None
) -> None:
    """Store the new tokens' keys and values, in place.

    key, value: (tokens, kv_heads, head_dim); value is None for a cache of one part, (blocks, 1, ...); see value_dim of
    `paged_attention`. cache: (blocks, 2, kv_heads, block_size, head_dim) of the same dtype, or (..., head_dim + 4)
    int8, rows as in `cache_int8`, or of float8_e4m3fn, as in `cache_fp8`; may be a strided view with a contiguous last
    dimension.
    slots: (tokens,) int64, block * block_size + offset, all different. On a GPU, -1 for a token that is not stored,
    never the first.
    cache_scales: for a cache in fp8, (parts, kv_heads) float32; keys (the first part) and values are divided by them.
    None: all are 1.
    """
    block_size = cache.shape[3]
    is_padding = slots < 0 if slots.is_cuda else None
    if is_padding is not None:  # writes the first token again, because filtering would synchronise with the device
        slots = torch.where(is_padding, slots[0], slots)
    blocks = slots // block_size
    offsets = slots % block_size
    for part, rows in enumerate((key,) if value is None else (key, value)):
        rows = rows if is_padding is None else torch.where(is_padding[:, None, None], rows[:1], rows)
        if cache.dtype == torch.int8:
            rows = cache_int8.quantise(rows)
        elif cache.dtype == cache_fp8.DTYPE:
            scaled = rows if cache_scales is None else rows / cache_scales[part, :, None]
            rows = _as_indexable(cache_fp8.quantise(scaled))
        _as_indexable(cache)[blocks, part, :, offsets] = rows


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    value_dim: int | None = None,
    cache_scales: Tensor | None = None,
    on_device: Lengths | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' cached keys and values, including their own.

    query: (tokens, heads, head_dim), heads a multiple of kv_heads; head h reads KV head h // (heads / kv_heads).
    cache: as `write_cache` fills it, block_size a power of two.
    block_table: (sequences, max_blocks) int32; entry b is the block of positions b * block_size and up. Entries outside
    the window or past the context may be any block number, and the contents of those blocks do not matter, even NaN.
    query_starts: sequences + 1 offsets into tokens; context_lens: length of each sequence with its new tokens. Both are
    on the host, so that no length is read back from a device.
    Query j of sequence s has position context_lens[s] - (its query count) + j; the query at position p sees positions
    p - window + 1 .. p.
    softcap: the scaled scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
    sinks: (heads,) float32, one more score per head, which takes part in the softmax but has no value (gpt-oss,
    arXiv:2508.10925).
    alibi_slopes: (heads,) float32; the score of a key d positions before the query is lowered by its head's slope * d,
    after the cap (ALiBi, arXiv:2108.12409).
    value_dim: None for a cache of two parts, keys and values. Otherwise the cache has one part, (blocks, 1, kv_heads,
    block_size, head_dim), and the values are the first value_dim elements of the keys (multi-head latent attention,
    arXiv:2405.04434).
    cache_scales: as `write_cache` divided the rows of the cache by them.
    on_device: query_starts and context_lens as tensors, which compiled kernels read instead of the lists. On a GPU the
    lists then only bound the launch, so that a captured launch serves all shorter lengths: at most as many tokens and
    sequences, contexts at most as long as the longest one, and sequences with several queries only where the lists have
    some. In a recorded step on a CPU the lists only have the number of sequences. None: the lists count.
    Returns (tokens, heads, value_dim or head_dim) in the query's dtype.
    """
    length = max(KEY_TILE, cache.shape[3])
    params = _ScoreParams(length, scale, softcap, sinks, alibi_slopes, cache_scales)
    output = torch.empty_like(query)
    singles: list[_KeySpan] = []
    for sequence, context_len in enumerate(context_lens):
        start = query_starts[sequence]
        end = query_starts[sequence + 1]
        if end - start == 1:
            singles.append(_KeySpan.make(sequence, start, context_len - 1, 1, length, window))
            continue
        for first in range(start, end, QUERY_TILE):
            count = min(QUERY_TILE, end - first)
            span = _KeySpan.make(sequence, first, context_len - end + first, count, length, window)
            rows = slice(first, first + count)
            output[rows] = _attend([span], query[rows].unsqueeze(0), cache, block_table, params)[0]
    if singles:
        singles.sort(key=lambda span: -span.num_tiles)
        tokens = torch.tensor([span.token for span in singles], device=query.device)
        output[tokens] = _attend(singles, query[tokens].unsqueeze(1), cache, block_table, params)[:, 0]
    return output if value_dim is None else output[..., :value_dim]


@dataclass(frozen=True)
class _ScoreParams:
    """How to compute scores from queries and keys."""

    length: int  # keys of a tile
    scale: float
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    cache_scales: Tensor | None

    def compute(self, query: Tensor, keys: Tensor) -> Tensor:
        """query: (matrices, rows, dim), scaled. keys: (matrices, length, dim) -> (matrices, rows, length)."""
        scores = torch.bmm(query, keys.transpose(1, 2))
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def initial_state(self, rows_by_kv_head: Tensor, kv_heads: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the maximum score and the sum of weights before any key, both (matrices, padded rows, 1)."""
        row_max = rows_by_kv_head.new_full((*rows_by_kv_head.shape[:2], 1), INITIAL_MAX)
        row_sum = torch.zeros_like(row_max)
        if self.sinks is not None:
            by_head = self.sinks.view(kv_heads, 1, -1)
            sink_rows = row_max.view(-1, kv_heads, rows_by_kv_head.shape[1])[:, :, :rows]
            sink_rows.view(*sink_rows.shape[:2], -1, by_head.shape[2]).copy_(by_head)
            row_sum.fill_(1.0)
        return row_max, row_sum


@dataclass(frozen=True)
class _KeySpan:
    """Consecutive queries of one sequence, and the key tiles that at least one of them sees."""

    sequence: int
    token: int  # index of the first query
    position: int  # position of the first query
    num_queries: int
    lowest: int  # first key position that any query sees; the last one is the position of the last query
    first_tile: int
    num_tiles: int
    window: int | None

    @classmethod
    def make(cls, sequence: int, token: int, position: int, count: int, length: int, window: int | None) -> _KeySpan:
        lowest = 0 if window is None else max(0, position - window + 1)
        num_tiles = (position + count - 1) // length - lowest // length + 1
        return cls(sequence, token, position, count, lowest, lowest // length, num_tiles, window)

    def sees_all(self, start: int, length: int) -> bool:
        """Whether every query sees all keys start .. start + length - 1."""
        last = self.position + self.num_queries - 1
        return start + length - 1 <= self.position and (self.window is None or start > last - self.window)


def _attend(spans: list[_KeySpan], query: Tensor, cache: Tensor, block_table: Tensor, params: _ScoreParams) -> Tensor:
    """Compute attention of spans with equal query counts and windows, sorted by descending number of tiles.

    query: (spans, queries, heads, head_dim). Returns the same shape.
    """
    num_spans, num_queries, heads, head_dim = query.shape
    kv_heads = cache.shape[2]
    length = params.length
    group = heads // kv_heads
    rows = num_queries * group
    matrices = num_spans * kv_heads
    padded_rows = _pad_to_16(rows)
    padded_dim = _pad_to_16(head_dim)

    rows_by_kv_head = query.new_zeros((num_spans, kv_heads, padded_rows, padded_dim), dtype=torch.float32)
    grouped = query.view(num_spans, num_queries, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    rows_by_kv_head[:, :, :rows, :head_dim].view(grouped.shape).copy_(grouped)
    scales = params.cache_scales
    if scales is not None:
        rows_by_kv_head.mul_(scales[0, :, None, None])
    rows_by_kv_head = rows_by_kv_head.mul_(params.scale).view(matrices, padded_rows, padded_dim)

    table = block_table[torch.tensor([span.sequence for span in spans], device=query.device)]
    keys = rows_by_kv_head.new_zeros((num_spans, kv_heads, length, padded_dim))
    values = torch.zeros_like(keys) if cache.shape[1] == 2 else keys
    row_max, row_sum = params.initial_state(rows_by_kv_head, kv_heads, rows)
    result = torch.zeros_like(rows_by_kv_head)
    for step in range(spans[0].num_tiles):
        spans = [span for span in spans if span.num_tiles > step]  # a prefix, since they are sorted
        active = slice(0, len(spans) * kv_heads)
        starts = [(span.first_tile + step) * length for span in spans]
        _gather_tile(spans, starts, cache, table, keys, values)
        scores = params.compute(rows_by_kv_head[active], keys.view(matrices, length, -1)[active])
        by_row = scores.view(len(spans), kv_heads, padded_rows, length)[:, :, :rows]
        by_query = by_row.view(-1, kv_heads, num_queries, group, length)
        if params.alibi_slopes is not None:
            distances = _measure_distances(spans, starts, length, query.device).float()
            by_query.add_(distances[:, None, :, None] * params.alibi_slopes.view(kv_heads, 1, group, 1))
        if not all(span.sees_all(start, length) for span, start in zip(spans, starts, strict=True)):
            hidden = _hidden_keys(spans, starts, length, query.device)
            by_query.masked_fill_(hidden[:, None, :, None], -torch.inf)
        new_max = torch.maximum(row_max[active], scores.amax(-1, keepdim=True))
        correction = torch.exp(row_max[active] - new_max)
        weights = scores.sub_(new_max).exp_()
        row_max[active] = new_max
        row_sum[active] = row_sum[active] * correction + weights.sum(-1, keepdim=True)
        mixed = torch.bmm(weights, values.view(matrices, length, -1)[active])
        result[active] = result[active] * correction + mixed

    unfolded = (result / row_sum).view(num_spans, kv_heads, padded_rows, padded_dim)[:, :, :rows, :head_dim]
    if scales is not None:
        unfolded = unfolded * scales[-1, :, None, None]
    return unfolded.view(grouped.shape).permute(0, 2, 1, 3, 4).reshape(query.shape).to(query.dtype)


def _pad_to_16(size: int) -> int:
    return -(-size // 16) * 16


def _hidden_keys(spans: list[_KeySpan], starts: list[int], length: int, device: torch.device) -> Tensor:
    """Mask of the tile's keys that each query does not see: (spans, queries, length) bool."""
    distances = _measure_distances(spans, starts, length, device)
    window = spans[0].window
    return distances > 0 if window is None else (distances > 0) | (distances <= -window)


def _measure_distances(spans: list[_KeySpan], starts: list[int], length: int, device: torch.device) -> Tensor:
    """The tile's positions less that of each query: (spans, queries, length) int64."""
    keys = torch.tensor(starts, device=device)[:, None, None] + torch.arange(length, device=device)
    queries = torch.tensor([span.position for span in spans], device=device)[:, None, None]
    return keys - (queries + torch.arange(spans[0].num_queries, device=device)[:, None])


def _as_indexable(tensor: Tensor) -> Tensor:
    """View an fp8 tensor, which torch cannot index, as bytes; return others unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == cache_fp8.DTYPE else tensor


def _gather_tile(
    spans: list[_KeySpan], starts: list[int], cache: Tensor, table: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Copy one tile of each span to keys and values, (spans, kv_heads, length, padded head_dim) float32.

    If the cache has one part, values is the same tensor as keys."""
    _, parts, kv_heads, block_size, _ = cache.shape
    length = keys.shape[2]
    num_blocks = length // block_size
    columns = torch.tensor(starts, device=table.device)[:, None] // block_size
    columns = columns + torch.arange(num_blocks, device=table.device)
    columns.clamp_(max=table.shape[1] - 1)  # positions beyond the table are beyond the context, hence masked
    numbers = table[: len(spans)].gather(1, columns).flatten()
    blocks = _as_indexable(cache).index_select(0, numbers).view(cache.dtype)
    blocks = blocks.view(len(spans), num_blocks, parts, kv_heads, block_size, -1)
    shape = (len(spans), kv_heads, num_blocks, block_size, -1)
    for part, target in enumerate((keys, values)[:parts]):
        rows = blocks[:, :, part].transpose(1, 2)
        target = target[: len(spans)].view(shape)
        if rows.dtype == torch.int8:
            cache_int8.dequantise(rows, target[..., : rows.shape[-1] - cache_int8.SCALE_BYTES])
        else:
            target[..., : rows.shape[-1]].copy_(rows)
    # Zero the values that no query sees: they may be NaN, and 0 * NaN is NaN.
    for index, (span, start) in enumerate(zip(spans, starts, strict=True)):
        if span.lowest > start:
            values[index, :, : span.lowest - start] = 0.0
        if start + length > span.position + span.num_queries:
            values[index, :, span.position + span.num_queries - start :] = 0.0
