"""The feed-forward part of a layer, as a function of rows. Weights by `Builder`."""

from __future__ import annotations

from torch import Tensor

from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.spec import Dense


def dense(ffn: Dense, width: int, build: Builder) -> RowWise:
    """(tokens, width) -> (tokens, width). Gate and up are one product."""
    inner = {"gate": ffn.width, "up": ffn.width} if ffn.gated else {"up": ffn.width}
    first = build.linear(inner, width, bias=ffn.bias)
    last = build.linear({"down": width}, ffn.width, bias=ffn.bias)
    activation = build.kernels.activations[f"{ffn.activation}_and_mul" if ffn.gated else ffn.activation]

    def forward(x: Tensor) -> Tensor:
        return last(activation(first(x)))

    return forward
