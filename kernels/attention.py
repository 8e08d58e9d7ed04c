"""Attention over a paged KV cache, in plain torch operations.

Knows tensors only: no model, no scheduler. `reference/attention.py` holds the definition that this file must equal.

Batch invariance. The bits of one row depend on nothing but that row's own query and keys:

- Keys are visited in tiles whose borders stand at fixed positions of the sequence (multiples of the tile length), so
  that the order of every sum is the same in a prefill chunk, after a prefix hit and in decode.
- Matrix products are `torch.bmm` in float32 with all three sizes padded to multiples of 16. Measured (oneMKL, 1 to 3
  threads, 16 to 4544 rows): only then does a row's result not depend on the number of rows and matrices.
- A tile in which a row sees nothing leaves it exactly as it was (weights 0, correction exp(0) = 1), so visiting it for
  a neighbour's sake, or skipping it, is the same.

The sums over tiles are the online softmax of Milakov and Gimelshein (arXiv:1805.02867), in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEY_TILE = 128  # tokens; a block larger than that is its own tile
QUERY_TILE = 64  # queries of one sequence that are computed together; bounds the memory for scores
LOWEST = -1e30  # start of the running maximum: finite, so that a row without any key yet stays free of NaN


def write_cache(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store the new tokens' keys and values, in place.

    key, value: (tokens, kv_heads, head_dim), of the cache's dtype. cache: (blocks, 2, kv_heads, block_size, head_dim),
    may be a strided view. slots: (tokens,) int64, block * block_size + offset, all different.
    """
    block_size = cache.shape[3]
    blocks = slots // block_size
    offsets = slots % block_size
    cache[blocks, 0, :, offsets] = key
    cache[blocks, 1, :, offsets] = value


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' cached keys and values, the new tokens' own included.

    query: (tokens, heads, head_dim), heads a multiple of kv_heads; head h reads KV head h // (heads / kv_heads).
    cache: (blocks, 2, kv_heads, block_size, head_dim), block_size a power of two, may be a strided view.
    block_table: (sequences, max_blocks) int32; entry b is the block of positions b * block_size and up. Entries that
    lie outside the window or past the context may be any block's number; what those blocks hold does not matter, not
    even NaN.
    query_starts: sequences + 1 offsets into tokens; context_lens: length of each sequence with its new tokens. Both on
    the host, so that no length is ever read back from a device.
    Query j of sequence s stands at position context_lens[s] - (its query count) + j; the query at position p sees
    positions p - window + 1 .. p.
    Returns (tokens, heads, head_dim) in the query's dtype.
    """
    length = max(KEY_TILE, cache.shape[3])
    output = torch.empty_like(query)
    singles: list[_Span] = []
    for sequence, context_len in enumerate(context_lens):
        start, end = query_starts[sequence], query_starts[sequence + 1]
        if end - start == 1:
            singles.append(_Span.of(sequence, start, context_len - 1, 1, length, window))
            continue
        for first in range(start, end, QUERY_TILE):
            count = min(QUERY_TILE, end - first)
            span = _Span.of(sequence, first, context_len - end + first, count, length, window)
            rows = slice(first, first + count)
            output[rows] = _attend([span], query[rows].unsqueeze(0), cache, block_table, length, scale)[0]
    if singles:
        singles.sort(key=lambda span: -span.num_tiles)
        tokens = torch.tensor([span.token for span in singles], device=query.device)
        output[tokens] = _attend(singles, query[tokens].unsqueeze(1), cache, block_table, length, scale)[:, 0]
    return output


@dataclass(frozen=True)
class _Span:
    """Consecutive queries of one sequence, and the tiles of keys that any of them sees."""

    sequence: int
    token: int  # index of the first query
    position: int  # of the first query
    num_queries: int
    lowest: int  # first key position that any query sees; the last is the last query's own
    first_tile: int
    num_tiles: int
    window: int | None

    @classmethod
    def of(cls, sequence: int, token: int, position: int, count: int, length: int, window: int | None) -> _Span:
        lowest = 0 if window is None else max(0, position - window + 1)
        num_tiles = (position + count - 1) // length - lowest // length + 1
        return cls(sequence, token, position, count, lowest, lowest // length, num_tiles, window)

    def sees_all(self, start: int, length: int) -> bool:
        """Whether each query sees each of the keys start .. start + length - 1."""
        last = self.position + self.num_queries - 1
        return start + length - 1 <= self.position and (self.window is None or start > last - self.window)


def _attend(spans: list[_Span], query: Tensor, cache: Tensor, block_table: Tensor, length: int, scale: float) -> Tensor:
    """Attention of spans with equally many queries and the same window, those with most tiles first.

    query: (spans, queries, heads, head_dim) -> the same shape. length: tokens in a tile.
    """
    num_spans, num_queries, heads, head_dim = query.shape
    kv_heads = cache.shape[2]
    group = heads // kv_heads
    rows = num_queries * group
    matrices, padded_rows, padded_dim = num_spans * kv_heads, _padded(rows), _padded(head_dim)

    folded = query.new_zeros((num_spans, kv_heads, padded_rows, padded_dim), dtype=torch.float32)
    grouped = query.view(num_spans, num_queries, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    folded[:, :, :rows, :head_dim].view(grouped.shape).copy_(grouped)
    folded = folded.mul_(scale).view(matrices, padded_rows, padded_dim)

    table = block_table[torch.tensor([span.sequence for span in spans], device=query.device)]
    keys = folded.new_zeros((num_spans, kv_heads, length, padded_dim))
    values = torch.zeros_like(keys)
    highest = folded.new_full((matrices, padded_rows, 1), LOWEST)
    total = torch.zeros_like(highest)
    result = torch.zeros_like(folded)
    for step in range(spans[0].num_tiles):
        spans = [span for span in spans if span.num_tiles > step]  # a leading part
        live = slice(0, len(spans) * kv_heads)
        starts = [(span.first_tile + step) * length for span in spans]
        _gather(spans, starts, cache, table, keys, values)
        scores = torch.bmm(folded[live], keys.view(matrices, length, -1)[live].transpose(1, 2))
        if not all(span.sees_all(start, length) for span, start in zip(spans, starts, strict=True)):
            by_row = scores.view(len(spans), kv_heads, padded_rows, length)[:, :, :rows]
            unseen = _unseen(spans, starts, length, query.device)
            by_row.view(-1, kv_heads, num_queries, group, length).masked_fill_(unseen[:, None, :, None], -torch.inf)
        raised = torch.maximum(highest[live], scores.amax(-1, keepdim=True))
        correction = torch.exp(highest[live] - raised)
        weights = scores.sub_(raised).exp_()
        highest[live] = raised
        total[live] = total[live] * correction + weights.sum(-1, keepdim=True)
        mixed = torch.bmm(weights, values.view(matrices, length, -1)[live])
        result[live] = result[live] * correction + mixed

    unfolded = (result / total).view(num_spans, kv_heads, padded_rows, padded_dim)[:, :, :rows, :head_dim]
    return unfolded.view(grouped.shape).permute(0, 2, 1, 3, 4).reshape(query.shape).to(query.dtype)


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def _unseen(spans: list[_Span], starts: list[int], length: int, device: torch.device) -> Tensor:
    """Which of the tile's keys each query does not see: (spans, queries, length) bool."""
    keys = torch.tensor(starts, device=device)[:, None, None] + torch.arange(length, device=device)
    queries = torch.tensor([span.position for span in spans], device=device)[:, None, None]
    queries = queries + torch.arange(spans[0].num_queries, device=device)[:, None]
    window = spans[0].window
    return keys > queries if window is None else (keys > queries) | (keys <= queries - window)


def _gather(spans: list[_Span], starts: list[int], cache: Tensor, table: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copy one tile of each span to keys and values: (spans, kv_heads, length, padded head_dim) float32."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    length = keys.shape[2]
    num_blocks = length // block_size
    columns = torch.tensor(starts, device=table.device)[:, None] // block_size
    columns = columns + torch.arange(num_blocks, device=table.device)
    columns.clamp_(max=table.shape[1] - 1)  # past the table is past the context: not seen
    blocks = cache.index_select(0, table[: len(spans)].gather(1, columns).flatten())
    blocks = blocks.view(len(spans), num_blocks, 2, kv_heads, block_size, head_dim)
    shape = (len(spans), kv_heads, num_blocks, block_size, -1)
    keys[: len(spans)].view(shape)[..., :head_dim].copy_(blocks[:, :, 0].transpose(1, 2))
    values[: len(spans)].view(shape)[..., :head_dim].copy_(blocks[:, :, 1].transpose(1, 2))
    # A weight of 0 does not undo a NaN: what no query sees may be another sequence's leavings.
    for index, (span, start) in enumerate(zip(spans, starts, strict=True)):
        if span.lowest > start:
            values[index, :, : span.lowest - start] = 0.0
        if start + length > span.position + span.num_queries:
            values[index, :, span.position + span.num_queries - start :] = 0.0
