"""Attention of encoders: every token attends to all tokens of its prompt, or to nearby ones. No KV cache.

Each prompt is computed alone, so its bits do not depend on the others in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from serve_llm.kernels.norm import rms_norm
from serve_llm.kernels.rope import Angles, HeadNorms, apply_rope


def encoder_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
    angles: Angles | None,
    query_starts: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Split the joint projection, apply the head norms and rope, if given, and attend within each prompt.

    qkv: (tokens, (heads + 2 * kv_heads) * head_dim): queries, then keys, then values. heads is a multiple of kv_heads.
    query_starts: prompts + 1 offsets into tokens.
    window: a token attends to those at most `window` - 1 positions before or after it; None: to all of its prompt.
    alibi_slopes: (heads,) float32; the score of a token d positions before or after is lowered by its head's slope * d.
    Returns (tokens, heads * head_dim) in the dtype of qkv.
    """
    query, key, value = torch.split(qkv.view(len(qkv), heads + 2 * kv_heads, -1), [heads, kv_heads, kv_heads], 1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.eps)
        key = rms_norm(key, norms.key, norms.eps)
    if angles is not None:
        query, key = apply_rope(query, key, *angles)
    if kv_heads != heads:
        key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in (key, value))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for start, end in pairwise(query_starts):
        prompt = slice(start, end)
        q, k, v = (part[prompt].transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        mask = None if window is None or end - start <= window else _near(end - start, window, qkv.device)
        if alibi_slopes is None:
            result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        else:
            result = _attend_with_alibi(q, k, v, alibi_slopes, mask, scale)
        output[prompt] = result[0].transpose(0, 1)
    return output.flatten(1)


def _attend_with_alibi(
    query: Tensor, key: Tensor, value: Tensor, alibi_slopes: Tensor, seen: Tensor | None, scale: float
) -> Tensor:
    """Compute attention head by head, because the bias of a head takes as much memory as its scores.

    query, key, value: (1, heads, length, head_dim). seen: see `_near`; None: each query attends to all
    keys."""
    positions = torch.arange(query.shape[2], device=query.device, dtype=torch.float32)
    distances = (positions[:, None] - positions).abs_()
    results = []
    for head, slope in enumerate(alibi_slopes):
        bias = (distances * -slope).to(query.dtype)
        if seen is not None:
            bias = bias.masked_fill_(~seen, -torch.inf)
        own = slice(head, head + 1)
        q, k, v = query[:, own], key[:, own], value[:, own]
        results.append(scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale))
    return torch.cat(results, 1)


def _near(length: int, window: int, device: torch.device) -> Tensor:
    """Build the mask of the keys that each query attends to: (length, length) bool."""
    positions = torch.arange(length, device=device)
    return (positions[:, None] - positions).abs() < window
