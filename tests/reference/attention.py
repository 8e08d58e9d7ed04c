"""Oracle for `kernels.attention`: plain, slow paged attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_llm.kernels.attention import Lengths


def write_cache(key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor) -> None:
    """Same contract as `kernels.attention.write_cache`."""
    block_size = cache.shape[3]
    for part, rows in enumerate((key,) if value is None else (key, value)):
        stored = _rounded(rows) if cache.dtype == torch.int8 else rows
        for token, slot in enumerate(slots.tolist()):
            cache[slot // block_size, part, :, slot % block_size] = stored[token]


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
    on_device: Lengths | None = None,
) -> Tensor:
    """Same contract as `kernels.attention.paged_attention`; one query at a time, softmax in float64."""
    group = query.shape[1] // cache.shape[2]
    block_size = cache.shape[3]
    output = torch.empty_like(query)[..., :value_dim]
    for sequence, context_len in enumerate(context_lens):
        start, end = query_starts[sequence], query_starts[sequence + 1]
        for token in range(start, end):
            position = context_len - end + token
            first = 0 if window is None else max(0, position - window + 1)
            seen = range(first, position + 1)
            slots = [(int(block_table[sequence, p // block_size]), p % block_size) for p in seen]
            parts = [  # each (heads, seen, head_dim)
                _exact(torch.stack([cache[block, part, :, offset] for block, offset in slots], 1)).repeat_interleave(
                    group, 0
                )
                for part in range(cache.shape[1])
            ]
            keys, values = parts[0], parts[-1][..., :value_dim]
            scores = torch.einsum("hd,hsd->hs", query[token].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores += alibi_slopes.double()[:, None] * (torch.tensor(seen) - position)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], -1)
            weights = torch.softmax(scores, -1)[:, : len(slots)]
            output[token] = torch.einsum("hs,hsd->hd", weights, values).to(query.dtype)
    return output


def _rounded(x: Tensor) -> Tensor:
    """Quantise (tokens, kv_heads, head_dim) to rows of an int8 cache, (tokens, kv_heads, head_dim + 4) int8."""
    rows = torch.empty((*x.shape[:2], x.shape[2] + 4), dtype=torch.int8)
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            numbers = x[token, head].float()
            largest = numbers.abs().max()
            inverse = torch.tensor(127.0) / largest.clamp_min(1e-30)
            rows[token, head, :-4] = (numbers * inverse).round().nan_to_num(0.0).to(torch.int8)
            rows[token, head, -4:] = (largest / 127.0).reshape(1).view(torch.int8)
    return rows


def _exact(rows: Tensor) -> Tensor:
    """Dequantise the rows (kv_heads, seen, ...) of a cache: (kv_heads, seen, head_dim) float64."""
    if rows.dtype != torch.int8:
        return rows.double()
    scale = rows[..., -4:].contiguous().view(torch.float32)
    return rows[..., :-4].double() * scale.double()
