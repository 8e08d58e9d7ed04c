"""A decoder-only language model, or one rank's shard of it, built from a spec: ids and cached keys and values in,
hidden rows and logits out.

Knows no family and no file: weights come by name through a `Builder`. Branches are taken while building, none in
forward. Callers run it under torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from serve_llm.engine.model.build import Builder, Part, RowWise
from serve_llm.engine.model.embedding import Entrance, entrance, received
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.layer import Layer, enter, join
from serve_llm.engine.model.rope import AnglesOf, angles_of
from serve_llm.engine.model.spec import Layer as LayerSpec
from serve_llm.engine.model.spec import ModelSpec, Rope


class Decoder:
    """The layers of one rank. The first stage also embeds, the last one also has the head; hidden rows pass from stage
    to stage inside `forward`."""

    def __init__(self, spec: ModelSpec, build: Builder, device: torch.device) -> None:
        shard, neighbours = build.shard, build.neighbours
        # Where experts are computed one by one, those that have tokens, or other engines are told how many each has.
        waits = spec.has_experts and (spec.fp8 or neighbours.experts.size > 1)
        self.capturable = build.kernels.capturable and not waits
        outer = spec.embedding_width or spec.width
        own = Part(0, shard.vocabulary(spec.vocab_size))
        self._enter: Entrance
        if neighbours.previous is None:
            embedding = build.table("embedding.weight", spec.vocab_size, outer, part=own)
            self._enter = entrance(spec, embedding, build)
        else:
            self._enter = received(spec.width, neighbours.previous)
        layers = [Layer(spec.layers[index], spec.width, build.within(f"layers.{index}")) for index in shard.layers]
        self._layers = layers
        self._dispatches, self._width, self._device = build.dispatches, spec.width, device
        self._first = enter(layers[0].first)
        self._joins = [join(layer.last, following.first) for layer, following in pairwise(layers)]
        self._joins.append(join(layers[-1].last, None))
        self._send = None if neighbours.next is None else neighbours.next.send
        self._leave: list[RowWise] = []
        if neighbours.next is None:
            self._leave = _leave(spec, outer, build)
            if not (spec.tied_head and shard.is_first):  # else the embedding is the head
                name = "embedding.weight" if spec.tied_head else "head.weight"
                embedding = build.table(name, spec.vocab_size, outer, part=own)
            bias = build.tensor("head.bias", spec.vocab_size, part=own) if spec.head_bias else None
            self._leave.append(build.kernels.pack(embedding, bias))
            if spec.logits_multiplier != 1.0:
                self._leave.append(lambda logits: logits.mul_(spec.logits_multiplier))
            if (cap := spec.logits_softcap) is not None:
                self._leave.append(lambda logits: logits.div_(cap).tanh_().mul_(cap))
        group_of = {layer: index for index, group in enumerate(spec.kv_groups) for layer in group.layers}
        self._group_of_layer = [group_of[layer] for layer in shard.layers]
        self._ropes, self._rope_of_layer = _ropes([spec.layers[index] for index in shard.layers], device)

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """One step. caches: each own layer's, as `kernels.attention.write_cache` wants it, written in place.
        rows: (rows,) int64, on the last stage, the tokens whose hidden rows are wanted; None: all.

        Returns hidden rows (rows or tokens, width) of the model's dtype: what `logits` takes, any selection of them.
        What no later token reads is not computed: behind the last layer's attention only the wanted rows go on.
        """
        angles = [None, *(rope(inputs.positions) for rope in self._ropes)]  # once per step, whatever the layers
        hidden = self._enter(inputs.ids, inputs.positions)
        read = self._first(hidden)
        wanted = [*[None] * (len(self._layers) - 1), rows]
        for layer, joined, cache, group, rope, kept in zip(
            self._layers, self._joins, caches, self._group_of_layer, self._rope_of_layer, wanted, strict=True
        ):
            hidden, read = joined(*layer.forward(hidden, read, inputs, inputs.groups[group], cache, angles[rope], kept))
        if self._send is not None:
            self._send(hidden)
        return hidden

    def idle(self, dtype: torch.dtype) -> None:
        """A step without tokens: only what other engines ask of the experts here. dtype: of the model."""
        nothing = torch.empty((0, self._width), dtype=dtype, device=self._device)
        for dispatch in self._dispatches:
            dispatch.idle(nothing)

    def logits(self, hidden: Tensor) -> Tensor:
        """On the last stage. hidden: (rows, width) as from `forward` -> (rows, own part of the vocabulary)."""
        for part in self._leave:
            hidden = part(hidden)
        return hidden


def _leave(spec: ModelSpec, outer: int, build: Builder) -> list[RowWise]:
    """What stands between the last layer and the head."""
    parts: list[RowWise] = []
    if spec.final_norm is not None:
        parts.append(build.norm("final_norm", spec.final_norm, spec.width))
    if spec.embedding_width is not None:
        parts.append(build.linear("project_out", outer, spec.width))
    return parts


def _ropes(layers: Sequence[LayerSpec], device: torch.device) -> tuple[list[AnglesOf], list[int]]:
    """The distinct ropes of the layers, and each layer's place among [None, *ropes]."""
    numbers: dict[tuple[Rope, int], int] = {}
    of_layer = []
    for layer in layers:
        rope = layer.mixer.rope
        of_layer.append(0 if rope is None else numbers.setdefault((rope, layer.mixer.rope_dim), len(numbers) + 1))
    return [angles_of(rope, dims, device) for rope, dims in numbers], of_layer
