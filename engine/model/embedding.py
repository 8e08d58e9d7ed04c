"""The first step of a forward pass: from token ids and positions, or from the previous stage, to hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.lora import LoRAEmbedding
from serve_llm.engine.model.spec import LearnedPositions, ModelSpec
from serve_llm.engine.parallel.groups import ProcessGroup
from serve_llm.kernels.embedding_table import LookUp

Embed = Callable[[StepInputs], Tensor]  # (tokens, hidden_size)


def build_embedding(spec: ModelSpec, look_up: LookUp, builder: ModelBuilder) -> Embed:
    """The embedding of the first stage, with the multiplier, projection, learned positions, token types and norm that
    the model has.

    look_up: of this rank's rows of the vocabulary.
    """
    builder.scoped("embedding").describe("VocabParallelEmbedding")
    ids = builder.shard.vocabulary(spec.vocab_size)
    adapters = None if builder.lora is None else builder.lora.add_embedding(ids)
    embed = _vocab_parallel_embedding(look_up, ids, builder.groups.tensor, adapters)
    if spec.embedding_multiplier != 1.0:
        multiplier = spec.embedding_multiplier
        if spec.rounds_embedding_multiplier:
            multiplier = float(torch.tensor(multiplier, dtype=builder.dtype))
        embed = _with_multiplier(embed, multiplier)
    if spec.embedding_size is not None:
        embed = _then(embed, builder.replicated_linear("project_in", spec.hidden_size, spec.embedding_size))
    if spec.learned_positions is not None:
        embed = _with_positions(embed, spec.learned_positions, spec.hidden_size, builder)
    if spec.token_types:
        embed = _with_token_types(embed, spec.token_types, spec.hidden_size, builder)
    if spec.embedding_norm is not None:
        embed = _then(embed, builder.norm("embedding_norm", spec.embedding_norm, spec.hidden_size))
    return embed


def _vocab_parallel_embedding(
    look_up: LookUp, rows: range, group: ProcessGroup, adapters: LoRAEmbedding | None
) -> Embed:
    """rows: the token ids whose embeddings this rank has."""
    if group.size == 1:
        return _with_adapters(lambda inputs: look_up(inputs.ids), adapters)

    def embed(inputs: StepInputs) -> Tensor:
        """Look up this rank's ids; all others get zeros."""
        ids = inputs.ids
        is_elsewhere = (ids < rows.start) | (ids >= rows.stop)
        hidden = look_up((ids - rows.start).masked_fill_(is_elsewhere, 0))
        return hidden.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)

    embed_own = _with_adapters(embed, adapters)
    return lambda inputs: group.all_reduce(embed_own(inputs))


def _with_adapters(embed: Embed, adapters: LoRAEmbedding | None) -> Embed:
    if adapters is None:
        return embed

    def embed_with_adapters(inputs: StepInputs) -> Tensor:
        hidden = embed(inputs)
        adapters.add_to(hidden, inputs.ids)
        return hidden

    return embed_with_adapters


def _with_multiplier(embed: Embed, multiplier: float) -> Embed:
    return lambda inputs: embed(inputs).mul_(multiplier)


def _then(embed: Embed, forward: Forward) -> Embed:
    return lambda inputs: forward(embed(inputs))


def _with_positions(embed: Embed, learned: LearnedPositions, hidden_size: int, builder: ModelBuilder) -> Embed:
    table = builder.parameter("positions.weight", learned.num_embeddings, hidden_size)[learned.offset :]
    return lambda inputs: embed(inputs) + functional.embedding(inputs.positions, table)


def _with_token_types(embed: Embed, num_types: int, hidden_size: int, builder: ModelBuilder) -> Embed:
    table = builder.parameter("token_types.weight", num_types, hidden_size)

    def add_token_types(inputs: StepInputs) -> Tensor:
        """If a model has only one type, all tokens use it."""
        types = inputs.token_types
        if types is None or num_types == 1:
            return embed(inputs) + table[0]
        return embed(inputs) + functional.embedding(types, table)

    return add_token_types
