"""The pooler: converts the hidden states of a prompt to one vector, an embedding or the logits of a classifier, or to
a vector of each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.engine.model.build import Forward, ModelBuilder, WeightSlice
from serve_llm.engine.model.spec import ModelSpec, PoolerLayer, PoolerSpec, PoolingType


@dataclass(frozen=True)
class Pooler:
    """Replicated on every rank of the last stage."""

    pooling_types: tuple[PoolingType, ...]
    final_norm: Sequence[Forward]
    layers: Sequence[Forward]
    normalize: bool

    def select(self, prompt: range, pools_tokens: bool) -> range:
        """Select the rows of a prompt that its vectors depend on. prompt: rows of the whole prompt, or of its last
        chunk if the only pooling type is "last", or of any chunk with `pools_tokens`."""
        match self.pooling_types:
            case _ if pools_tokens:
                return prompt
            case ("cls",):
                return prompt[:1]
            case ("last",):
                return prompt[-1:]
            case _:
                return prompt

    def compute(self, prompts: Sequence[Tensor], pools_tokens: Sequence[bool]) -> list[Tensor]:
        """prompts: the selected hidden states of each prompt, (rows, hidden_size) of the model's dtype, before the
        final norm. Returns the vector of each, (size,) of float32; with `pools_tokens` one of each row, not scaled,
        (rows, size)."""
        whole = [hidden for hidden, is_by_token in zip(prompts, pools_tokens, strict=True) if not is_by_token]
        vectors = iter(self._compute_of_prompts(whole) if whole else ())
        return [
            self._compute_of_tokens(hidden) if is_by_token else next(vectors)
            for hidden, is_by_token in zip(prompts, pools_tokens, strict=True)
        ]

    def _compute_of_prompts(self, prompts: Sequence[Tensor]) -> Tensor:
        """Returns (prompts, size)."""
        vectors = torch.stack([self._pool(hidden) for hidden in prompts])
        for layer in self.layers:
            vectors = layer(vectors)
        vectors = vectors.float()
        return _normalize(vectors) if self.normalize else vectors

    def _compute_of_tokens(self, hidden: Tensor) -> Tensor:
        for step in (*self.final_norm, *self.layers):
            hidden = step(hidden)
        return hidden.float()

    def _pool(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (pooling types * hidden_size,)"""
        for step in self.final_norm:
            hidden = step(hidden)
        if len(hidden) == 1 and len(self.pooling_types) == 1:
            return hidden[0]
        pooled = torch.cat([_POOLINGS[kind](hidden.float()) for kind in self.pooling_types])
        return pooled.to(hidden.dtype) if self.layers else pooled


def _normalize(vectors: Tensor) -> Tensor:
    """Scale rows to length 1, like `torch.nn.functional.normalize`, whose Python code takes longer than one row."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors / lengths.clamp_min_(1e-12)


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
    rows = [builder.load(name, shape, WeightSlice(0, range(token_id, token_id + 1))) for token_id in token_ids]
    return builder.kernels.pack(torch.cat(rows))
