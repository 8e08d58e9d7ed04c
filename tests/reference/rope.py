"""Oracle for `kernels.rope`: rotates each pair of dimensions as a complex number."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.attention import write_cache
from reference.norm import rms_norm
from serve_llm.kernels.rope import Angles, HeadNorms


def rope_and_cache(
    qkv: Tensor, heads: int, norms: HeadNorms | None, angles: Angles | None, cache: Tensor, slots: Tensor
) -> Tensor:
    """Same contract as `kernels.rope.rope_and_cache`."""
    _, _, kv_heads, _, head_dim = cache.shape
    parts = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim)
    query, key, value = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    if angles is not None:
        query, key = apply_rope(query, key, *angles)
    write_cache(key, value, cache, slots)
    return query


def rope_and_latent(
    query: Tensor, latent: Tensor, norm: Tensor, eps: float, angles: Angles | None, cache: Tensor, slots: Tensor
) -> Tensor:
    """Same contract as `kernels.rope.rope_and_latent`."""
    rank = len(norm)
    key = latent[:, None, rank:]
    if angles is not None:
        query, key = apply_rope(query, key, *angles)
    write_cache(torch.cat((rms_norm(latent[:, None, :rank], norm, eps), key), -1), None, cache, slots)
    return query


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as `kernels.rope.apply_rope`."""
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.double().chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)

    return rotate(query), rotate(key)
