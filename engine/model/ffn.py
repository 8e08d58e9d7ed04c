"""The feed-forward part of a layer, as a function of rows. Weights by `Builder`."""

from __future__ import annotations

from torch import Tensor

from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.spec import Dense
from serve_llm.kernels.linear import Linear


def dense(ffn: Dense, width: int, build: Builder) -> RowWise:
    """(tokens, width) -> (tokens, width), summed over the ranks. Gate and up are one product."""
    return build.summed(dense_addend(ffn, width, build))


def dense_addend(ffn: Dense, width: int, build: Builder) -> RowWise:
    """What this rank adds to the sum."""
    own = build.shard.ffn(ffn)
    first, last = products(ffn, width, own, build)
    activation = activation_of(ffn, build)

    def forward(x: Tensor) -> Tensor:
        return last(activation(first(x)))

    return forward


def products(ffn: Dense, width: int, own: range, build: Builder, alone: bool = False) -> tuple[Linear, Linear]:
    """Before and behind the activation, of the columns in `own`. alone: no other rank has any."""
    names = ("gate", "up") if ffn.gated else ("up",)
    first = build.columns(dict.fromkeys(names, ffn.width), width, dict.fromkeys(names, own), bias=ffn.bias)
    return first, build.addend("down", width, ffn.width, own, bias=ffn.bias, alone=alone)


def activation_of(ffn: Dense, build: Builder) -> RowWise:
    """Of what `products` makes first."""
    return build.kernels.activations[f"{ffn.activation}_and_mul" if ffn.gated else ffn.activation]
