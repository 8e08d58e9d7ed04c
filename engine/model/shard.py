"""Which part of a model one rank holds: `ModelSpec` cut by a `Grid`. Torch-free arithmetic; `plan` counts with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from serve_llm.engine.config import Config
from serve_llm.engine.model.spec import MLA, Dense, KVGroup, Layer, Mixer, ModelSpec, MoE
from serve_llm.engine.parallel.layout import Grid, HeadShare, head_shares, shares, stage_layers

UNIT = 16  # feed-forward columns and vocabulary rows are shared out in such units where they divide


@dataclass(frozen=True)
class Shard:
    """One rank's part. With the default grid it is the whole model."""

    grid: Grid
    rank: int
    layers: range  # of the whole model's
    weights: tuple[float, ...] | None = None  # --tensor-parallel-split
    engine: int = 0  # which of the engines that share out whole experts
    engines: int = 1

    @property
    def place(self) -> int:
        return self.grid.place(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether ids enter here: this stage holds the embedding."""
        return self.grid.stage(self.rank) == 0

    @property
    def is_last(self) -> bool:
        """Whether hidden rows become logits here: this stage holds the final norm and the head."""
        return self.grid.stage(self.rank) == self.grid.pipeline - 1

    @property
    def is_output(self) -> bool:
        """Whether this rank samples."""
        return self.rank == self.grid.output_rank

    def holds(self, parameter: str, spec: ModelSpec) -> bool:
        """Whether a part of this parameter is here; not asked of embedding.weight and head.weight."""
        kind, *rest = parameter.split(".")
        if kind == "layers":
            mixer, ffn = spec.layers[int(rest[0])].mixer, spec.layers[int(rest[0])].ffn
            elsewhere = rest[2] == "experts" and isinstance(ffn, MoE) and int(rest[3]) not in self.experts(ffn)
            if isinstance(mixer, MLA) and rest[1] == "attention" and rest[2] != "output":
                elsewhere = not self.attention(mixer).heads
            if rest[2] in ("q_norm", "k_norm") and len(rest) == 5:  # of each head
                own = self.attention(mixer)
                elsewhere = int(rest[3]) not in (own.heads if rest[2] == "q_norm" else own.kv_heads)
            return int(rest[0]) in self.layers and not elsewhere
        return self.is_first if kind in ("positions", "project_in") else self.is_last

    def attention(self, mixer: Mixer) -> HeadShare:
        return head_shares(mixer.heads, mixer.kv_heads, self.grid.tensor, self.weights)[self.place]

    def ffn(self, ffn: Dense) -> range:
        """Columns of the feed-forward's inner dimension."""
        return shares(ffn.width, self.grid.tensor, self.weights, UNIT)[self.place]

    def experts(self, ffn: MoE) -> range:
        """Those of which a part is here."""
        return self.expert_spans(ffn)[self.engine]

    def expert_spans(self, ffn: MoE) -> tuple[range, ...]:
        """The same of this rank's place in every engine. Together they are what one engine alone would have here, so
        that sums over experts have the order that they would have there."""
        count = ffn.router.num_experts
        if not ffn.whole:
            return (range(count),)
        own = shares(count, self.grid.tensor, self.weights)[self.place]
        return tuple(own[part.start : part.stop] for part in shares(len(own), self.engines))

    def expert_columns(self, ffn: MoE) -> range:
        """Columns of the inner dimension of each of them."""
        return range(ffn.expert.width) if ffn.whole else self.ffn(ffn.expert)

    def vocabulary(self, vocab_size: int) -> range:
        """Rows of the embedding and of the head."""
        return self.vocabularies(vocab_size)[self.place]

    def vocabularies(self, vocab_size: int) -> tuple[range, ...]:
        """The same of every place of the tensor-parallel group."""
        return shares(vocab_size, self.grid.tensor, self.weights, UNIT)

    def kv_groups(self, spec: ModelSpec) -> tuple[KVGroup, ...]:
        """The model's KV groups, all of them in their order, each with the layers and KV heads of this rank."""
        found = []
        for group in spec.kv_groups:
            own = self.attention(spec.layers[group.layers[0]].mixer)
            layers = tuple(layer for layer in group.layers if layer in self.layers)
            found.append(replace(group, layers=layers, kv_heads=len(own.kv_heads)))
        return tuple(found)


def shard_of(
    spec: ModelSpec,
    grid: Grid,
    rank: int,
    weights: tuple[float, ...] | None = None,
    layers: Sequence[int] | None = None,
    *,
    engine: int = 0,
    engines: int = 1,
) -> Shard:
    """The part of `rank`. layers: how many each stage gets (--pipeline-parallel-layers), by default as costs say.
    engine, engines: as in `Shard`."""
    return Shard(grid, rank, layers_of(spec, grid, layers)[grid.stage(rank)], weights, engine, engines)


def own_shard(spec: ModelSpec, config: Config, rank: int) -> Shard:
    """The part of a rank of the engine that has this configuration."""
    return shard_of(
        spec,
        Grid(config.tensor_parallel_size, config.pipeline_parallel_size),
        rank,
        config.tensor_parallel_split,
        config.pipeline_parallel_layers,
        engine=config.data_parallel_rank if config.expert_engines > 1 else 0,
        engines=config.expert_engines,
    )


def layers_of(spec: ModelSpec, grid: Grid, layers: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage. layers: as `shard_of` takes it."""
    if layers is not None:
        starts = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(starts))
    costs = [layer_cost(layer, spec.width) for layer in spec.layers]
    outer = spec.embedding_width or spec.width
    times = 1 if spec.int8 is None else 2  # embedding and head keep 16 bits where layers have 8
    return stage_layers(costs, grid.pipeline, first=times * spec.width, last=times * spec.vocab_size * outer)


def layer_cost(layer: Layer, width: int) -> float:
    """Weights read per step, which is what its time follows; an embedding reads one row, a head all of it, and the
    tokens of a busy step go through all experts."""
    mixer, ffn = layer.mixer, layer.ffn
    attention = _mixer_cost(mixer, width)
    if isinstance(ffn, Dense):
        return attention + dense_cost(ffn, width)
    experts = ffn.router.num_experts * (width + dense_cost(ffn.expert, width))
    return attention + experts + (0 if ffn.shared is None else dense_cost(ffn.shared, width))


def _mixer_cost(mixer: Mixer, width: int) -> float:
    if not isinstance(mixer, MLA):
        return width * mixer.head_dim * 2 * (mixer.heads + mixer.kv_heads)
    query, value = mixer.nope_dim + mixer.rope_dim, mixer.nope_dim + mixer.value_dim
    rank = mixer.q_lora_rank
    queries = width * mixer.heads * query if rank is None else rank * (width + mixer.heads * query)
    keys = width * mixer.head_dim + mixer.kv_lora_rank * mixer.heads * value
    return queries + keys + width * mixer.heads * mixer.value_dim


def dense_cost(ffn: Dense, width: int) -> float:
    return width * ffn.width * (3 if ffn.gated else 2)


def describe_split(
    spec: ModelSpec,
    grid: Grid,
    weights: tuple[float, ...] | None = None,
    layers: Sequence[int] | None = None,
    *,
    engines: int = 1,
) -> list[str]:
    """For the start-up log: how much each rank and each stage gets. Nothing if there is one rank. Arguments as
    `shard_of` takes them."""
    shards = [shard_of(spec, grid, rank, weights, layers, engines=engines) for rank in range(grid.size)]
    places, lines = shards[: grid.tensor], []

    def say(what: str, own: Iterable[range]) -> str:
        return f"{what} {'+'.join(str(len(part)) for part in own)}"

    if grid.tensor > 1:
        parts = []
        for mixer in {(layer.mixer.heads, layer.mixer.kv_heads): layer.mixer for layer in spec.layers}.values():
            heads = [shard.attention(mixer) for shard in places]
            parts.append(say("query heads", (one.heads for one in heads)))
            parts.append(say(f"KV heads (of {mixer.kv_heads})", (one.kv_heads for one in heads)))
        for ffn in dict.fromkeys(layer.ffn for layer in spec.layers):
            if isinstance(ffn, Dense):
                parts.append(say("feed-forward columns", (shard.ffn(ffn) for shard in places)))
            elif ffn.whole and engines == 1:
                parts.append(say(f"experts (of {ffn.router.num_experts})", (shard.experts(ffn) for shard in places)))
            elif not ffn.whole:
                parts.append(say("columns of each expert", (shard.expert_columns(ffn) for shard in places)))
        parts.append(say("vocabulary rows", places[0].vocabularies(spec.vocab_size)))
        lines.append(f"Tensor parallel, {grid.tensor} ranks: {', '.join(parts)}")
    if engines > 1:
        whole = [ffn for ffn in dict.fromkeys(layer.ffn for layer in spec.layers) if isinstance(ffn, MoE)]
        held = [[shard.expert_spans(ffn)[engine] for engine in range(engines) for shard in places] for ffn in whole]
        parts = [say(f"experts (of {ffn.router.num_experts})", own) for ffn, own in zip(whole, held, strict=True)]
        lines.append(f"Expert parallel, {engines} engines: {', '.join(parts)}")
    if grid.pipeline > 1:
        lines.append(
            f"Pipeline parallel, {grid.pipeline} stages: {say('layers', (s.layers for s in shards[:: grid.tensor]))}"
        )
    return lines
