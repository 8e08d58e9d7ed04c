"""The dense feed-forward network of a layer, as a function of hidden states."""

from __future__ import annotations

from torch import Tensor

from serve_llm.engine.model.build import Forward, ModelBuilder, WeightSlice
from serve_llm.engine.model.spec import MLPSpec
from serve_llm.kernels.linear import Linear


def build_mlp(spec: MLPSpec, hidden_size: int, builder: ModelBuilder) -> Forward:
    """(tokens, hidden_size) -> (tokens, hidden_size), all-reduced. Gate and up are one linear layer."""
    return builder.all_reduced(build_partial_mlp(spec, hidden_size, builder))


def build_partial_mlp(spec: MLPSpec, hidden_size: int, builder: ModelBuilder) -> Forward:
    """The MLP before the all-reduce."""
    up_proj, down_proj = build_projections(spec, hidden_size, builder.shard.ffn(spec), builder)
    activation = find_activation(spec, builder)
    builder.describe(f"MLP({describe_mlp(spec)})")
    if spec.activation_scales:
        part = WeightSlice(0, builder.shard.ffn(spec))
        scales = builder.parameter("activation_scales", spec.intermediate_size, part=part)
        return lambda x: down_proj(activation(up_proj(x)) / scales)

    def forward(x: Tensor) -> Tensor:
        return down_proj(activation(up_proj(x)))

    return forward


def build_projections(
    spec: MLPSpec, hidden_size: int, columns: range, builder: ModelBuilder, is_only_share: bool = False
) -> tuple[Linear, Linear]:
    """The linear layers before the activation (gate and up as one) and after it.

    columns: this rank's part of the intermediate size. is_only_share: no other rank has any of it.
    """
    names = ("gate", "up") if spec.gated else ("up",)
    up_proj = builder.column_parallel_linear(
        dict.fromkeys(names, spec.intermediate_size), hidden_size, dict.fromkeys(names, columns), bias=spec.bias
    )
    down_proj = builder.partial_row_parallel_linear(
        "down", hidden_size, spec.intermediate_size, columns, bias=spec.has_down_bias, is_only_share=is_only_share
    )
    return up_proj, down_proj


def find_activation(spec: MLPSpec, builder: ModelBuilder) -> Forward:
    """The kernel between the projections: (tokens, outputs of the first) -> (tokens, inputs of the second)."""
    return builder.kernels.activations[f"{spec.activation}_and_mul" if spec.gated else spec.activation]


def describe_mlp(spec: MLPSpec) -> str:
    return f"{spec.activation}, gated" if spec.gated else spec.activation
