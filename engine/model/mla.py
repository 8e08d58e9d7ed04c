"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a cache of one row per token.

Prompts and single tokens use the same, absorbed form, so that results do not depend on how a prompt is chunked: the
key projection is applied to queries instead of latent vectors, and the value projection to the weighted mean of latent
vectors. Each rank computes some of the query heads; every rank holds all latent vectors, and so the whole cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.engine.model.attention import build_cache_scales, elements
from serve_llm.engine.model.build import Forward, ModelBuilder, WeightSlice
from serve_llm.engine.model.inputs import AttentionInputs
from serve_llm.engine.model.spec import MLASpec, NormSpec
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.registry import Kernels


@dataclass(eq=False, repr=False)
class MLAAttention:
    kernels: Kernels
    num_heads: int  # query heads of this rank
    spec: MLASpec
    row_size: int  # elements of a cache row: kv_lora_rank + qk_rope_head_dim
    down_proj: Forward  # hidden states -> latent query (or queries), followed by the row to cache
    query_proj: Forward  # latent query -> queries
    kv_norm: Tensor  # (kv_lora_rank,)
    key_proj: Linear  # per head: (tokens, heads, qk_nope_head_dim) -> (tokens, heads, kv_lora_rank)
    value_proj: Linear  # per head: (tokens, heads, kv_lora_rank) -> (tokens, heads, v_head_dim)
    output_proj: Forward

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size). Writes the new tokens' rows to the layer's cache."""
        step = inputs.step
        latent = self.kernels.paged_attention(
            self._compute_queries(x, inputs),
            inputs.cache,
            inputs.group.block_table,
            step.query_starts,
            step.context_lens,
            scale=self.spec.scale,
            value_dim=self.spec.kv_lora_rank,
            on_device=step.lengths,
        )
        return self.output_proj(self.value_proj(latent).flatten(1))

    def _compute_queries(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Queries that match the cached rows: (tokens, heads, kv_lora_rank + qk_rope_head_dim)."""
        spec = self.spec
        query_input, row = self.down_proj(x).tensor_split([-self.row_size], 1)
        query = self.query_proj(query_input)
        query = query.view(len(query), self.num_heads, spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        without_rope, with_rope = query.split_with_sizes([spec.qk_nope_head_dim, spec.qk_rope_head_dim], 2)
        rotated = self.kernels.rope_and_latent(
            with_rope, row, self.kv_norm, spec.norm_eps, inputs.angles, inputs.cache, inputs.group.slots
        )
        return torch.cat((self.key_proj(without_rope), rotated), 2)


@dataclass(eq=False, repr=False)
class MLAAttentionWithoutHeads:
    """For a rank without heads (more ranks than heads): adds at most a bias to the all-reduced output."""

    output_proj: Forward

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size)."""
        return self.output_proj(x[:, :0])


def build_mla(spec: MLASpec, hidden_size: int, builder: ModelBuilder) -> MLAAttention | MLAAttentionWithoutHeads:
    if spec.rope is not None and spec.rope.interleaved:
        builder = builder.with_row_order(_rotary_order(spec))
    heads = builder.shard.attention(spec).heads
    builder.describe(f"MLAAttention({len(heads)} of {spec.num_heads} heads, kv_lora_rank {spec.kv_lora_rank})")
    output_proj = builder.row_parallel_linear(
        "output", hidden_size, spec.num_heads * spec.v_head_dim, elements(heads, spec.v_head_dim), bias=spec.bias
    )
    if not heads:
        return MLAAttentionWithoutHeads(output_proj)
    down_proj, query_proj = _build_query_projections(spec, hidden_size, heads, builder)
    kv_norm = builder.parameter("kv_norm.weight", spec.kv_lora_rank)
    kv_size = spec.qk_nope_head_dim + spec.v_head_dim
    kv_up = builder.parameter(
        "kv_up.weight", spec.num_heads * kv_size, spec.kv_lora_rank, part=WeightSlice(0, elements(heads, kv_size))
    )
    per_head = kv_up.view(len(heads), kv_size, -1)
    keys, values = per_head.split_with_sizes([spec.qk_nope_head_dim, spec.v_head_dim], 1)
    kernels = builder.kernels
    if spec.cache_scales:
        kernels = kernels.with_cache_scales(build_cache_scales("k", 1, range(1), builder))
    return MLAAttention(
        kernels=kernels,
        num_heads=len(heads),
        spec=spec,
        row_size=spec.head_dim,
        down_proj=down_proj,
        query_proj=query_proj,
        kv_norm=kv_norm,
        key_proj=builder.kernels.pack_heads(keys.transpose(1, 2)),
        value_proj=builder.kernels.pack_heads(values),
        output_proj=output_proj,
    )


def _build_query_projections(
    spec: MLASpec, hidden_size: int, heads: range, builder: ModelBuilder
) -> tuple[Forward, Forward]:
    """`MLAAttention.down_proj` and `MLAAttention.query_proj`."""
    head_size = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    query_size = spec.num_heads * head_size
    queries = elements(heads, head_size)
    row_size = spec.head_dim
    if spec.q_lora_rank is None:
        projection = builder.column_parallel_linear(
            {"q": query_size, "kv_down": row_size}, hidden_size, {"q": queries, "kv_down": range(row_size)}
        )
        return projection, lambda query: query
    down_proj = builder.column_parallel_linear(
        {"q_down": spec.q_lora_rank, "kv_down": row_size},
        hidden_size,
        {"q_down": range(spec.q_lora_rank), "kv_down": range(row_size)},
        bias=spec.bias,
    )
    norm = builder.norm("q_norm", NormSpec("rms", spec.norm_eps), spec.q_lora_rank)
    up_proj = builder.column_parallel_linear({"q_up": query_size}, spec.q_lora_rank, {"q_up": queries})
    return down_proj, lambda latent: up_proj(norm(latent))


def _rotary_order(spec: MLASpec) -> Callable[[str, Tensor], Tensor]:
    """Build the function that reorders the rotated dimensions of queries and keys as the rope kernels expect: these
    rotate dimension i with i + qk_rope_head_dim / 2, the model 2 i with 2 i + 1."""
    head_size = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    sizes = {"q": head_size, "q_up": head_size, "kv_down": spec.head_dim}

    def reorder(name: str, tensor: Tensor) -> Tensor:
        size = sizes.get(name.split(".")[-2])
        if size is None:
            return tensor
        first = size - spec.qk_rope_head_dim
        order = [*range(first), *range(first, size, 2), *range(first + 1, size, 2)]
        return tensor.view(-1, size, *tensor.shape[1:])[:, order].flatten(0, 1)

    return reorder
