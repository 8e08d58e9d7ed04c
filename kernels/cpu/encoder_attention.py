"""Attention of encoders by the compiled kernels. `kernels.encoder_attention` states the contract.

The keys and values of a step are read like a cache whose blocks hold one token each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.rope import Angles, HeadNorms

RopeAndCache = Callable[[Tensor, int, HeadNorms | None, Angles | None, Tensor, Tensor], Tensor]
EncoderKernel = Callable[..., Tensor]


def build_encoder_attention(library: Library, rope_and_cache: RopeAndCache) -> EncoderKernel:
    """rope_and_cache: the compiled one."""
    return partial(_attend, library, rope_and_cache)


def _attend(
    library: Library,
    rope_and_cache: RopeAndCache,
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
    tokens = len(qkv)
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    if norms is None and angles is None:
        query = qkv[:, : heads * head_dim].view(tokens, heads, head_dim)
        cache = qkv[:, heads * head_dim :].view(tokens, 2, kv_heads, 1, head_dim)
    else:
        cache = qkv.new_empty((tokens, 2, kv_heads, 1, head_dim))
        query = rope_and_cache(qkv, heads, norms, angles, cache, torch.arange(tokens))
    starts = np.asarray(query_starts, np.int32)
    lengths = np.diff(starts)
    blocks = np.add.outer(starts[:-1], np.arange(lengths.max(), dtype=np.int32))
    output = library.paged_attention(
        query,
        cache,
        torch.from_numpy(blocks),
        query_starts,
        lengths.tolist(),
        scale=scale,
        window=window,
        alibi_slopes=alibi_slopes,
        causal=False,
    )
    return output.flatten(1)
