"""What `kernels.attention` must compute, said as plainly as possible. For tests and for reading, not for speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write_cache(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Same contract as `kernels.attention.write_cache`."""
    block_size = cache.shape[3]
    for token, slot in enumerate(slots.tolist()):
        cache[slot // block_size, 0, :, slot % block_size] = key[token]
        cache[slot // block_size, 1, :, slot % block_size] = value[token]


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
    """Same contract as `kernels.attention.paged_attention`; one query at a time, softmax in float64."""
    group = query.shape[1] // cache.shape[2]
    block_size = cache.shape[3]
    output = torch.empty_like(query)
    for sequence, context_len in enumerate(context_lens):
        start, end = query_starts[sequence], query_starts[sequence + 1]
        for token in range(start, end):
            position = context_len - end + token
            first = 0 if window is None else max(0, position - window + 1)
            seen = range(first, position + 1)
            slots = [(int(block_table[sequence, p // block_size]), p % block_size) for p in seen]
            keys = torch.stack([cache[block, 0, :, offset] for block, offset in slots], 1)  # (kv_heads, seen, head_dim)
            values = torch.stack([cache[block, 1, :, offset] for block, offset in slots], 1)
            keys, values = (part.double().repeat_interleave(group, 0) for part in (keys, values))
            weights = torch.softmax(torch.einsum("hd,hsd->hs", query[token].double(), keys) * scale, -1)
            output[token] = torch.einsum("hs,hsd->hd", weights, values).to(query.dtype)
    return output
