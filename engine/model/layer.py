"""A decoder layer: attention and feed-forward, with the norms and residual additions around them.

A layer takes and returns two tensors, both (tokens, hidden_size): the residual stream, and the normed residual stream
that its attention reads. Each addition is fused with the norm that follows it. For the last addition of a layer that is
the next layer's input norm, so `forward` begins after `input_norm` and ends with `next_norm`. The decoder applies the
first layer's input norm itself. Variables are reused to free the memory of intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from serve_llm.engine.model.attention import build_attention
from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.delta_net import build_gated_delta_net
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.inputs import AttentionInputs
from serve_llm.engine.model.mla import build_mla
from serve_llm.engine.model.mlp import build_mlp
from serve_llm.engine.model.moe import build_moe
from serve_llm.engine.model.norm import NO_NORM, Norm
from serve_llm.engine.model.spec import LayerSpec, MLASpec, MLPSpec

Hidden = tuple[Tensor, Tensor]  # the residual stream, and its norm for the next layer


class AttentionModule(Protocol):
    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size). Writes the new tokens' KV to the layer's cache, or the
        sequences' states."""


@dataclass(eq=False, repr=False)
class DecoderLayer:
    """The base class of layers, which differ in their norms and additions."""

    attention: AttentionModule
    ffn: Forward
    input_norm: Norm
    next_norm: Norm = field(default=NO_NORM, init=False)  # the next layer's input_norm

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        """Return the residual stream and its norm for the next layer, both (tokens or selected, hidden_size).

        residual: (tokens, hidden_size). x: input_norm(residual). selected: (rows,) int64, the tokens that are needed
        after this layer's attention; None: all.
        """
        raise NotImplementedError

    def _attend(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        """Return the residual stream and the attention's output, both of the selected tokens."""
        x = self.attention.forward(x, inputs)
        return (residual, x) if selected is None else (residual[selected], x[selected])


@dataclass(eq=False, repr=False)
class PreNormLayer(DecoderLayer):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    ffn_norm: Norm

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        residual, x = self._attend(residual, x, inputs, selected)
        residual, x = self.ffn_norm.add(residual, x)
        x = self.ffn(x)
        return self.next_norm.add(residual, x)


@dataclass(eq=False, repr=False)
class SandwichNormLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(ffn(norm(x))), with four norms.

    Where input_norm and ffn_norm are NO_NORM, only the outputs are normed: x + norm(attention(x)).
    """

    attention_post_norm: Norm
    ffn_norm: Norm
    ffn_post_norm: Norm

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        residual, x = self._attend(residual, x, inputs, selected)
        residual, x = self.ffn_norm.add(residual, self.attention_post_norm(x))
        x = self.ffn(x)
        return self.next_norm.add(residual, self.ffn_post_norm(x))


@dataclass(eq=False, repr=False)
class PostNormLayer(DecoderLayer):
    """norm(x + attention(x)), then norm(x + ffn(x)). input_norm is NO_NORM."""

    attention_norm: Norm
    ffn_norm: Norm

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        residual, x = self._attend(residual, x, inputs, selected)
        x = self.attention_norm.add(residual, x)[1]
        residual = x
        x = self.ffn(x)
        residual = self.ffn_norm.add(residual, x)[1]
        return residual, self.next_norm(residual)


@dataclass(eq=False, repr=False)
class PostNormTwiceLayer(DecoderLayer):
    """norm(x + norm(x + attention(x))), then norm(x + ffn(x)). input_norm is NO_NORM."""

    attention_norm: Norm
    attention_post_norm: Norm
    ffn_norm: Norm

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        residual, x = self._attend(residual, x, inputs, selected)
        x = self.attention_norm.add(residual, x)[1]
        residual = self.attention_post_norm.add(residual, x)[1]
        x = self.ffn(residual)
        residual = self.ffn_norm.add(residual, x)[1]
        return residual, self.next_norm(residual)


@dataclass(eq=False, repr=False)
class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + ffn(norm(x)), with one norm."""

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        attention_output = self.attention.forward(x, inputs)
        if selected is not None:
            residual = residual[selected]
            x = x[selected]
            attention_output = attention_output[selected]
        residual = residual + attention_output
        del attention_output
        return self.next_norm.add(residual, self.ffn(x))


@dataclass(eq=False, repr=False)
class ParallelTwoNormsLayer(DecoderLayer):
    """x + attention(norm(x)) + ffn(norm(x)), with two norms."""

    ffn_norm: Norm

    def forward(self, residual: Tensor, x: Tensor, inputs: AttentionInputs, selected: Tensor | None) -> Hidden:
        attention_output = self.attention.forward(x, inputs)
        if selected is not None:
            residual = residual[selected]
            attention_output = attention_output[selected]
        x = self.ffn_norm(residual)
        residual = residual + attention_output
        del attention_output
        return self.next_norm.add(residual, self.ffn(x))


def build_layer(spec: LayerSpec, hidden_size: int, builder: ModelBuilder) -> DecoderLayer:
    attention: AttentionModule
    if isinstance(spec.attention, MLASpec):
        attention = build_mla(spec.attention, hidden_size, builder.scoped("attention"))
    elif isinstance(spec.attention, GatedDeltaNetSpec):
        attention = build_gated_delta_net(spec.attention, hidden_size, builder.scoped("attention"))
    else:
        attention = build_attention(spec.attention, hidden_size, builder.scoped("attention"))
    if isinstance(spec.ffn, MLPSpec):
        ffn = build_mlp(spec.ffn, hidden_size, builder.scoped("ffn"))
    else:
        ffn = build_moe(spec.ffn, hidden_size, builder.scoped("ffn"))
    layer = _add_norms(attention, ffn, spec, lambda name: builder.norm(name, spec.norm, hidden_size))
    builder.describe(type(layer).__name__)
    return layer


def _add_norms(attention: AttentionModule, ffn: Forward, spec: LayerSpec, norm: Callable[[str], Norm]) -> DecoderLayer:
    """norm: builds the norm of this name."""
    match spec.norm_position:
        case "pre":
            attention_norm = norm("attention_norm") if spec.has_attention_norm else NO_NORM
            return PreNormLayer(attention, ffn, attention_norm, norm("ffn_norm"))
        case "post":
            return PostNormLayer(attention, ffn, NO_NORM, norm("attention_norm"), norm("ffn_norm"))
        case "post_twice":
            return PostNormTwiceLayer(
                attention, ffn, NO_NORM, norm("attention_norm"), norm("attention_post_norm"), norm("ffn_norm")
            )
        case "output":
            return SandwichNormLayer(attention, ffn, NO_NORM, norm("attention_norm"), NO_NORM, norm("ffn_norm"))
        case "sandwich":
            return SandwichNormLayer(
                attention,
                ffn,
                norm("attention_norm"),
                norm("attention_post_norm"),
                norm("ffn_norm"),
                norm("ffn_post_norm"),
            )
        case "parallel":
            return ParallelLayer(attention, ffn, norm("attention_norm"))
        case "parallel_two_norms":
            return ParallelTwoNormsLayer(attention, ffn, norm("attention_norm"), norm("ffn_norm"))
