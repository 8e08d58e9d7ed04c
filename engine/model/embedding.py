"""The entrance of a model: from ids and positions to hidden rows. Weights by `Builder`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.build import Builder
from serve_llm.engine.model.spec import ModelSpec

Entrance = Callable[[Tensor, Tensor], Tensor]  # ids, positions: (tokens,) int64 -> (tokens, width)


def entrance(spec: ModelSpec, table: Tensor, build: Builder) -> Entrance:
    """The embedding by `table` (vocab_size, embedding width), then a projection and learned positions if there are."""

    def embed(ids: Tensor, positions: Tensor) -> Tensor:
        return functional.embedding(ids, table)

    enter: Entrance = embed
    if spec.embedding_width is not None:
        enter = _projected(enter, spec.width, spec.embedding_width, build)
    if spec.positions is not None:
        enter = _with_positions(enter, spec.positions.count, spec.positions.offset, spec.width, build)
    return enter


def _projected(embed: Entrance, width: int, embedding_width: int, build: Builder) -> Entrance:
    project = build.linear({"project_in": width}, embedding_width)
    return lambda ids, positions: project(embed(ids, positions))


def _with_positions(embed: Entrance, count: int, offset: int, width: int, build: Builder) -> Entrance:
    table = build.tensor("positions.weight", count, width)[offset:]
    return lambda ids, positions: embed(ids, positions) + functional.embedding(positions, table)
