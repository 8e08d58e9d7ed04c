"""The entrance of a stage: from ids and positions, or from the stage before, to hidden rows. Weights by `Builder`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.build import Builder
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.comm import Group, Link

Entrance = Callable[[Tensor, Tensor], Tensor]  # ids, positions: (tokens,) int64 -> (tokens, width)


def entrance(spec: ModelSpec, table: Tensor, build: Builder) -> Entrance:
    """Of the first stage: the embedding and its multiplier, then a projection and learned positions if there are.

    table: (own rows of the vocabulary, embedding width).
    """
    enter = _embedding(table, build.shard.vocabulary(spec.vocab_size), build.neighbours.tensor)
    if spec.embedding_multiplier != 1.0:
        multiplier = spec.embedding_multiplier
        if spec.rounds_multiplier:
            multiplier = float(torch.tensor(multiplier, dtype=table.dtype))
        enter = _multiplied(enter, multiplier)
    if spec.embedding_width is not None:
        enter = _projected(enter, spec.width, spec.embedding_width, build)
    if spec.positions is not None:
        enter = _with_positions(enter, spec.positions.count, spec.positions.offset, spec.width, build)
    return enter


def received(width: int, previous: Link) -> Entrance:
    """Of a later stage: hidden rows as the stage before sends them."""
    return lambda ids, positions: previous.receive((len(ids), width))


def _embedding(table: Tensor, own: range, group: Group) -> Entrance:
    if group.size == 1:
        return lambda ids, positions: functional.embedding(ids, table)
    if not own:
        table = table.new_zeros(1, table.shape[1])  # a lookup needs a row, if only to be masked

    def embed(ids: Tensor, positions: Tensor) -> Tensor:
        """Each id's row from the rank that has it, and zeros from all others."""
        foreign = (ids < own.start) | (ids >= own.stop)
        rows = functional.embedding((ids - own.start).masked_fill_(foreign, 0), table)
        return group.all_reduce(rows.masked_fill_(foreign.unsqueeze(1), 0.0))

    return embed


def _multiplied(embed: Entrance, multiplier: float) -> Entrance:
    return lambda ids, positions: embed(ids, positions).mul_(multiplier)


def _projected(embed: Entrance, width: int, embedding_width: int, build: Builder) -> Entrance:
    project = build.linear("project_in", width, embedding_width)
    return lambda ids, positions: project(embed(ids, positions))


def _with_positions(embed: Entrance, count: int, offset: int, width: int, build: Builder) -> Entrance:
    table = build.tensor("positions.weight", count, width)[offset:]
    return lambda ids, positions: embed(ids, positions) + functional.embedding(positions, table)
