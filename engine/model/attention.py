"""The attention part of a layer: projections, optional norms of heads, rope, cache, scores. Weights by `Builder`."""

from __future__ import annotations

from torch import Tensor

from serve_llm.engine.model import spec
from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.inputs import GroupInputs, StepInputs

Angles = tuple[Tensor, Tensor]  # cos, sin: (tokens, head_dim / 2) float32


class Attention:
    def __init__(self, mixer: spec.Attention, width: int, build: Builder) -> None:
        self.kernels = build.kernels
        self.heads, self.kv_heads, self.head_dim = mixer.heads, mixer.kv_heads, mixer.head_dim
        self.scale, self.window = mixer.scale, mixer.window
        self.widths = [mixer.heads * mixer.head_dim, *[mixer.kv_heads * mixer.head_dim] * 2]
        self.qkv = build.linear(dict(zip("qkv", self.widths, strict=True)), width, bias=mixer.qkv_bias)
        self.output = build.linear({"output": width}, self.widths[0], bias=mixer.output_bias)
        self.norms: tuple[RowWise, RowWise] | None = None
        if mixer.head_norm is not None:
            self.norms = (
                build.norm("q_norm", mixer.head_norm, mixer.head_dim),
                build.norm("k_norm", mixer.head_norm, mixer.head_dim),
            )

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width). cache: this layer's, new tokens are written to it."""
        query, key, value = self.qkv(hidden).split_with_sizes(self.widths, -1)
        query = query.reshape(-1, self.heads, self.head_dim)
        key = key.reshape(-1, self.kv_heads, self.head_dim)
        value = value.reshape(-1, self.kv_heads, self.head_dim)
        if self.norms is not None:
            query, key = self.norms[0](query), self.norms[1](key)
        if angles is not None:
            query, key = self.kernels.apply_rope(query, key, *angles)
        self.kernels.write_cache(key, value, cache, group.slots)
        mixed = self.kernels.paged_attention(
            query,
            cache,
            group.block_table,
            inputs.query_starts,
            inputs.context_lens,
            scale=self.scale,
            window=self.window,
        )
        return self.output(mixed.flatten(1))
