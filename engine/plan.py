"""Whether a model fits, and how to spread it: from config.json and the options alone, before anything is loaded.

The sums are the engine's own: `model.count` for weights, `execute.memory` for the KV cache, `execute.activations` for
a step. Torch-free; part of the seam, so that the command line can show what comes out. Knows no checkpoint's weights:
where a file turns out to hold a head of its own beside a tied embedding, it takes more than is said here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from serve_llm.engine.config import Config, checkpoint_dtype, resolve
from serve_llm.engine.devices import VISIBLE, gpu_names
from serve_llm.engine.errors import OptionError
from serve_llm.engine.execute import activations, memory
from serve_llm.engine.execute.memory import CacheLayout, capacity_lines, size_text
from serve_llm.engine.gpus import GPUS
from serve_llm.engine.machines import Machines
from serve_llm.engine.model.config import passed_over
from serve_llm.engine.model.count import weight_bytes
from serve_llm.engine.model.registry import read_model, served
from serve_llm.engine.model.shard import Shard, layers_of, own_shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.options import Options
from serve_llm.engine.parallel.layout import Grid

__all__ = ["GridPlan", "Machinery", "Plan", "RankPlan", "capacity_lines", "describe_memory", "make_plan", "size_text"]

logger = logging.getLogger(__name__)

GPUS_PER_NODE = 8
CUDA_CONTEXT = 600 << 20  # bytes that CUDA and its libraries take on a GPU beside torch's tensors; an estimate
MOST_NODES = 16  # that are looked at to say how many would hold a model


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds, in bytes."""

    rank: int
    layers: range
    heads: int
    kv_heads: int
    weights: int
    activations: int  # of the largest step
    kv_cache: int
    room: int  # what this rank may take in all

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv_cache


@dataclass(frozen=True)
class GridPlan:
    """One way to spread the model."""

    grid: Grid
    ranks: tuple[RankPlan, ...]
    layout: CacheLayout  # of the first rank; num_blocks: agreed over the ranks
    needed: int  # blocks of a request of full length
    cache_tokens: int
    concurrency: float  # requests of full length at a time
    lacking: int  # bytes that the neediest rank is short of; 0: it fits

    @property
    def fits(self) -> bool:
        return self.lacking == 0


@dataclass(frozen=True)
class Machinery:
    """Where the ranks run, all decided."""

    kind: str  # of GPU; "" when ranks are on CPUs
    memory: int  # bytes of a GPU, or of a machine
    per_node: int  # ranks that a machine is meant for
    nodes: int
    nvlink: bool


@dataclass(frozen=True)
class Plan:
    config: Config
    spec: ModelSpec
    machinery: Machinery
    chosen: GridPlan  # the sizes that were asked for, else those suggested, else the largest that there is room for
    suggested: GridPlan | None  # None: nothing fits
    reason: str  # for the suggestion, or why there is none
    nodes_needed: int | None  # machines of this kind that would hold it, where those given do not


@dataclass(frozen=True)
class _Planner:
    """The model and the machines, all decided."""

    spec: ModelSpec
    config: Config
    machinery: Machinery

    def spread(self, grid: Grid, weights: tuple[float, ...] | None, layers: tuple[int, ...] | None) -> GridPlan:
        """What every rank of the grid holds."""
        config, element = self.config, self.config.element_bytes
        local = 1  # ranks that share `memory`
        if config.device == "cpu":
            local = -(-grid.size * config.data_parallel_size // self.machinery.nodes)
        stages = layers_of(self.spec, grid, layers)
        engines = config.expert_engines  # of which the first holds most
        shards = [Shard(grid, rank, stages[grid.stage(rank)], weights, engines=engines) for rank in range(grid.size)]
        empty = [_empty_cache(self.spec, config, shard) for shard in shards]
        needed = empty[0].blocks_per_request(config.max_model_len, config.max_num_batched_tokens)
        ranks: list[RankPlan] = []
        num_blocks, lacking = [], [0]
        for shard, layout in zip(shards, empty, strict=True):
            held = weight_bytes(self.spec, shard, element, config.device).held
            step = activations.peak_bytes(self.spec, shard, layout.groups, config, element)
            cache, room = self._cache(held, step, needed * layout.block_bytes, local)
            num_blocks.append(cache // layout.block_bytes)
            wanted = cache if config.kv_cache_memory else needed * layout.block_bytes
            lacking += [held + step + wanted - room, needed * layout.block_bytes - cache]
            heads = [shard.attention(self.spec.layers[index].mixer) for index in shard.layers]
            counts = max(len(h.heads) for h in heads), max(len(h.kv_heads) for h in heads)
            ranks.append(RankPlan(shard.rank, shard.layers, *counts, held, step, layout.block_bytes, room))
        agreed = min(num_blocks)
        layout = replace(empty[0], num_blocks=agreed)
        return GridPlan(
            grid,
            tuple(replace(rank, kv_cache=agreed * rank.kv_cache) for rank in ranks),
            layout,
            needed,
            memory.cache_tokens(layout, config.max_model_len, config.max_num_batched_tokens),
            agreed / needed,
            max(lacking),
        )

    def _cache(self, held: int, step: int, one_request: int, local: int) -> tuple[int, int]:
        """Bytes of one rank's KV cache, and those that it may take in all. As `Worker` does it."""
        config = self.config
        if config.device == "cpu":
            room = self.machinery.memory // local
            cache = memory.default_cpu_bytes(one_request, local, max(0, self.machinery.memory - local * held))
        else:
            room = int(self.machinery.memory * config.gpu_memory_utilization) - CUDA_CONTEXT
            cache = max(0, room - held - step)
        return config.kv_cache_memory or cache, room

    def candidates(self) -> Iterator[tuple[Grid, str]]:
        """The ways that the field's guidance names, smallest first, each with its reason.

        vLLM's "Parallelism and Scaling": one GPU if the model fits; tensor parallel within a node; tensor parallel of
        a node's GPUs and pipeline parallel over nodes; pipeline parallel alone where the heads do not divide or the
        GPUs have no NVLink.
        """
        device = "machine" if self.config.device == "cpu" else "GPU"
        yield Grid(), f"it fits one {device}"
        heads = math.gcd(*(layer.mixer.heads for layer in self.spec.layers))
        whole = self.machinery.nvlink and heads % self.machinery.per_node == 0
        if self.machinery.nvlink:
            for size in range(2, self.machinery.per_node + 1):
                if heads % size == 0:
                    yield Grid(size, 1), "tensor parallel within a node, as few GPUs as hold it"
        if whole and self.machinery.per_node > 1:
            for nodes in range(2, min(self.machinery.nodes, len(self.spec.layers)) + 1):
                yield (
                    Grid(self.machinery.per_node, nodes),
                    "tensor parallel within each node, pipeline parallel over nodes",
                )
            return
        if self.machinery.per_node == 1:
            why = f"pipeline parallel over {device}s"
        elif self.machinery.nvlink:
            why = f"pipeline parallel alone, because {heads} heads do not divide by {self.machinery.per_node} GPUs"
        else:
            why = "pipeline parallel alone, because the GPUs have no NVLink"
        for size in range(2, min(self.machinery.per_node * self.machinery.nodes, len(self.spec.layers)) + 1):
            yield Grid(1, size), why

    def has_devices(self, grid: Grid) -> bool:
        """Whether the ranks of all data-parallel engines find a place. A CPU takes any number."""
        return self.config.device == "cpu" or grid.size * self.config.data_parallel_size <= self.num_devices

    @property
    def num_devices(self) -> int:
        """On which those ranks can be: engines that share out experts are on one node."""
        return self.machinery.per_node * (self.machinery.nodes if self.config.expert_engines == 1 else 1)

    def suggest(self) -> tuple[GridPlan | None, GridPlan, str]:
        """The first candidate that fits, the last one looked at, and the reason."""
        whole = self.spread(Grid(), None, None)
        (alone,) = whole.ranks
        least = alone.weights + whole.needed * whole.layout.block_bytes
        stage = Shard(Grid(1, 2), 0, range(1))
        step = activations.peak_bytes(self.spec, stage, whole.layout.groups, self.config, self.config.element_bytes)
        last = Grid()
        for last, why in self.candidates():
            if last.pipeline > 1 and self.config.expert_engines > 1:
                break  # nor can they have stages
            each = step if last.tensor == 1 else 0  # whatever the layers of a stage, its step takes as much
            if self.has_devices(last) and least <= (alone.room - each) * last.size:  # else it lacks room anyhow
                found = self.spread(last, None, None)
                if found.fits:
                    return found, found, why
        return None, self.spread(last, None, None), "no way to spread it over these machines fits"


def make_plan(options: Options, machines: Machines, raw: Mapping[str, object]) -> Plan:
    """raw: config.json. Raises OptionError for what cannot be combined, ModelError for what cannot be served."""
    if options.model_impl == "transformers":
        raise OptionError(
            "--model-impl: what transformers' own code takes is not known before it is loaded; start the server, whose "
            "log says it, or leave it away"
        )
    device = _device(options, machines)
    spec, _ = read_model(raw, options.allow_unknown_config)
    if options.allow_unknown_config:
        logger.warning("%s", passed_over(options.allow_unknown_config))
    config = resolve(
        options,
        "",
        device=device,
        checkpoint_dtype=checkpoint_dtype(raw),
        model_max_len=spec.max_position,
        num_layers=len(spec.layers),
        stores_int8=spec.int8 is not None,
        has_experts=spec.has_experts,
        executor_backend="mp",
    )
    spec = served(spec, config)
    kind = GPUS.get(machines.gpu or "")
    machinery = Machinery(
        kind="" if device == "cpu" else machines.gpu or "GPUs",
        memory=machines.memory or (kind.num_bytes if kind else memory.free_memory()),
        per_node=1 if device == "cpu" else machines.gpus_per_node or GPUS_PER_NODE,
        nodes=machines.nodes,
        nvlink=device == "cuda" and machines.nvlink and (kind is None or kind.nvlink),
    )
    planner = _Planner(spec, config, machinery)
    suggested, last, reason = planner.suggest()
    chosen = _stated(planner, options) or suggested or last
    needed = None if suggested else _nodes_needed(planner)
    return Plan(config, spec, machinery, chosen, suggested, reason, needed)


def _stated(planner: _Planner, options: Options) -> GridPlan | None:
    grid = Grid(options.tensor_parallel_size, options.pipeline_parallel_size)
    if grid.size == 1:
        return None
    if not planner.has_devices(grid):
        raise OptionError(
            f"tensor-parallel x pipeline-parallel x data-parallel size needs {grid.size * options.data_parallel_size} "
            f"GPUs, but there are {planner.num_devices}"
        )
    return planner.spread(grid, options.tensor_parallel_split, options.pipeline_parallel_layers)


def describe_memory(spec: ModelSpec, config: Config, num_blocks: int) -> str:
    """For the start-up log: what the ranks hold, in their order. num_blocks: of the KV cache, agreed over the ranks."""
    grid = Grid(config.tensor_parallel_size, config.pipeline_parallel_size)
    weights, caches = [], []
    for rank in range(grid.size):
        shard = own_shard(spec, config, rank)
        weights.append(size_text(weight_bytes(spec, shard, config.element_bytes, config.device).held))
        caches.append(size_text(num_blocks * _empty_cache(spec, config, shard).block_bytes))
    return f"Weights: {' + '.join(weights)}, KV cache: {' + '.join(caches)}"


def _empty_cache(spec: ModelSpec, config: Config, shard: Shard) -> CacheLayout:
    """Of the shard's rank, without blocks."""
    return memory.plan_cache(
        *(spec.kv_groups, shard.kv_groups(spec), config.cache_row, config.block_size, 0),
        max_model_len=config.max_model_len,
        max_chunk=config.max_num_batched_tokens,
    )


def _nodes_needed(planner: _Planner) -> int | None:
    found, _, _ = replace(planner, machinery=replace(planner.machinery, nodes=MOST_NODES)).suggest()
    if found is None:
        return None
    return -(-found.grid.size * planner.config.data_parallel_size // planner.machinery.per_node)


def _device(options: Options, machines: Machines) -> str:
    """Whether "cpu" or "cuda": the daemon's rule, with what was said about machines in the place of a look at them."""
    if machines.gpu and machines.memory:
        raise OptionError("--gpu and --memory both say how much memory there is; give one of them")
    if options.device == "cuda" and not (machines.gpu or machines.memory):
        raise OptionError("--device cuda: say which GPU by --gpu or --memory")
    if options.device == "cuda" or (options.device == "auto" and (machines.gpu or machines.memory)):
        return "cuda"
    if machines.gpu:
        raise OptionError("--gpu and --device cpu exclude each other; give --memory for a machine without GPUs")
    if machines.gpus_per_node:
        raise OptionError("--gpus-per-node: say which GPUs by --gpu or --memory")
    if options.device == "auto" and gpu_names(os.environ.get(VISIBLE)):
        raise OptionError("this machine has GPUs, which a daemon would use: name them by --gpu, or give --device cpu")
    return "cpu"
