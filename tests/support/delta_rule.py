"""Layers of the gated delta rule with random weights."""

from __future__ import annotations

import torch

from serve_llm.kernels.delta_rule import DeltaRule


def make_layer(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> DeltaRule:
    """Build a layer. sizes: key heads, heads per key head, key_dim, value_dim."""
    key_heads, group, key_dim, value_dim = sizes
    heads = key_heads * group
    generator = torch.Generator().manual_seed(3)
    channels = 2 * key_heads * key_dim + heads * value_dim
    return DeltaRule(
        conv=(torch.randn(4, channels, generator=generator) * 0.5).to(dtype),
        decay=torch.randn(heads, generator=generator),
        decay_bias=torch.randn(heads, generator=generator),
        key_heads=torch.arange(heads) // group,
        key_dim=key_dim,
        value_dim=value_dim,
    )
