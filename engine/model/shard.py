"""The part of a model that one rank holds: a `ModelSpec` split by a `ParallelLayout`. Torch-free; `cli.plan` uses
it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from serve_llm.engine.config import Config
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.expert_placement import Placement, fill_slots
from serve_llm.engine.model.spec import AnyAttentionSpec, KVGroup, LayerSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from serve_llm.engine.parallel.layout import HeadShare, ParallelLayout, split_heads, split_layers, split_range

UNIT = 16  # feed-forward columns and vocabulary rows are split in multiples of this where possible


@dataclass(frozen=True)
class Shard:
    """One rank's part. With the default layout it is the whole model."""

    layout: ParallelLayout
    rank: int
    layers: range  # indices into `ModelSpec.layers`
    weights: tuple[float, ...] | None = None  # --tensor-parallel-split
    engine: int = 0  # index among the engines over which whole experts are spread
    engines: int = 1
    redundant_experts: int = 0  # slots of each layer for further copies of experts, over all engines

    @property
    def tp_rank(self) -> int:
        return self.layout.tp_rank(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, which holds the embedding."""
        return self.layout.pp_rank(self.rank) == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which holds the final norm and the LM head."""
        return self.layout.pp_rank(self.rank) == self.layout.pp_size - 1

    @property
    def is_output(self) -> bool:
        """Whether this rank samples."""
        return self.rank == self.layout.output_rank

    def holds(self, parameter: str, spec: ModelSpec) -> bool:
        """Whether this rank holds a part of the parameter. Not for embedding.weight and head.weight."""
        kind, *names = parameter.split(".")
        if kind == "layers":
            layer = int(names[0])
            return layer in self.layers and self._holds_in_layer(names[1:], spec.layers[layer])
        at_start = ("positions", "project_in", "token_types", "embedding_norm")
        return self.is_first if kind in at_start else self.is_last

    def _holds_in_layer(self, names: Sequence[str], layer: LayerSpec) -> bool:
        """names: of the parameter inside a layer of this rank, such as ["attention", "q", "weight"]."""
        half, name, *inner = names
        mixer = layer.attention
        ffn = layer.ffn
        if name in ("q_norm", "k_norm") and len(inner) == 2:  # one norm per head
            head_share = self.attention(mixer)
            return int(inner[0]) in (head_share.heads if name == "q_norm" else head_share.kv_heads)
        if name == "activation_scales":
            return isinstance(ffn, MLPSpec) and ffn.activation_scales
        if name == "experts" and isinstance(ffn, MoESpec):
            return int(inner[0]) in self.experts(ffn)
        has_parts_by_head = isinstance(mixer, MLASpec | GatedDeltaNetSpec) and name != "output"
        if half == "attention" and (has_parts_by_head or name == "gate"):
            return bool(self.attention(mixer).heads)
        return True

    def attention(self, mixer: AnyAttentionSpec) -> HeadShare:
        share = split_heads(mixer.num_heads, mixer.num_kv_heads, self.layout.tp_size, self.weights)[self.tp_rank]
        if isinstance(mixer, GatedDeltaNetSpec) and mixer.interleaved_key_heads and share.heads:
            keys = [mixer.find_key_head(head) for head in share.heads]
            return HeadShare(share.heads, range(min(keys), max(keys) + 1), before=0)
        return share

    def ffn(self, ffn: MLPSpec) -> range:
        """This rank's columns of the intermediate size."""
        return split_range(ffn.intermediate_size, self.layout.tp_size, self.weights, UNIT)[self.tp_rank]

    def experts(self, ffn: MoESpec) -> tuple[int, ...]:
        """The experts of which this rank holds a part; with rebalancing, at the start."""
        return self.place_experts(ffn)[self.engine]

    def expert_spans(self, ffn: MoESpec) -> tuple[range, ...]:
        """`experts` of the ranks with this tp_rank in every engine, without redundant ones.

        Together they are what a rank of a single engine would hold, so sums over experts have the same order as there.
        """
        count = ffn.router.num_experts
        if not ffn.expert_parallel:
            return (range(count),)
        experts = split_range(count, self.layout.tp_size, self.weights)[self.tp_rank]
        return tuple(experts[part.start : part.stop] for part in split_range(len(experts), self.engines))

    def place_experts(self, ffn: MoESpec) -> Placement:
        """The experts of the ranks of `expert_spans` at the start, with redundant ones."""
        num_redundant = len(split_range(self.redundant_experts, self.layout.tp_size)[self.tp_rank])
        return fill_slots(self.expert_spans(ffn), num_redundant)

    def expert_columns(self, ffn: MoESpec) -> range:
        """This rank's columns of the intermediate size of each of its experts."""
        return range(ffn.expert.intermediate_size) if ffn.expert_parallel else self.ffn(ffn.expert)

    def vocabulary(self, vocab_size: int) -> range:
        """This rank's rows of the embedding and of the LM head."""
        return self.vocabularies(vocab_size)[self.tp_rank]

    def vocabularies(self, vocab_size: int) -> tuple[range, ...]:
        """`vocabulary` of every rank of the tensor-parallel group."""
        return split_range(vocab_size, self.layout.tp_size, self.weights, UNIT)

    def count_state_bytes(self, spec: ModelSpec, num_drafts: int = 0) -> int:
        """Bytes of a sequence's states in this rank's layers, with the inputs of `num_drafts` drafts."""
        return sum(4 * self.count_state(mixer, num_drafts) for mixer in self.list_delta_nets(spec).values())

    def count_state(self, mixer: GatedDeltaNetSpec, num_drafts: int = 0) -> int:
        """Float32 numbers of a sequence's state in a layer, with the inputs of `num_drafts` drafts."""
        share = self.attention(mixer)
        return mixer.count_state(len(share.heads), len(share.kv_heads), num_drafts)

    def list_delta_nets(self, spec: ModelSpec) -> dict[int, GatedDeltaNetSpec]:
        """This rank's layers that have states."""
        mixers = ((index, spec.layers[index].attention) for index in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, GatedDeltaNetSpec)}

    def kv_groups(self, spec: ModelSpec) -> tuple[KVGroup, ...]:
        """All KV groups of the model in order, each with only the layers and KV heads of this rank."""
        groups = []
        for group in spec.kv_groups:
            head_share = self.attention(spec.layers[group.layers[0]].attention)
            layers = tuple(layer for layer in group.layers if layer in self.layers)
            groups.append(replace(group, layers=layers, num_kv_heads=len(head_share.kv_heads)))
        return tuple(groups)


def build_shard(
    spec: ModelSpec,
    layout: ParallelLayout,
    rank: int,
    weights: tuple[float, ...] | None = None,
    layers: Sequence[int] | None = None,
    *,
    engine: int = 0,
    engines: int = 1,
    redundant_experts: int = 0,
) -> Shard:
    """Build the shard of `rank`. layers: layers per stage (--pipeline-parallel-layers); by default, balanced by cost.
    engine, engines, redundant_experts: as in `Shard`."""
    stage_layers = split_model_layers(spec, layout, layers)[layout.pp_rank(rank)]
    return Shard(layout, rank, stage_layers, weights, engine, engines, redundant_experts)


def build_rank_shard(spec: ModelSpec, config: Config, rank: int) -> Shard:
    """The shard of a rank of the engine with this configuration."""
    return build_shard(
        spec,
        ParallelLayout(config.tensor_parallel_size, config.pipeline_parallel_size),
        rank,
        config.tensor_parallel_split,
        config.pipeline_parallel_layers,
        engine=config.data_parallel_rank if config.expert_engines > 1 else 0,
        engines=config.expert_engines,
        redundant_experts=config.redundant_experts,
    )


def split_model_layers(
    spec: ModelSpec, layout: ParallelLayout, layers: Sequence[int] | None = None
) -> tuple[range, ...]:
    """The layers of each stage. layers: as `build_shard` takes it."""
    if layers is not None:
        starts = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(starts))
    costs = [layer_cost(layer, spec.hidden_size) for layer in spec.layers]
    outer = spec.embedding_size or spec.hidden_size
    times = 2 if spec.int8 is not None and not spec.int8_lm_head else 1  # a head in 16 bits next to layers in 8
    return split_layers(costs, layout.pp_size, first=times * spec.hidden_size, last=times * spec.vocab_size * outer)


def layer_cost(layer: LayerSpec, width: int) -> float:
    """Number of weights read per step, to which its time is proportional. Assumes that the tokens of a step use all
    experts."""
    mixer = layer.attention
    ffn = layer.ffn
    attention = _mixer_cost(mixer, width)
    if isinstance(ffn, MLPSpec):
        return attention + mlp_cost(ffn, width)
    experts = ffn.router.num_experts * (width + mlp_cost(ffn.expert, width))
    return attention + experts + (0 if ffn.shared_expert is None else mlp_cost(ffn.shared_expert, width))


def _mixer_cost(mixer: AnyAttentionSpec, width: int) -> float:
    if isinstance(mixer, GatedDeltaNetSpec):
        keys = mixer.num_kv_heads * mixer.key_dim
        values = mixer.num_heads * mixer.value_dim
        return width * (2 * keys + 3 * values + 2 * mixer.num_heads)
    if not isinstance(mixer, MLASpec):
        return width * mixer.head_dim * ((3 if mixer.output_gate else 2) * mixer.num_heads + 2 * mixer.num_kv_heads)
    query = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    value = mixer.qk_nope_head_dim + mixer.v_head_dim
    rank = mixer.q_lora_rank
    queries = width * mixer.num_heads * query if rank is None else rank * (width + mixer.num_heads * query)
    keys = width * mixer.head_dim + mixer.kv_lora_rank * mixer.num_heads * value
    return queries + keys + width * mixer.num_heads * mixer.v_head_dim


def mlp_cost(ffn: MLPSpec, width: int) -> float:
    return width * ffn.intermediate_size * (3 if ffn.gated else 2)


def describe_split(spec: ModelSpec, config: Config) -> list[str]:
    """Build lines for the start-up log that say how much each rank and each stage holds. Empty for a single rank."""
    layout = ParallelLayout(config.tensor_parallel_size, config.pipeline_parallel_size)
    shards = [build_rank_shard(spec, config, rank) for rank in range(layout.size)]
    tp_shards = shards[: layout.tp_size]
    lines = []
    if layout.tp_size > 1:
        parts = _describe_tensor_split(spec, tp_shards)
        lines.append(f"Tensor parallel, {layout.tp_size} ranks: {', '.join(parts)}")
    if config.expert_engines > 1:
        parts = _describe_expert_split(spec, tp_shards)
        lines.append(f"Expert parallel, {config.expert_engines} engines: {', '.join(parts)}")
    if layout.pp_size > 1:
        stages = _format_sizes("layers", (shard.layers for shard in shards[:: layout.tp_size]))
        lines.append(f"Pipeline parallel, {layout.pp_size} stages: {stages}")
    return lines


def _describe_tensor_split(spec: ModelSpec, shards: Sequence[Shard]) -> list[str]:
    """shards: of the ranks of one stage."""
    mixers = {
        (isinstance(mixer, GatedDeltaNetSpec), mixer.num_heads, mixer.num_kv_heads): mixer
        for mixer in (layer.attention for layer in spec.layers)
    }
    parts = []
    for (is_delta_net, _, num_kv_heads), mixer in mixers.items():
        own, shared = ("linear attention heads", "key heads") if is_delta_net else ("query heads", "KV heads")
        heads = [shard.attention(mixer) for shard in shards]
        parts.append(_format_sizes(own, (one.heads for one in heads)))
        parts.append(_format_sizes(f"{shared} (of {num_kv_heads})", (one.kv_heads for one in heads)))
    for ffn in dict.fromkeys(layer.ffn for layer in spec.layers):
        if isinstance(ffn, MLPSpec):
            parts.append(_format_sizes("feed-forward columns", (shard.ffn(ffn) for shard in shards)))
        elif not ffn.expert_parallel:
            parts.append(_format_sizes("columns of each expert", (shard.expert_columns(ffn) for shard in shards)))
        elif shards[0].engines == 1:
            parts.append(_format_experts(ffn, (shard.experts(ffn) for shard in shards)))
    parts.append(_format_sizes("vocabulary rows", shards[0].vocabularies(spec.vocab_size)))
    return parts


def _describe_expert_split(spec: ModelSpec, shards: Sequence[Shard]) -> list[str]:
    """shards: of the ranks of one stage of one engine."""
    placements = {
        layer.ffn: [shard.place_experts(layer.ffn) for shard in shards]
        for layer in spec.layers
        if isinstance(layer.ffn, MoESpec)
    }
    return [
        _format_experts(ffn, (placement[engine] for engine in range(shards[0].engines) for placement in by_rank))
        for ffn, by_rank in placements.items()
    ]


def _format_experts(ffn: MoESpec, parts: Iterable[Sequence[int]]) -> str:
    return _format_sizes(f"experts (of {ffn.router.num_experts})", parts)


def _format_sizes(what: str, parts: Iterable[Sequence[int]]) -> str:
    return f"{what} {'+'.join(str(len(part)) for part in parts)}"
