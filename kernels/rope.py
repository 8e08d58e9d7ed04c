"""Rotary position embedding, fused with the head norms and the cache write of an attention layer. Angles are
computed once per step, for all layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.kernels.attention import write_cache
from serve_llm.kernels.norm import rms_norm

Angles = tuple[Tensor, Tensor]  # cos, sin: (tokens, head_dim / 2) float32, dense


class HeadNorms(NamedTuple):
    """RMS norms of query and key heads. Weights: (head_dim,), in a dtype that `rms_norm` takes."""

    query: Tensor
    key: Tensor
    eps: float


def compute_angles(positions: Tensor, frequencies: Tensor, magnitude: float = 1.0) -> Angles:
    """positions: (tokens,) int64. frequencies: (head_dim / 2,) float32, radians per position. Cosines and sines are
    multiplied by `magnitude`."""
    angle = positions[:, None].float() * frequencies
    if magnitude == 1.0:
        return angle.cos(), angle.sin()
    return angle.cos() * magnitude, angle.sin() * magnitude


def rope_and_cache(
    qkv: Tensor,
    heads: int,
    norms: HeadNorms | None,
    angles: Angles | None,
    cache: Tensor,
    slots: Tensor,
    cache_scales: Tensor | None = None,
) -> Tensor:
    """Split the joint projection, apply the head norms and rope, if given, and write keys and values to the cache.

    qkv: (tokens, (heads + 2 * kv_heads) * head_dim), query heads first, then keys, then values; rows dense. May be
    overwritten. cache, slots, cache_scales: see `attention.write_cache`. Returns the queries (tokens, heads, head_dim).
    """
    kv_heads = cache.shape[2]
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    query, key, value = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim).split_with_sizes(
        [heads, kv_heads, kv_heads], 1
    )
    if norms is not None:
        query = rms_norm(query, norms.query, norms.eps)
        key = rms_norm(key, norms.key, norms.eps)
    if angles is not None:
        query, key = apply_rope(query, key, *angles)
    write_cache(key, value, cache, slots, cache_scales)
    return query


def rope_and_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    angles: Angles | None,
    cache: Tensor,
    slots: Tensor,
    cache_scales: Tensor | None = None,
) -> Tensor:
    """Apply the norm and rope of multi-head latent attention (arXiv:2405.04434) and write one cache row per token.

    A row is the RMS norm of the token's latent vector, followed by the rotated key that all heads share.
    query: (tokens, heads, rope_dim), the rotated part of the queries. latent: (tokens, rank + rope_dim), rows may be a
    strided view. norm: (rank,). angles: for rope_dim. cache: (blocks, 1, 1, block_size, rank + rope_dim).
    Returns the rotated queries (tokens, heads, rope_dim).
    """
    compressed, key = latent.split_with_sizes([norm.shape[0], query.shape[2]], 1)
    key = key.unsqueeze(1)
    if angles is not None:
        query, key = apply_rope(query, key, *angles)
    row = torch.cat((rms_norm(compressed, norm, eps).unsqueeze(1), key), -1)
    write_cache(row, None, cache, slots, cache_scales)
    return query


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate dimension i of every head with dimension i + head_dim / 2 (arXiv:2104.09864, the half-split pairing).

    query: (tokens, heads, head_dim), key: (tokens, kv_heads, head_dim); cos, sin: (tokens, head_dim / 2) float32.
    Computed in float32 and rounded once. Returns new tensors like query and key.
    """
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
