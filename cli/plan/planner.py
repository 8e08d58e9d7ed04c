"""Predict from config.json and the options whether a model fits, and choose how to spread it over GPUs or machines.

Sums per rank: `weights.weight_bytes`, `activations.peak_bytes`, and the engine's own `worker.kv_cache`. No torch.
Only config.json is read, so a checkpoint whose head differs from its tied embedding takes more than predicted here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from serve_llm.cli.plan import activations
from serve_llm.cli.plan.draft_model import count_draft_bytes, read_draft_model
from serve_llm.cli.plan.hardware import Hardware, HardwareOptions, choose_device, resolve_hardware
from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.config import Config, check_options, resolve
from serve_llm.engine.draft_model.resolve import DraftModelConfig
from serve_llm.engine.model.config import describe_ignored_keys
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.lora_targets import count_adapter_bytes, find_served_targets
from serve_llm.engine.model.pooling import resolve_pooling
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.shard import Shard, split_model_layers
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.stored_quantization import NOT_NEEDED, accept_stored_format, find_stored_format
from serve_llm.engine.weights.headers import find_checkpoint_dtype
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.kv_cache import KVCacheConfig

logger = logging.getLogger(__name__)

CUDA_CONTEXT_BYTES = 600 << 20  # estimate: memory that CUDA and its libraries take outside torch's allocator
MAX_RANKS = 512  # engines with more are not planned
MAX_NODES_TRIED = 16  # when searching for the number of machines that would hold the model


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds. Sizes in bytes."""

    rank: int
    layers: range
    heads: int
    kv_heads: int
    weights: int
    adapters: int  # reserved for LoRA adapters
    draft_model: int  # weights and KV cache of the draft model, or of this rank's shard of it
    activations: int  # in the largest step
    kv_cache: int
    room: int  # bytes that this rank may use

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.draft_model + self.activations + self.kv_cache


@dataclass(frozen=True)
class LayoutPlan:
    """What the ranks of one parallel layout hold."""

    layout: ParallelLayout
    ranks: tuple[RankPlan, ...]
    cache: KVCacheConfig  # the first rank's, with the number of blocks for which every rank has room
    blocks_per_request: int  # for a request of full length
    cache_tokens: int
    concurrency: float  # requests of full length that run at the same time
    missing_bytes: int  # on the rank that lacks the most; 0 if its memory suffices
    missing_for: str  # what `missing_bytes` counts, for messages
    missing_devices: int  # for the ranks of all data-parallel engines

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0 and self.missing_devices == 0


@dataclass(frozen=True)
class MemoryPlan:
    """The result of `make_plan`."""

    config: Config
    spec: ModelSpec
    hardware: Hardware
    chosen: LayoutPlan  # for the requested sizes; otherwise the suggestion, or the largest layout if nothing fits
    suggested: LayoutPlan | None  # None if nothing fits
    reason: str  # why it is suggested, or why nothing is
    nodes_needed: int | None  # number of such machines that would hold the model, if these do not


@dataclass(frozen=True)
class _Planner:
    spec: ModelSpec
    config: Config
    hardware: Hardware
    draft: DraftModelConfig | None = None

    def plan_layout(
        self,
        layout: ParallelLayout,
        tensor_split: tuple[float, ...] | None = None,
        stage_layers: tuple[int, ...] | None = None,
    ) -> LayoutPlan:
        """tensor_split, stage_layers: as `build_shard` takes its weights and layers."""
        config, spec = self.config, self.spec
        stages = split_model_layers(spec, layout, stage_layers)
        ranks: list[RankPlan] = []
        caches: list[KVCacheConfig] = []
        num_blocks: list[int] = []
        missing = [(0, "")]
        request = f"the KV cache of one request of {config.max_model_len:,} tokens"
        for rank in range(layout.size):
            # With expert-parallel engines, the first engine holds the most experts.
            layers = stages[layout.pp_rank(rank)]
            shard = Shard(layout, rank, layers, tensor_split, 0, config.expert_engines, config.redundant_experts)
            cache = kv_cache.plan_empty_cache(spec, shard, config)
            caches.append(cache)
            blocks_per_request = caches[0].blocks_per_request(config.max_model_len, config.max_num_batched_tokens)
            request_bytes = replace(cache, num_blocks=blocks_per_request).num_bytes
            weights = weight_bytes(spec, shard, config.element_bytes, config.device).held
            adapters = count_adapter_bytes(spec, shard, config)
            step = activations.peak_bytes(spec, shard, cache.groups, config, config.element_bytes)
            draft_model = count_draft_bytes(self.draft, self._find_draft_memory(layout), layout, rank)
            held = weights + adapters + draft_model
            cache_bytes, room = self._size_cache(held, step, blocks_per_request, cache, layout)
            num_blocks.append(cache.fill(cache_bytes).num_blocks)
            wanted = cache_bytes if config.kv_cache_memory else request_bytes
            cache_text = "--kv-cache-memory" if config.kv_cache_memory else request
            others = ("adapters, " if adapters else "") + ("the draft model, " if draft_model else "")
            missing.append((held + step + wanted - room, f"weights, {others}one step, and {cache_text}"))
            missing.append((request_bytes - cache_bytes, self._describe_cache_limit(request)))
            if config.kv_offload_memory is not None:
                missing.append((cache.block_bytes - config.kv_offload_memory, "one block in --kv-offload-memory"))
            mixers = (spec.layers[index].attention for index in shard.layers)
            heads = [shard.attention(mixer) for mixer in mixers if not isinstance(mixer, GatedDeltaNetSpec)]
            ranks.append(
                RankPlan(
                    rank=shard.rank,
                    layers=shard.layers,
                    heads=max((len(share.heads) for share in heads), default=0),
                    kv_heads=max((len(share.kv_heads) for share in heads), default=0),
                    weights=weights,
                    adapters=adapters,
                    draft_model=draft_model,
                    activations=step,
                    kv_cache=0,
                    room=room,
                )
            )
        if config.device == "cpu" and layout.size > 1:
            local_ranks = -(-layout.size // self.hardware.nodes)
            missing.append((local_ranks * kv_cache.RANK_BYTES - self.hardware.memory, "the processes of the ranks"))
        common_blocks = min(num_blocks)
        first_cache = replace(caches[0], num_blocks=common_blocks)
        return LayoutPlan(
            layout=layout,
            ranks=tuple(
                replace(rank, kv_cache=replace(cache, num_blocks=common_blocks).num_bytes)
                for rank, cache in zip(ranks, caches, strict=True)
            ),
            cache=first_cache,
            blocks_per_request=blocks_per_request,
            cache_tokens=kv_cache.count_cache_tokens(first_cache, config.max_model_len, config.max_num_batched_tokens),
            concurrency=kv_cache.find_concurrency(first_cache, blocks_per_request),
            missing_bytes=max(missing)[0],
            missing_for=max(missing)[1],
            missing_devices=0 if self.has_devices(layout) else self._count_devices(layout) - self.num_devices,
        )

    def _find_draft_memory(self, layout: ParallelLayout) -> int:
        """Bytes of memory of which the draft model's KV cache takes a share."""
        if self.draft is None or not self.draft.is_on_ranks or self.config.device != "cpu":
            return self.hardware.memory
        return self.hardware.memory // -(-layout.size * self.config.data_parallel_size // self.hardware.nodes)

    def _describe_cache_limit(self, request: str) -> str:
        """What is short if only the KV cache is. request: one full-length request, in words."""
        if self.config.kv_cache_memory:
            return f"{request}, of which --kv-cache-memory holds less"
        if self.config.device == "cpu":
            return f"{request}, which may take {kv_cache.CPU_SHARE:.0%} of the memory that weights leave"
        return request

    def _size_cache(
        self, weights: int, step: int, blocks_per_request: int, empty: KVCacheConfig, layout: ParallelLayout
    ) -> tuple[int, int]:
        """Bytes of one rank's KV cache, and all bytes that the rank may use, by the rules of `Worker`."""
        config, memory = self.config, self.hardware.memory
        if config.device == "cpu":
            local_ranks = -(-layout.size * config.data_parallel_size // self.hardware.nodes)
            memory -= local_ranks * (config.kv_offload_memory or 0)
            room = memory // local_ranks
            free = max(0, memory - local_ranks * weights)
            request_bytes = blocks_per_request * empty.block_bytes
            cache = kv_cache.choose_cpu_cache_bytes(request_bytes, local_ranks, free, empty.max_state_bytes)
        else:
            room = int(memory * config.gpu_memory_utilization) - CUDA_CONTEXT_BYTES
            cache = max(0, room - weights - step)
        return config.kv_cache_memory or cache, room

    def list_candidates(self) -> Iterator[tuple[ParallelLayout, str]]:
        """The layouts that vLLM's "Parallelism and Scaling" recommends, smallest first, each with its reason.

        One GPU if the model fits; tensor parallel within a node; tensor parallel within each node and pipeline parallel
        across nodes; only pipeline parallel if the GPUs of a node do not divide the heads or have no NVLink.
        """
        hardware, num_layers = self.hardware, len(self.spec.layers)
        device = "machine" if self.config.device == "cpu" else "GPU"
        yield ParallelLayout(), f"it fits one {device}"
        heads = math.gcd(*(layer.attention.num_heads for layer in self.spec.layers))
        if hardware.has_nvlink:
            for size in range(2, hardware.ranks_per_node + 1):
                if heads % size == 0:
                    yield ParallelLayout(size, 1), "tensor parallel within a node, as few GPUs as hold it"
            if heads % hardware.ranks_per_node == 0 and hardware.ranks_per_node > 1:
                reason = "tensor parallel within each node, pipeline parallel over nodes"
                for nodes in range(2, min(hardware.nodes, num_layers) + 1):
                    yield ParallelLayout(hardware.ranks_per_node, nodes), reason
                return
        if hardware.ranks_per_node == 1:
            reason = f"pipeline parallel over {device}s"
        elif hardware.has_nvlink:
            reason = f"pipeline parallel alone, because {heads} heads do not divide by {hardware.ranks_per_node} GPUs"
        else:
            reason = "pipeline parallel alone, because the GPUs have no NVLink"
        for size in range(2, min(hardware.ranks_per_node * hardware.nodes, num_layers) + 1):
            yield ParallelLayout(1, size), reason

    @property
    def num_devices(self) -> int:
        """Devices for all data-parallel engines."""
        return self.hardware.ranks_per_node * self.hardware.nodes

    def _count_devices(self, layout: ParallelLayout) -> int:
        return layout.size * self.config.data_parallel_size

    def has_devices(self, layout: ParallelLayout) -> bool:
        """Whether there are devices for the ranks of all data-parallel engines. A CPU can hold any number of ranks."""
        return self.config.device == "cpu" or self._count_devices(layout) <= self.num_devices

    def _is_recommended(self, layout: ParallelLayout) -> bool:
        """Whether there are devices, with each stage on one machine, and the engine accepts the layout."""
        if self.config.enable_expert_parallel and layout.tp_size * self.config.data_parallel_size == 1:
            return False  # there are no ranks among which to divide experts
        stages = layout.pp_size * self.config.data_parallel_size
        per_node = self.hardware.ranks_per_node // layout.tp_size
        return self.has_devices(layout) and (self.config.device == "cpu" or stages <= self.hardware.nodes * per_node)

    def suggest(self) -> tuple[LayoutPlan | None, LayoutPlan, str]:
        """The first candidate that fits, the last candidate for which there are devices, and the reason."""
        whole = self.plan_layout(ParallelLayout())
        (single,) = whole.ranks
        request_bytes = replace(whole.cache, num_blocks=whole.blocks_per_request).num_bytes
        least = single.weights + single.adapters + single.draft_model + request_bytes
        one_layer = Shard(ParallelLayout(1, 2), 0, range(1))
        stage_step = activations.peak_bytes(
            self.spec, one_layer, whole.cache.groups, self.config, self.config.element_bytes
        )
        last = ParallelLayout()
        for layout, reason in self.list_candidates():
            if not self._is_recommended(layout):
                continue
            last = layout
            # A cheap bound skips most layouts. A stage's step takes the same memory however many layers it has.
            step = stage_step if layout.tp_size == 1 else 0
            if least <= (single.room - step) * layout.size:
                plan = self.plan_layout(layout)
                if plan.fits:
                    return plan, plan, reason
        return None, self.plan_layout(last), "no layout fits these machines"


def make_plan(
    options: EngineOptions,
    hardware_options: HardwareOptions,
    raw: Mapping[str, object],
    directory: Path | None = None,
    states_layout: bool = False,
) -> MemoryPlan:
    """Like `build_plan`, with warnings about the plan's assumptions."""
    plan = build_plan(options, hardware_options, raw, directory, states_layout)
    if options.allow_unknown_config:
        logger.warning("%s", describe_ignored_keys(options.allow_unknown_config))
    if accept_stored_format(options, raw) is not options:
        logger.info(NOT_NEEDED, find_stored_format(raw))
    dtype, source = find_checkpoint_dtype(raw, directory)
    if source and options.dtype == "auto":
        logger.warning("%s: %s", dtype, source)
    return plan


def build_plan(
    options: EngineOptions,
    hardware_options: HardwareOptions,
    raw: Mapping[str, object],
    directory: Path | None = None,
    states_layout: bool = False,
) -> MemoryPlan:
    """raw: config.json. directory: the checkpoint, if it may contain weights. states_layout: whether the user gave
    --tensor-parallel-size or --pipeline-parallel-size, even as 1. Raises OptionError for conflicting options,
    ModelError for a model that cannot be served."""
    if options.model_impl == "transformers":
        raise OptionError(
            "--model-impl: the memory that a model in transformers' own code takes is not known before it is loaded; "
            "start the server, which logs it, or omit the option"
        )
    options = accept_stored_format(options, raw)
    device = choose_device(options, hardware_options)
    spec, weights = read_model(raw, options.allow_unknown_config)
    check_options(options, spec.max_position, len(spec.layers), spec.has_experts)
    if spec.is_encoder:
        raise ModelError(
            f"{spec.architecture} is an encoder, which has no KV cache to plan: it takes its weights, once per engine"
        )
    generates, pooling = resolve_pooling(options, "", spec, None)
    config = resolve(
        options,
        str(directory or ""),
        device=device,
        checkpoint_dtype=find_checkpoint_dtype(raw, directory)[0],
        model_max_len=spec.max_position,
        stores_int8=spec.int8 is not None,
        stores_integers=spec.stores_integers,
        executor_backend="mp",
        generates=generates,
        pooling=pooling,
        has_states=spec.has_states,
    )
    spec = apply_engine_config(spec, config)
    if config.max_loras:
        find_served_targets(config, spec, weights)  # raises if the server refuses adapters
    hardware = resolve_hardware(hardware_options, device, config)
    planner = _Planner(spec, config, hardware, read_draft_model(options, config, raw))
    suggested, last, reason = planner.suggest()
    chosen = _plan_requested(planner, options, states_layout) or suggested or last
    nodes_needed = None if suggested else _find_nodes_needed(planner)
    return MemoryPlan(config, spec, planner.hardware, chosen, suggested, reason, nodes_needed)


def _plan_requested(planner: _Planner, options: EngineOptions, states_layout: bool) -> LayoutPlan | None:
    """The plan for -tp and -pp; None if the user gave neither."""
    layout = ParallelLayout(options.tensor_parallel_size, options.pipeline_parallel_size)
    if layout.size == 1 and not states_layout:
        return None
    if layout.size > MAX_RANKS:
        raise OptionError(f"--tensor-parallel-size x --pipeline-parallel-size: {layout.size} ranks, over {MAX_RANKS}")
    return planner.plan_layout(layout, options.tensor_parallel_split, options.pipeline_parallel_layers)


def _find_nodes_needed(planner: _Planner) -> int | None:
    def suggest(nodes: int) -> LayoutPlan | None:
        return replace(planner, hardware=replace(planner.hardware, nodes=nodes)).suggest()[0]

    plan = suggest(MAX_NODES_TRIED)
    if plan is None:
        return None
    fewest = -(-plan.layout.size * planner.config.data_parallel_size // planner.hardware.ranks_per_node)
    return next((nodes for nodes in range(fewest, MAX_NODES_TRIED) if suggest(nodes) is not None), MAX_NODES_TRIED)
