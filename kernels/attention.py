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
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.kernels import cache_int8

KEY_TILE = 128  # tokens; a block larger than that is its own tile
QUERY_TILE = 64  # queries of one sequence that are computed together; bounds the memory for scores
LOWEST = -1e30  # start of the running maximum: finite, so that a row without any key yet stays free of NaN


class Lengths(NamedTuple):
    """The lengths of a step's sequences where the kernels of a GPU read them; see `paged_attention`."""

    query_starts: Tensor  # (sequences + 1,) int32
    context_lens: Tensor  # (sequences,) int32; 0: a row that stands for nothing, whose result is 0


def write_cache(key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor) -> None:
    """Store the new tokens' keys and values, in place.

    key, value: (tokens, kv_heads, head_dim); no value for a cache of one part, (blocks, 1, ...), as `paged_attention`
    takes it with a value_dim. cache: (blocks, 2, kv_heads, block_size, head_dim) of the same dtype, or
    (..., head_dim + 4) int8, rows as in `cache_int8`; its head_dim is contiguous, else it may be a strided view.
    slots: (tokens,) int64, block * block_size + offset, all different; on a GPU -1 for a token that is not
    stored, never the first.
    """
    block_size, idle = cache.shape[3], slots < 0 if slots.is_cuda else None
    if idle is not None:  # they write once more what the first token does, so that nobody waits to count them
        slots = torch.where(idle, slots[0], slots)
    blocks = slots // block_size
    offsets = slots % block_size
    for part, rows in enumerate((key,) if value is None else (key, value)):
        rows = rows if idle is None else torch.where(idle[:, None, None], rows[:1], rows)
        cache[blocks, part, :, offsets] = cache_int8.quantise(rows) if cache.dtype == torch.int8 else rows


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
    value_dim: int | None = None,
    on_device: Lengths | None = None,
) -> Tensor:
    """Causal attention of new tokens over their sequences' cached keys and values, the new tokens' own included.

    query: (tokens, heads, head_dim), heads a multiple of kv_heads; head h reads KV head h // (heads / kv_heads).
    cache: as `write_cache` fills it, block_size a power of two.
    block_table: (sequences, max_blocks) int32; entry b is the block of positions b * block_size and up. Entries that
    lie outside the window or past the context may be any block's number; what those blocks hold does not matter, not
    even NaN.
    query_starts: sequences + 1 offsets into tokens; context_lens: length of each sequence with its new tokens. Both on
    the host, so that no length is ever read back from a device.
    Query j of sequence s stands at position context_lens[s] - (its query count) + j; the query at position p sees
    positions p - window + 1 .. p.
    softcap: the scaled scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118).
    sinks: (heads,) float32, one more score for each head, which takes its share of the softmax and adds no value
    (gpt-oss, arXiv:2508.10925).
    value_dim: None: a cache of two parts, keys and values. Else of one, (blocks, 1, kv_heads, block_size, head_dim),
    and the values are the first value_dim numbers of the keys (multi-head latent attention, arXiv:2405.04434).
    on_device: on a GPU the two lists once more, as tensors. Those count; the lists then only bound the launch, so that
    a captured launch serves all shorter lengths. On a CPU not given.
    Returns (tokens, heads, value_dim or head_dim) in the query's dtype.
    """
    scores = _Scores(max(KEY_TILE, cache.shape[3]), scale, softcap, sinks)
    length = scores.length
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
            output[rows] = _attend([span], query[rows].unsqueeze(0), cache, block_table, scores)[0]
    if singles:
        singles.sort(key=lambda span: -span.num_tiles)
        tokens = torch.tensor([span.token for span in singles], device=query.device)
        output[tokens] = _attend(singles, query[tokens].unsqueeze(1), cache, block_table, scores)[:, 0]
    return output if value_dim is None else output[..., :value_dim]


@dataclass(frozen=True)
class _Scores:
    """How scores are made: `length` keys at a time."""

    length: int
    scale: float
    softcap: float | None
    sinks: Tensor | None

    def of(self, query: Tensor, keys: Tensor) -> Tensor:
        """query: (matrices, rows, dim), scaled. keys: (matrices, length, dim) -> (matrices, rows, length)."""
        scores = torch.bmm(query, keys.transpose(1, 2))
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def start(self, folded: Tensor, kv_heads: int, rows: int) -> tuple[Tensor, Tensor]:
        """Highest score and sum of weights of each row before any key: (matrices, padded rows, 1) both."""
        highest = folded.new_full((*folded.shape[:2], 1), LOWEST)
        total = torch.zeros_like(highest)
        if self.sinks is not None:
            by_head = self.sinks.view(kv_heads, 1, -1)
            real = highest.view(-1, kv_heads, folded.shape[1])[:, :, :rows]
            real.view(*real.shape[:2], -1, by_head.shape[2]).copy_(by_head)
            total.fill_(1.0)
        return highest, total


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


def _attend(spans: list[_Span], query: Tensor, cache: Tensor, block_table: Tensor, how: _Scores) -> Tensor:
    """Attention of spans with equally many queries and the same window, those with most tiles first.

    query: (spans, queries, heads, head_dim) -> the same shape.
    """
    num_spans, num_queries, heads, head_dim = query.shape
    kv_heads, length = cache.shape[2], how.length
    group = heads // kv_heads
    rows = num_queries * group
    matrices, padded_rows, padded_dim = num_spans * kv_heads, _padded(rows), _padded(head_dim)

    folded = query.new_zeros((num_spans, kv_heads, padded_rows, padded_dim), dtype=torch.float32)
    grouped = query.view(num_spans, num_queries, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    folded[:, :, :rows, :head_dim].view(grouped.shape).copy_(grouped)
    folded = folded.mul_(how.scale).view(matrices, padded_rows, padded_dim)

    table = block_table[torch.tensor([span.sequence for span in spans], device=query.device)]
    keys = folded.new_zeros((num_spans, kv_heads, length, padded_dim))
    values = torch.zeros_like(keys) if cache.shape[1] == 2 else keys
    highest, total = how.start(folded, kv_heads, rows)
    result = torch.zeros_like(folded)
    for step in range(spans[0].num_tiles):
        spans = [span for span in spans if span.num_tiles > step]  # a leading part
        live = slice(0, len(spans) * kv_heads)
        starts = [(span.first_tile + step) * length for span in spans]
        _gather(spans, starts, cache, table, keys, values)
        scores = how.of(folded[live], keys.view(matrices, length, -1)[live])
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
    """Copy one tile of each span to keys and values: (spans, kv_heads, length, padded head_dim) float32; values are the
    keys themselves where the cache has one part."""
    _, parts, kv_heads, block_size, _ = cache.shape
    length = keys.shape[2]
    num_blocks = length // block_size
    columns = torch.tensor(starts, device=table.device)[:, None] // block_size
    columns = columns + torch.arange(num_blocks, device=table.device)
    columns.clamp_(max=table.shape[1] - 1)  # past the table is past the context: not seen
    blocks = cache.index_select(0, table[: len(spans)].gather(1, columns).flatten())
    blocks = blocks.view(len(spans), num_blocks, parts, kv_heads, block_size, -1)
    shape = (len(spans), kv_heads, num_blocks, block_size, -1)
    for part, into in enumerate((keys, values)[:parts]):
        rows, into = blocks[:, :, part].transpose(1, 2), into[: len(spans)].view(shape)
        if rows.dtype == torch.int8:
            cache_int8.dequantise(rows, into[..., : rows.shape[-1] - cache_int8.SCALE_BYTES])
        else:
            into[..., : rows.shape[-1]].copy_(rows)
    # A weight of 0 does not undo a NaN: what no query sees may be another sequence's leavings.
    for index, (span, start) in enumerate(zip(spans, starts, strict=True)):
        if span.lowest > start:
            values[index, :, : span.lowest - start] = 0.0
        if start + length > span.position + span.num_queries:
            values[index, :, span.position + span.num_queries - start :] = 0.0
