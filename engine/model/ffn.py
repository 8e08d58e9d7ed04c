"""The feed-forward part of a layer, as a function of rows. Weights by `Builder`."""

from __future__ import annotations

from torch import Tensor

from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.spec import Dense


def dense(ffn: Dense, width: int, build: Builder) -> RowWise:
    """(tokens, width) -> (tokens, width), summed over the ranks. Gate and up are one product."""
    own = build.shard.ffn(ffn)
    names = ("gate", "up") if ffn.gated else ("up",)
    first = build.columns(dict.fromkeys(names, ffn.width), width, dict.fromkeys(names, own), bias=ffn.bias)
    last = build.rows("down", width, ffn.width, own, bias=ffn.bias)
    activation = build.kernels.activations[f"{ffn.activation}_and_mul" if ffn.gated else ffn.activation]

    def forward(x: Tensor) -> Tensor:
        return last(activation(first(x)))

    return forward
