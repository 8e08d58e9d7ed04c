"""One layer: attention and feed-forward, each with its norm and residual. Where the norm stands is the placement."""

from __future__ import annotations

from torch import Tensor

from serve_llm.engine.model import spec
from serve_llm.engine.model.attention import Angles, attention
from serve_llm.engine.model.build import Builder
from serve_llm.engine.model.ffn import dense
from serve_llm.engine.model.inputs import GroupInputs, StepInputs


class PreNormLayer:
    """x + f(norm(x)), twice."""

    def __init__(self, layer: spec.Layer, width: int, build: Builder) -> None:
        self.mixer = attention(layer.mixer, width, build.within("attention"))
        self.mixer_norm = build.norm("attention_norm", layer.norm, width)
        self.ffn = dense(layer.ffn, width, build.within("ffn"))
        self.ffn_norm = build.norm("ffn_norm", layer.norm, width)

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width); writes the new tokens' KV to this layer's cache."""
        hidden = hidden + self.mixer.forward(self.mixer_norm(hidden), inputs, group, cache, angles)
        return hidden + self.ffn(self.ffn_norm(hidden))


class PostNormLayer(PreNormLayer):
    """norm(x + f(x)), twice, from the same weights."""

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width); writes the new tokens' KV to this layer's cache."""
        hidden = self.mixer_norm(hidden + self.mixer.forward(hidden, inputs, group, cache, angles))
        return self.ffn_norm(hidden + self.ffn(hidden))


PLACEMENTS = {"pre": PreNormLayer, "post": PostNormLayer}
