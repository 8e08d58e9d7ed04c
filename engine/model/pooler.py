"""The pooler: converts the hidden states of a prompt to one vector, an embedding or the logits of a classifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.build import Forward, ModelBuilder, Part
from serve_llm.engine.model.spec import ModelSpec, PoolerLayer, PoolerSpec, PoolingType


@dataclass(frozen=True)
class Pooler:
    """Replicated on every rank of the last stage."""

    pooling_types: tuple[PoolingType, ...]
    final_norm: Sequence[Forward]
    layers: Sequence[Forward]
    normalize: bool

    def select(self, prompt: range) -> range:
        """Select the rows of a prompt that the vector depends on. prompt: rows of the whole prompt, or of its last
        chunk if the only pooling type is "last"."""
        match self.pooling_types:
            case ("cls",):
                return prompt[:1]
            case ("last",):
                return prompt[-1:]
            case _:
                return prompt

    def compute(self, prompts: Sequence[Tensor]) -> list[Tensor]:
        """prompts: the selected hidden states of each prompt, (rows, hidden_size) of the model's dtype, before the
        final norm. Returns their vectors, float32."""
        vectors = torch.stack([self._pool(hidden) for hidden in prompts])
        for layer in self.layers:
            vectors = layer(vectors)
        vectors = vectors.float()
        return list(functional.normalize(vectors) if self.normalize else vectors)

    def _pool(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (pooling types * hidden_size,)"""
        for step in self.final_norm:
            hidden = step(hidden)
        if len(hidden) == 1 and len(self.pooling_types) == 1:
            return hidden[0]
        pooled = torch.cat([_POOLINGS[kind](hidden.float()) for kind in self.pooling_types])
        return pooled.to(hidden.dtype) if self.layers else pooled


def _weigh_by_position(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype, device=hidden.device)
    return weights @ hidden / weights.sum()


# (rows, hidden_size) of float32 -> (hidden_size,)
_POOLINGS: dict[PoolingType, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
    "mean": lambda hidden: hidden.mean(0),
    "mean_sqrt_len": lambda hidden: hidden.sum(0) / math.sqrt(len(hidden)),
    "weighted_mean": _weigh_by_position,
    "last": lambda hidden: hidden[-1],
}


def build_pooler(spec: ModelSpec, pooler: PoolerSpec, final_norm: Sequence[Forward], builder: ModelBuilder) -> Pooler:
    """final_norm: what the model does with hidden states after the last layer."""
    kinds = " and ".join(pooler.pooling_types)
    builder.scoped("pooler").describe(f"Pooler({kinds}, {pooler.vector_size(spec.hidden_size)} numbers)")
    layers = []
    size = spec.hidden_size * len(pooler.pooling_types)
    for layer in pooler.layers:
        layers += _build_layer(layer, size, builder.scoped("pooler"))
        size = layer.outputs
    if pooler.token_ids:
        layers.append(_build_token_classifier(spec, pooler.token_ids, builder))
    return Pooler(pooler.pooling_types, final_norm, layers, pooler.normalize)


def _build_layer(spec: PoolerLayer, inputs: int, builder: ModelBuilder) -> list[Forward]:
    steps: list[Forward] = [builder.unquantised_linear({spec.name: spec.outputs}, inputs, bias=spec.bias)]
    if spec.activation == "tanh":
        steps.append(torch.tanh)
    elif spec.activation != "none":
        steps.append(builder.kernels.activations[spec.activation])
    if spec.norm is not None:
        steps.append(builder.norm(f"{spec.name}_norm", spec.norm, spec.outputs))
    return steps


def _build_token_classifier(spec: ModelSpec, token_ids: Sequence[int], builder: ModelBuilder) -> Forward:
    """The LM head, for a few ids only."""
    name = "embedding.weight" if spec.tie_word_embeddings else "head.weight"
    shape = (spec.vocab_size, spec.embedding_size or spec.hidden_size)
    rows = [builder.load(name, shape, Part(0, range(token_id, token_id + 1))) for token_id in token_ids]
    return builder.kernels.pack(torch.cat(rows))
