"""A decoder-only language model, or one rank's shard of it: token ids and a KV cache in, hidden states and logits out.

Callers must run it under torch.inference_mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.dispatch import ExpertDispatch
from serve_llm.engine.model.embedding import Embed, build_embedding
from serve_llm.engine.model.inputs import NO_KV, AttentionInputs, KVGroupInputs, StepInputs
from serve_llm.engine.model.layer import DecoderLayer, build_layer
from serve_llm.engine.model.pooler import Pooler, build_pooler
from serve_llm.engine.model.rope import ComputeAngles, build_angles
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, ModelSpec, QueryTemperature
from serve_llm.engine.model.vocabulary import VocabularyTables
from serve_llm.engine.parallel.groups import PipelineLink
from serve_llm.kernels.rope import Angles


class Decoder:
    """The layers of one rank. The first pipeline stage also has the embedding, the last one the LM head; `forward`
    passes hidden states from stage to stage. `repr` shows the tree of its parts."""

    def __init__(
        self,
        *,
        embed: Embed | None,
        layers: Sequence[DecoderLayer],
        lm_head: Sequence[Forward],
        pooler: Pooler | None,
        previous_stage: PipelineLink | None,
        next_stage: PipelineLink | None,
        ropes: Sequence[ComputeAngles],
        rope_of_layer: Sequence[int],
        temperatures: Sequence[QueryTemperature],
        temperature_of_layer: Sequence[int],
        group_of_layer: Sequence[int | None],
        is_first_of_kind: Sequence[bool],
        dispatches: Sequence[ExpertDispatch],
        capturable: bool,
        hidden_size: int,
        device: torch.device,
        description: str,
    ) -> None:
        """embed: on the first stage. lm_head: the functions that compute logits from hidden states, in order; on the
        last stage, if the model generates. pooler: on the last stage, if the model returns vectors. rope_of_layer:
        index into (None, *ropes). temperature_of_layer: index into (None, *temperatures). group_of_layer: index into
        `StepInputs.groups`; None for a layer that caches no KV. is_first_of_kind: whether no layer before this one has
        the same LayerSpec and KV group. capturable: whether a step can be captured as a CUDA graph, or recorded on a
        CPU. description: see `__repr__`."""
        self._embed = embed
        self._layers = layers
        self._lm_head = lm_head
        self.pooler = pooler
        self._previous_stage = previous_stage
        self._next_stage = next_stage
        self._ropes = ropes
        self._rope_of_layer = rope_of_layer
        self._temperatures = temperatures
        self._temperature_of_layer = temperature_of_layer
        self._group_of_layer = group_of_layer
        self._is_first_of_kind = is_first_of_kind
        self._skipped: Set[int] = frozenset()
        self.dispatches = dispatches
        self.capturable = capturable
        self._hidden_size = hidden_size
        self._device = device
        self._description = description
        self.collected_layers: tuple[int, ...] = ()  # see `collected`; indices among the layers of this rank
        self._num_collected_before = 0  # layers of previous stages whose inputs are received from them
        # Inputs of these layers, after those of layers in previous stages, in the last step: each (tokens, hidden_size)
        self.collected: list[Tensor] = []
        for layer, following in pairwise(layers):
            layer.next_norm = following.input_norm

    def __repr__(self) -> str:
        """The tree of named parts with shapes, dtypes and this rank's shares."""
        return self._description

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """Run one step and return hidden states of the model's dtype, (tokens, hidden_size): receive what the previous
        stage sends, run the layers, and send the result to the next stage.

        caches: one per layer of this rank, as `AttentionInputs` has them; written in place; empty for a layer that
        caches nothing. rows: (rows,) int64, on the last stage: the tokens whose hidden states are needed; the result
        has only these, and the last layer computes only these after its attention. None: all tokens.
        """
        received = self.receive(len(inputs.ids))
        before = [self.receive(len(inputs.ids)) for _ in range(self._num_collected_before)]
        hidden = self.run_layers(inputs, caches, rows, received)
        del received
        self.collected = [*(one for one in before if one is not None), *self.collected]
        self.send(hidden)
        if self._next_stage is not None:
            for collected in self.collected:
                self.send(collected)
        return hidden

    def collect(self, layers: Sequence[int], held: range) -> None:
        """Collect the inputs of these layers of the model, in order, in each step. held: the layers of this rank."""
        self.collected_layers = tuple(layer - held.start for layer in layers if layer in held)
        self._num_collected_before = sum(layer < held.start for layer in layers)

    def receive(self, num_tokens: int) -> Tensor | None:
        """Receive the hidden states of `num_tokens` tokens from the previous stage; None on the first stage."""
        return None if self._previous_stage is None else self._previous_stage.receive((num_tokens, self._hidden_size))

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage, if there is one."""
        if self._next_stage is not None:
            self._next_stage.send(hidden)

    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """`forward` without its communication between stages. received: as from `receive`."""
        if inputs.lengths is not None:
            inputs = replace(inputs, lengths=inputs.lengths.without_plans())
        angles = [None, *(compute(inputs.positions) for compute in self._ropes)]
        scales = [None, *(compute_query_scale(one, inputs.positions) for one in self._temperatures)]
        steps = [_select_chunks(inputs, group) for group in inputs.groups]
        if received is None:
            assert self._embed is not None, "a stage after the first receives hidden states"
            residual = self._embed(inputs)
        else:
            residual = received
        del received  # frees its memory after the first layer
        x = self._layers[0].input_norm(residual)
        selected = [None] * (len(self._layers) - 1) + [rows]
        self.collected = []
        for index, layer, cache, group, rope, temperature, selection in zip(
            range(len(self._layers)),
            self._layers,
            caches,
            self._group_of_layer,
            self._rope_of_layer,
            self._temperature_of_layer,
            selected,
            strict=True,
        ):
            if index in self._skipped:
                continue
            step, group_inputs = (inputs, NO_KV) if group is None else (steps[group], inputs.groups[group])
            layer_inputs = AttentionInputs(step, group_inputs, cache, angles[rope], scales[temperature])
            if index in self.collected_layers:
                self.collected += [residual.clone()] * self.collected_layers.count(index)
            residual, x = layer.forward(residual, x, layer_inputs, selection)
        return residual

    @contextmanager
    def skip_similar_layers(self) -> Iterator[None]:
        """A context that runs only the first layer of each kind, the last one, and those whose inputs are collected,
        which is enough if only shapes and dtypes matter."""
        needed = {*self.collected_layers, len(self._layers) - 1}
        self._skipped = {index for index, first in enumerate(self._is_first_of_kind) if not first} - needed
        try:
            yield
        finally:
            self._skipped = frozenset()

    def run_without_tokens(self, dtype: torch.dtype) -> None:
        """Run a step without own tokens: only compute this rank's experts for other engines. dtype: the model's."""
        empty = torch.empty((0, self._hidden_size), dtype=dtype, device=self._device)
        for dispatch in self.dispatches:
            dispatch.run_without_tokens(empty)

    def logits(self, hidden: Tensor) -> Tensor:
        """On the last stage. hidden: (rows, hidden_size) as from `forward` -> (rows, this rank's part of the
        vocabulary)."""
        for step in self._lm_head:
            hidden = step(hidden)
        return hidden


def build_decoder(spec: ModelSpec, builder: ModelBuilder, device: torch.device) -> Decoder:
    """Build the part of the model that belongs to the builder's shard."""
    shard = builder.shard
    groups = builder.groups
    tables = VocabularyTables(spec, builder)
    embed = None
    if groups.previous is None:
        look_up = tables.load_embedding(has_head=spec.lm_head and groups.next is None)
        embed = build_embedding(spec, look_up, builder)
    layers = [
        build_layer(spec.layers[index], spec.hidden_size, builder.scoped(f"layers.{index}")) for index in shard.layers
    ]
    lm_head: list[Forward] = []
    pooler = None
    if groups.next is None:
        final_norm = _build_final_norm(spec, builder)
        if spec.lm_head:
            lm_head = [*final_norm, *build_lm_head(spec, tables)]
        if spec.pooler is not None:
            pooler = build_pooler(spec, spec.pooler, final_norm, builder)
    group_of_layer = {layer: index for index, group in enumerate(spec.kv_groups) for layer in group.layers}
    kinds = [(spec.layers[index], group_of_layer.get(index)) for index in shard.layers]
    compute_angles = builder.kernels.compute_angles
    ropes, rope_of_layer = _build_ropes([spec.layers[index] for index in shard.layers], device, compute_angles)
    temperatures, temperature_of_layer = _find_temperatures([spec.layers[index] for index in shard.layers])
    reads_back = any(experts.reads_back for experts in builder.experts)
    can_record = builder.kernels.record is None or groups.tensor.size == 1  # all-reduces on a CPU are not recorded
    builder.describe(
        f"{spec.architecture}, rank {shard.rank} of {shard.layout.size}: layers {shard.layers.start} to "
        f"{shard.layers.stop - 1} of {len(spec.layers)}, tensor-parallel rank {shard.tp_rank} of {groups.tensor.size}"
    )
    return Decoder(
        embed=embed,
        layers=layers,
        lm_head=lm_head,
        pooler=pooler,
        previous_stage=groups.previous,
        next_stage=groups.next,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        temperatures=temperatures,
        temperature_of_layer=temperature_of_layer,
        group_of_layer=[group_of_layer.get(layer) for layer in shard.layers],
        is_first_of_kind=[kind not in kinds[:index] for index, kind in enumerate(kinds)],
        dispatches=[experts for experts in builder.experts if isinstance(experts, ExpertDispatch)],
        capturable=builder.kernels.capturable and not reads_back and not spec.has_states and can_record,
        hidden_size=spec.hidden_size,
        device=device,
        description=str(builder.tree),
    )


def _build_final_norm(spec: ModelSpec, builder: ModelBuilder) -> list[Forward]:
    """Build the functions between the last layer and the LM head, in order."""
    steps: list[Forward] = []
    if spec.final_norm is not None:
        steps.append(builder.norm("final_norm", spec.final_norm, spec.hidden_size))
    if spec.embedding_size is not None:
        steps.append(builder.replicated_linear("project_out", spec.embedding_size, spec.hidden_size))
    return steps


def build_lm_head(spec: ModelSpec, tables: VocabularyTables) -> list[Forward]:
    """Build the functions that compute logits from normed hidden states, in order."""
    steps: list[Forward] = [tables.load_head()]
    if spec.logits_multiplier != 1.0:
        steps.append(lambda logits: logits.mul_(spec.logits_multiplier))
    softcap = spec.logits_softcap
    if softcap is not None:
        steps.append(lambda logits: logits.div_(softcap).tanh_().mul_(softcap))
    return steps


def _build_ropes(
    layers: Sequence[LayerSpec], device: torch.device, compute_angles: Callable[..., Angles]
) -> tuple[list[ComputeAngles], list[int]]:
    """The distinct ropes of the layers, and for each layer an index into (None, *ropes)."""
    indices: dict[tuple[RopeSpec, int], int] = {}
    rope_of_layer = []
    for layer in layers:
        rope = layer.attention.rope
        if rope is None:
            rope_of_layer.append(0)
        else:
            rope_of_layer.append(indices.setdefault((rope, layer.attention.rope_dim), len(indices) + 1))
    return [build_angles(rope, rope_dim, device, compute_angles) for rope, rope_dim in indices], rope_of_layer


def _find_temperatures(layers: Sequence[LayerSpec]) -> tuple[list[QueryTemperature], list[int]]:
    """The distinct query temperatures of the layers, and for each layer an index into (None, *temperatures)."""
    indices: dict[QueryTemperature, int] = {}
    temperature_of_layer = []
    for layer in layers:
        mixer = layer.attention
        temperature = mixer.query_temperature if isinstance(mixer, AttentionSpec) else None
        temperature_of_layer.append(0 if temperature is None else indices.setdefault(temperature, len(indices) + 1))
    return list(indices), temperature_of_layer


def compute_query_scale(temperature: QueryTemperature, positions: Tensor) -> Tensor:
    """(tokens,) float32."""
    intervals = ((positions.float() + float(temperature.first)) / temperature.interval).floor_()
    return intervals.log1p_().mul_(temperature.scale).add_(1.0)


def _select_chunks(inputs: StepInputs, group: KVGroupInputs) -> StepInputs:
    """The step's inputs for the attention of the group's layers."""
    if group.chunks is None:
        return inputs
    lengths = group.chunks.lengths
    return replace(
        inputs,
        query_starts=group.chunks.query_starts,
        context_lens=group.chunks.context_lens,
        lengths=None if lengths is None else lengths.without_plans(),
    )
